"""The layer against a dense one: expert parallelism, drops, checkpoints, poisoned memory."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import fp8moe_prims as fp8
from fp8moe_prims import moe
from fp8moe_prims.moe import MoEConfig, moe_ffn
from tests import helpers

T, D, F, E, K = 64, 32, 24, 8, 2


def _inputs(seed=0, one_expert=False):
    rng = np.random.default_rng(seed)
    normal = lambda *s: jnp.asarray(rng.standard_normal(s).astype(np.float32))
    logits = normal(T, E)
    if one_expert:
        logits = logits.at[:, 3].add(50.0)
    weights = normal(E, D, F) * 0.2, normal(E, D, F) * 0.2, normal(E, F, D) * 0.2
    return normal(T, D), logits, *weights


def _dense(x, logits, w_gate, w_up, w_down, keep=None, norm=True):
    """The layer with every expert on every token; keep [t, E] masks the dropped pairs."""
    p = jax.nn.softmax(logits, -1)
    weights, experts = jax.lax.top_k(p, K)
    weights = weights / weights.sum(-1, keepdims=True) if norm else weights
    combine = jnp.sum(jax.nn.one_hot(experts, E) * weights[..., None], axis=1)
    combine = combine if keep is None else combine * keep
    ein = lambda s, *a: jnp.einsum(s, *a, precision="highest")
    h = jax.nn.silu(ein("td,edf->tef", x, w_gate)) * ein("td,edf->tef", x, w_up)
    return ein("tef,efd,te->td", h, w_down, combine)


def _layer(config, shards=1):
    """The layer as a function of whole arrays: (y, stats)."""
    if shards == 1:
        return lambda *a: moe_ffn(*a, config=config)
    config = dataclasses.replace(config, ep_axis="x")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("x",))
    return jax.shard_map(
        lambda *a: moe_ffn(*a, config=config),
        mesh=mesh,
        in_specs=(P("x"),) * 5,
        out_specs=(P("x"), P()),
    )


def _grads(fn, args):
    return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), range(5)))(*args)


def _eqns(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _eqns(sub)


class UnquantizedTest(parameterized.TestCase):
    @parameterized.parameters((1, False), (1, True), (2, True), (4, False), (8, True))
    def test_equals_dense_layer(self, shards, one_expert):
        args = _inputs(one_expert=one_expert)
        layer = _layer(MoEConfig(E, K, recipe=None), shards)
        y, stats = jax.jit(layer)(*args)
        helpers.assert_close(y, _dense(*args), 2e-5)
        for got, want in zip(
            _grads(lambda *a: layer(*a)[0], args), _grads(_dense, args), strict=True
        ):
            helpers.assert_close(got, want, 2e-5)
        experts = np.asarray(jax.lax.top_k(args[1], K)[1])
        np.testing.assert_array_equal(
            stats["rows_per_expert"], np.bincount(experts.ravel(), minlength=E)
        )
        self.assertEqual(int(stats["rows_dropped"]), 0)
        per_shard = np.bincount(experts.ravel() // (E // shards), minlength=shards)
        np.testing.assert_allclose(
            stats["needed_factor"], per_shard.max() / (T * K / shards), rtol=1e-6
        )

    @parameterized.parameters(1, 4)
    def test_a_buffer_that_drops(self, shards):
        args = _inputs()
        factor = 0.75
        layer = _layer(MoEConfig(E, K, recipe=None, ragged_buffer_factor=factor), shards)
        y, stats = jax.jit(layer)(*args)
        # The last rows in expert order of each shard's experts find no place.
        experts = np.asarray(jax.lax.top_k(args[1], K)[1])
        keep, room = np.ones((T, E), np.float32), int(np.ceil(factor * T * K / shards))
        dropped = 0
        for s in range(shards):
            rows = [
                (t, e)
                for e in range(s * E // shards, (s + 1) * E // shards)
                for t in range(T)
                if e in experts[t]
            ]
            for t, e in rows[room:]:
                keep[t, e] = 0
                dropped += 1
        self.assertGreater(dropped, 0)
        self.assertEqual(int(stats["rows_dropped"]), dropped)
        dense = lambda *a: _dense(*a, keep=jnp.asarray(keep))
        helpers.assert_close(y, dense(*args), 2e-5)
        for got, want in zip(
            _grads(lambda *a: layer(*a)[0], args), _grads(dense, args), strict=True
        ):
            helpers.assert_close(got, want, 2e-5)

    @parameterized.parameters(dict(num_token_chunks=4), dict(norm_topk_prob=False))
    def test_options(self, **options):
        args = _inputs()
        layer = _layer(MoEConfig(E, K, recipe=None, **options), 2)
        dense = lambda *a: _dense(*a, norm=options.get("norm_topk_prob", True))
        y, stats = jax.jit(layer)(*args)
        helpers.assert_close(y, dense(*args), 2e-5)
        self.assertEqual(int(np.sum(stats["rows_per_expert"])), T * K)


class QuantizedTest(parameterized.TestCase):
    def test_weights_gathered_in_fp8(self):
        """Sharded over a second axis, quantized, gathered: the same layer and gradients."""
        args = _inputs()
        want = _grads(lambda *a: _layer(MoEConfig(E, K))(*a)[0], args)
        config = MoEConfig(E, K, ep_axis="x")
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "x"))

        def local(x, logits, *weights):
            gathered = [
                fp8.ring_all_gather(
                    fp8.quantize(w, "e4m3", channelwise_axes=(0, 2)), "fsdp", axis=2, tiled=True
                )
                for w in weights
            ]
            return moe_ffn(x, logits, *gathered, config=config)[0]

        rows, experts = P(("fsdp", "x")), P("x", None, "fsdp")
        layer = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, *(experts,) * 3), out_specs=rows
        )
        got = _grads(layer, args)
        for a, b in zip(got[:2], want[:2], strict=True):
            helpers.assert_close(a, b, 2e-5)
        for a, b in zip(got[2:], want[2:], strict=True):  # scales of half of the tokens each
            self.assertLess(helpers.distance(a, b), 0.08)

    @parameterized.parameters(False, True)
    def test_backward_gathers_by_the_ring(self, ring):
        """Compiled for a torus ring: the backward pass has one ring kernel, the forward none."""
        config = MoEConfig(E, K, ep_axis="x", ring_cotangent_all_gather=ring)
        topology = topologies.get_topology_desc("v5p:2x2x1", platform="tpu")
        a, b, c, d = topology.devices
        mesh = jax.sharding.Mesh(np.array([a, b, d, c]), ("x",))  # around the square
        layer = jax.shard_map(
            lambda *a: moe_ffn(*a, config=config)[0],
            mesh=mesh,
            in_specs=(P("x"),) * 5,
            out_specs=P("x"),
        )
        place = jax.NamedSharding(mesh, P("x"))
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in _inputs()]
        for fn, rings in ((layer, 0), (jax.grad(lambda *a: jnp.sum(layer(*a) ** 2)), int(ring))):
            text = jax.jit(fn).lower(*args).as_text()
            self.assertEqual(text.count('kernel_name = "fp8moe_ring_all_gather"'), rings)
            self.assertEqual(text.count('kernel_name = "fp8moe_ring'), rings)

    def test_expert_parallel_equals_one_device(self):
        args = _inputs()
        want = _grads(lambda *a: _layer(MoEConfig(E, K))(*a)[0], args)
        for shards in (4,):
            got = _grads(lambda *a: _layer(MoEConfig(E, K), shards)(*a)[0], args)
            for a, b in zip(got, want, strict=True):
                helpers.assert_close(a, b, 2e-5)

    @parameterized.parameters((4,))
    def test_before_and_after_all_gather_agree(self, shards):
        """With a fixed range the tokens are the same values, quantized early or late."""
        recipe = fp8.QuantRecipe(act_calibration="fixed,-8,8")
        args = _inputs()

        def run(early):
            config = MoEConfig(E, K, recipe=recipe, quantize_before_all_gather=early)
            layer = _layer(config, shards)
            loss = lambda *a: jnp.sum(jnp.sin(layer(*a)[0]))
            return jax.jit(jax.value_and_grad(loss, range(5)))(*args)

        (early, early_grads), (late, late_grads) = run(True), run(False)
        np.testing.assert_allclose(early, late, rtol=5e-3)
        for a, b, bound in zip(
            early_grads, late_grads, (5e-3, 5e-3, 4e-2, 4e-2, 5e-3), strict=True
        ):
            self.assertLess(helpers.distance(a, b), bound)

    def test_in_kernel_and_dense_backward_agree(self):
        args = _inputs()
        run = lambda b: _grads(
            lambda *a: _layer(MoEConfig(E, K, recipe=fp8.QuantRecipe(backward=b)))(*a)[0], args
        )
        for a, b in zip(run("in_kernel"), run("dense"), strict=True):
            self.assertLess(helpers.distance(a, b), 0.1)

    def test_gradients_have_the_parameters_dtypes(self):
        x, logits, *weights = _inputs()
        args = x.astype(jnp.bfloat16), logits, *(w.astype(jnp.bfloat16) for w in weights)
        fn = lambda *a: _layer(MoEConfig(E, K))(*a)[0].astype(jnp.float32)
        for g, a in zip(_grads(fn, args), args, strict=True):
            self.assertEqual(g.dtype, a.dtype)

    def test_no_float8_cotangent(self):
        """In the backward pass float8 arrays are only read: no equation adds or zeroes one."""
        args = _inputs()
        fn = lambda *a: jnp.sum(_layer(MoEConfig(E, K))(*a)[0])
        jaxpr = jax.make_jaxpr(jax.grad(fn, range(5)))(*args)
        for eqn in _eqns(jaxpr.jaxpr):
            if eqn.primitive.name in ("add_any", "broadcast_in_dim", "zeros_like", "add"):
                for out in eqn.outvars:
                    self.assertNotIn("float8", str(out.aval.dtype))

    @parameterized.parameters(False, True)
    def test_checkpoint_runs_the_dispatch_once(self, save):
        args = _inputs()
        config = MoEConfig(E, K, save_sorted_inputs=save)
        layer = jax.checkpoint(
            lambda *a: moe_ffn(*a, config=config)[0], policy=moe.save_sorted_inputs_policy
        )
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a))), range(5)))(*args)
        dispatch = [
            eqn
            for eqn in _eqns(jaxpr.jaxpr)
            if eqn.primitive.name == "fp8moe_ragged_gather" and "x_scale" in eqn.params["operands"]
        ]
        sorts = [eqn for eqn in _eqns(jaxpr.jaxpr) if eqn.primitive.name == "sort"]
        self.assertLen(dispatch, 1 if save else 2)
        self.assertLen(sorts, 1 if save else 2)
        plain = _grads(lambda *a: moe_ffn(*a, config=config)[0], args)
        for a, b in zip(_grads(layer, args), plain, strict=True):
            helpers.assert_close(a, b, 1e-6)

    def test_two_steps_in_poisoned_memory(self):
        """Interpreted: whatever no kernel wrote is NaN, and nothing clears the buffer."""
        config = MoEConfig(4, K)
        x, logits, *weights = _inputs()
        args = [x[:24], logits[:24, :4], *(w[:4] for w in weights)]

        def step(args):
            grads = jax.grad(lambda *a: jnp.sum(moe_ffn(*a, config=config)[0] ** 2), range(5))(
                *args
            )
            return [a - 0.01 * g for a, g in zip(args, grads, strict=True)]

        # A loop, so that the second step runs in the memory that the first one left.
        two = lambda args: jax.lax.scan(lambda a, _: (step(a), None), args, length=2)[0]
        with fp8.use_lowering("interpret"):
            got = jax.jit(two)(list(args))
        want = jax.jit(two)(list(args))
        for a, b in zip(got, want, strict=True):
            self.assertTrue(np.isfinite(a).all())
            helpers.assert_close(a, b, 2e-3)


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        (dict(num_experts=0), "num_experts"),
        (dict(top_k=9), "top_k"),
        (dict(recipe="fp8"), "recipe"),
        (dict(activation="swish"), "activation"),
        (dict(num_token_chunks=0), "num_token_chunks"),
        (dict(ragged_buffer_factor=float("nan")), "ragged_buffer_factor"),
    )
    def test_config(self, fields, name):
        with self.assertRaisesRegex((TypeError, ValueError), name):
            MoEConfig(**(dict(num_experts=8, top_k=2) | fields))

    @parameterized.parameters(
        (0, lambda x: x[0], "x"),
        (1, lambda x: x[:, :4], "router_logits"),
        (2, lambda x: x[:4], "w_gate"),
        (3, lambda x: x.astype(jnp.int32), "w_up"),
        (4, lambda x: x[..., :5], "w_down"),
    )
    def test_arguments(self, index, change, name):
        args = list(_inputs())
        args[index] = change(args[index])
        with self.assertRaisesRegex((TypeError, ValueError), name):
            moe_ffn(*args, config=MoEConfig(E, K))

    def test_axis_not_bound(self):
        with self.assertRaisesRegex(ValueError, "ep_axis.*shard_map"):
            moe_ffn(*_inputs(), config=MoEConfig(E, K, ep_axis="nowhere"))

    def test_tokens_must_split(self):
        with self.assertRaisesRegex(ValueError, "num_token_chunks"):
            moe_ffn(*_inputs(), config=MoEConfig(E, K, num_token_chunks=7))


if __name__ == "__main__":
    absltest.main()
