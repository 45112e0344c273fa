"""Trains one MoE layer expert-parallel over eight host devices, in shard_map.

    python examples/sharded_moe.py

Tokens are quantized before they travel; each device runs its own experts on what it gathered, and
the partial results are reduce-scattered. The same steps on one device give the same losses.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fp8moe_prims.moe import MoEConfig, moe_ffn

TOKENS, FEATURES, EXPERTS, EXPERT_FEATURES, TOP_K = 512, 64, 16, 64, 2
STEPS, RATE = 20, 0.3


def init():
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(
        random.standard_normal(shape) * shape[-2] ** -0.5, jnp.float32
    )
    x = jnp.asarray(random.standard_normal((TOKENS, FEATURES)), jnp.float32)
    target = jnp.tanh(x @ normal(FEATURES, FEATURES))
    params = dict(
        router=normal(FEATURES, EXPERTS),
        gate=normal(EXPERTS, FEATURES, EXPERT_FEATURES),
        up=normal(EXPERTS, FEATURES, EXPERT_FEATURES),
        down=normal(EXPERTS, EXPERT_FEATURES, FEATURES),
    )
    return params, x, target


def layer(params, x, axis):
    """y of this device's tokens and experts; the whole layer where axis is None."""
    config = MoEConfig(EXPERTS, TOP_K, ep_axis=axis)
    experts = params["gate"], params["up"], params["down"]
    return moe_ffn(x, x @ params["router"], *experts, config=config)[0]


def train(forward, params, x, target):
    """The losses of STEPS steps of gradient descent."""

    def loss(params, x, target):
        return jnp.mean((forward(params, x) - target) ** 2)

    @jax.jit
    def step(params, x, target):
        value, grads = jax.value_and_grad(loss)(params, x, target)
        return jax.tree.map(lambda p, g: p - np.float32(RATE) * g, params, grads), value

    losses = []
    for _ in range(STEPS):
        params, value = step(params, x, target)
        losses.append(float(value))
    return losses


def over(mesh):
    """(the layer over the mesh's devices, specs of its params, spec of the tokens)."""
    specs, rows = dict(router=P(), gate=P("expert"), up=P("expert"), down=P("expert")), P("expert")
    forward = jax.shard_map(
        lambda params, x: layer(params, x, "expert"),
        mesh=mesh,
        in_specs=(specs, rows),
        out_specs=rows,
    )
    return forward, specs, rows


def main():
    params, x, target = init()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("expert",))
    sharded, _, _ = over(mesh)
    many = train(sharded, params, x, target)
    one = train(lambda params, x: layer(params, x, None), params, x, target)
    print(f"step   {mesh.size} devices   1 device")
    for i in range(0, STEPS, 4):
        print(f"{i:4d}   {many[i]:9.5f}   {one[i]:8.5f}")
    print(f"{STEPS - 1:4d}   {many[-1]:9.5f}   {one[-1]:8.5f}")
    np.testing.assert_allclose(many, one, rtol=2e-3)


if __name__ == "__main__":
    main()
