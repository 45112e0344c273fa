"""A byte-level transformer with a mixture of experts, about a million parameters, in plain JAX.

    t tokens, d features, E experts, f features of an expert

Parameters are float32; each use of one casts it to bfloat16, as bf16 training does.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fp8moe_prims as fp8
from fp8moe_prims.moe import MoEConfig

LAYERS, FEATURES, HEADS = 2, 128, 4
EXPERTS, TOP_K, EXPERT_FEATURES = 8, 2, 128
BALANCE = 0.01  # weight of the load-balancing loss


def init(seed: int, vocabulary: int, length: int) -> dict:
    """The parameters: a dict of float32 arrays, "layers" a list of such dicts."""
    random = np.random.default_rng(seed)
    d, f = FEATURES, EXPERT_FEATURES

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * random.standard_normal(shape), jnp.float32)

    def layer():
        return {
            "attention_norm": jnp.ones((d,), jnp.float32),
            "qkv": normal(d, 3 * d, scale=d**-0.5),
            "attention_out": normal(d, d, scale=d**-0.5),
            "moe_norm": jnp.ones((d,), jnp.float32),
            "router": normal(d, EXPERTS, scale=d**-0.5),
            "w_gate": normal(EXPERTS, d, f, scale=d**-0.5),
            "w_up": normal(EXPERTS, d, f, scale=d**-0.5),
            "w_down": normal(EXPERTS, f, d, scale=f**-0.5),
        }

    return {
        "embedding": normal(vocabulary, d, scale=0.5),
        "position": normal(length, d, scale=0.1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones((d,), jnp.float32),
        "unembedding": normal(d, vocabulary, scale=d**-0.5),
    }


def loss(params, tokens, recipe, moe=fp8.moe.moe_ffn):
    """(mean cross-entropy, mean load-balancing loss) of int32 tokens [batch, length + 1].

    moe: what computes the experts, called as `fp8moe_prims.moe.moe_ffn` is.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = (params["embedding"][inputs] + params["position"][None]).astype(jnp.bfloat16)
    balance = np.float32(0)
    for layer in params["layers"]:  # x [batch, length, d]
        x = x + attention(layer, rms_norm(x, layer["attention_norm"]))
        flat = rms_norm(x, layer["moe_norm"]).reshape(-1, FEATURES)
        y, layer_balance = moe_ffn(layer, flat, recipe, moe)
        x, balance = x + y.reshape(x.shape), balance + layer_balance / np.float32(LAYERS)
    logits = matmul(rms_norm(x, params["norm"]), params["unembedding"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean(), balance


def moe_ffn(params, x, recipe, moe):
    """The mixture of experts: (y [t, d], load-balancing loss []) of tokens x [t, d].

    Each token goes to the TOP_K experts that its router prefers; none is dropped.
    """
    logits = x.astype(jnp.float32) @ params["router"]  # [t, E]
    experts = (params[name].astype(x.dtype) for name in ("w_gate", "w_up", "w_down"))
    config = MoEConfig(EXPERTS, TOP_K, recipe=recipe)
    y, stats = moe(x, logits, *experts, config=config)

    # E * sum over e of (share of the rows) * (mean probability): 1 if balanced, E if collapsed.
    share = stats["rows_per_expert"].astype(jnp.float32) / np.float32(TOP_K * x.shape[0])
    return y, np.float32(EXPERTS) * jnp.vdot(share, jax.nn.softmax(logits).mean(axis=0))


def attention(params, x):
    """Causal attention of x [batch, length, d]."""
    batch, length, d = x.shape
    qkv = matmul(x, params["qkv"]).reshape(batch, length, 3, HEADS, d // HEADS)
    q, k, v = (qkv[:, :, i].astype(jnp.float32) for i in range(3))  # [batch, length, HEADS, ...]
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / np.float32((d // HEADS) ** 0.5)
    seen = jnp.tri(length, dtype=bool)[None, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, np.float32(-1e30)))
    out = jnp.einsum("bhqk,bkhc->bqhc", probs, v).astype(x.dtype)
    return matmul(out.reshape(x.shape), params["attention_out"])


def matmul(x, weight):
    return x @ weight.astype(x.dtype)


def rms_norm(x, gain):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + np.float32(1e-6))
    return (wide * gain.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
