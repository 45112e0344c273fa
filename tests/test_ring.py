"""The ring collectives against jax.lax: values, gradients, batching, types, QArrays, errors.

What is particular to the kernels (races, delays, barriers, choice) is in test_tpu_ring_kernels.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from tests import helpers, ring_cases

CASES = ring_cases.CASES
CI = [c for c in CASES if "ci" in c.tags]
BOTH = ("ring_all_gather", "ring_reduce_scatter")


def _small(op, **fields):
    return ring_cases.RingCase(op, **(dict(devices=4, rows=4, width=8, groups=2) | fields))


class ValuesTest(parameterized.TestCase):
    def _check(self, case, lowering, check_vma):
        """Values and the transpose, whose result is that of the other operation."""
        data = case.kind in ("e4m3", "int8")

        def run(fn):
            def local(x):
                if data:
                    return [fn(x)]
                out, pull = jax.vjp(fn, x)
                return [out, pull(2 * out)[0]]

            return jax.jit(case.mapped(local, check_vma))(case.input)

        with fp8.use_lowering(lowering):
            got = run(case.ours)
        want = run(case.theirs)
        if case.gathers:
            helpers.assert_same_bits(got[0], want[0])
        for g, w in zip(got, want, strict=True):
            self.assertEqual((g.dtype, g.shape), (w.dtype, w.shape))
            helpers.assert_close(g, w, 2.0**-6 if case.kind == "bf16" else 1e-6)

    @helpers.named(CI)
    def test_xla(self, case):
        self._check(case, "xla", case.groups > 1)

    @helpers.named(CI)
    def test_interpret(self, case):
        self._check(case, "interpret", case.groups == 1)

    @helpers.named(CASES)
    @pytest.mark.sweep
    def test_sweep(self, case):
        self._check(case, "xla", not case.tiled)
        self._check(case, "interpret", case.tiled)

    @parameterized.parameters("xla", "interpret")
    def test_bits_move_unchanged(self, lowering):
        """Every byte as float8, NaN payloads included, and scales beside them."""
        bits = np.random.default_rng(0).integers(0, 256, (3, 8, 128), np.uint8)
        scale = np.random.default_rng(1).standard_normal((3, 8, 1)).astype(np.float32)
        values = jnp.asarray(bits.view(jnp.float8_e4m3fn))

        def local(v, s):
            out = fp8.ring_all_gather(fp8.QArray(v[0], s[0]), "x", tiled=True)
            return out.qvalue[None], out.scale[None]

        spec = jax.P("x")
        fn = jax.shard_map(
            local, mesh=ring_cases.mesh(3), in_specs=(spec, spec), out_specs=(spec, spec)
        )
        with fp8.use_lowering(lowering):
            q, s = jax.jit(fn)(values, jnp.asarray(scale))
        for i in range(3):
            helpers.assert_same_bits(np.asarray(q)[i], np.asarray(values).reshape(24, 128))
            helpers.assert_same_bits(s[i], scale.reshape(24, 1))


class RulesTest(parameterized.TestCase):
    @parameterized.product(op=BOTH, check_vma=[True, False])
    def test_second_derivatives(self, op, check_vma):
        case = _small(op, tiled=check_vma)

        def second(fn):
            inner = case.mapped(lambda x: fn(jnp.sin(x)), check_vma)
            loss = lambda x: jnp.sum(jnp.sin(inner(x)))
            return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)))

        helpers.assert_close(second(case.ours)(case.input), second(case.theirs)(case.input), 1e-5)

    @parameterized.product(op=BOTH, check_vma=[True, False])
    def test_forward_mode(self, op, check_vma):
        case = _small(op)
        x = case.input
        jvp = lambda fn: jax.jit(
            lambda x, t: jax.jvp(case.mapped(lambda x: fn(x * x), check_vma), (x,), (t,))
        )(x, jnp.cos(x))
        for got, want in zip(jvp(case.ours), jvp(case.theirs), strict=True):
            helpers.assert_close(got, want, 1e-6)

    @parameterized.product(op=BOTH, check_vma=[True, False])
    def test_replicated_operand(self, op, check_vma):
        """Its gradient sums over the devices just where that of jax.lax does."""
        case = _small(op)

        def grad(fn):
            spec = jax.P(("x", "y"))
            mapped = jax.shard_map(
                lambda x: fn(x)[None],
                mesh=case.mesh,
                in_specs=jax.P(),
                out_specs=spec,
                check_vma=check_vma,
            )
            return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(mapped(x)))))

        x = case.input[0]
        helpers.assert_close(grad(case.ours)(x), grad(case.theirs)(x), 1e-6)

    @parameterized.product(op=BOTH, replicated=[True, False])
    def test_type_is_that_of_jax(self, op, replicated):
        case = _small(op, kind="bf16", axis=1)
        types = []

        def local(x):
            types.append([jax.typeof(f(x[0])) for f in (case.ours, case.theirs)])
            return case.ours(x[0])[None]

        jax.eval_shape(
            jax.shard_map(
                local,
                mesh=case.mesh,
                in_specs=jax.P("y") if replicated else jax.P(("x", "y")),
                out_specs=jax.P(("x", "y")),
            ),
            case.input,
        )
        ours, theirs = types[0]
        self.assertEqual((ours.shape, ours.dtype), (theirs.shape, theirs.dtype))
        self.assertEqual(ours.mat.varying, theirs.mat.varying)
        self.assertFalse(ours.weak_type)

    @parameterized.product(op=BOTH, dim=[0, 1, 2])
    def test_vmap(self, op, dim):
        self._check_vmap(op, dim, dim == 0, "xla")

    @parameterized.parameters(*BOTH)
    def test_vmap_interpreted(self, op):
        self._check_vmap(op, 1, True, "interpret")

    def _check_vmap(self, op, dim, tiled, lowering):
        """Over the operation, and over the shard_map."""
        case = _small(op, devices=2, groups=1, tiled=tiled, axis=1)
        x = jnp.stack([case.input, 2 * case.input, -case.input], dim + 1)

        def run(fn):
            inside = case.mapped(jax.vmap(fn, dim))
            outside = jax.vmap(case.mapped(fn), dim + 1, 1)
            return jax.jit(lambda x: (inside(x), outside(x)))(x)

        # jax.lax.psum_scatter fails with a batch dimension behind one that it removes
        theirs = lambda x: jnp.stack(
            [case.mapped(case.theirs)(a) for a in jnp.moveaxis(x, dim + 1, 0)], 1
        )
        want = jax.jit(theirs)(x)
        with fp8.use_lowering(lowering):
            got = run(case.ours)
        for g in got:
            helpers.assert_close(g, want, 0.0 if case.gathers else 1e-6)

    @parameterized.parameters(*BOTH)
    def test_no_loop_over_a_batch(self, op):
        case = _small(op)
        jaxpr = str(jax.make_jaxpr(jax.vmap(case.mapped(case.ours)))(case.input[None].repeat(3, 0)))
        self.assertEqual(jaxpr.count(f"fp8moe_{op}["), 1)

    @parameterized.product(op=BOTH, mapped=[True, False])
    def test_vmap_names_the_axis(self, op, mapped):
        case = _small(op, groups=1)
        x = case.input

        def grad(fn):
            batched = jax.vmap(fn, 0 if mapped else None, axis_name="x", axis_size=case.devices)
            run = lambda x: batched(x) if mapped else batched(x[0])
            return jax.jit(lambda x: (run(x), jax.grad(lambda x: jnp.sum(jnp.sin(run(x))))(x)))(x)

        for g, w in zip(grad(case.ours), grad(case.theirs), strict=True):
            helpers.assert_close(g, w, 1e-6)

    @parameterized.parameters(*BOTH)
    def test_eager(self, op):
        case = _small(op)
        mapped = lambda fn: case.mapped(fn)(case.input)
        helpers.assert_close(mapped(case.ours), mapped(case.theirs), 1e-6)

    @parameterized.parameters(*BOTH)
    def test_checkpoint_and_scan(self, op):
        case = _small(op)
        back = _small(({*BOTH} - {op}).pop())  # the other operation, so that shapes stay

        def run(fns):
            once = jax.checkpoint(lambda x: jnp.sin(fns[1](fns[0](x))))
            local = lambda x: jax.lax.scan(lambda c, _: (once(c), None), x, None, length=2)[0]
            return jax.jit(jax.grad(lambda x: jnp.sum(case.mapped(local)(x))))(case.input)

        helpers.assert_close(run((case.ours, back.ours)), run((case.theirs, back.theirs)), 1e-5)


class QuantizedTest(parameterized.TestCase):
    @parameterized.product(axes=[(0,), (), (1,)], tiled=[True, False], axis=[0, 1])
    def test_equals_gather_of_dequantized(self, axes, tiled, axis):
        """Row scales, one scale that differs between devices, column scales."""
        case = _small("ring_all_gather", axis=axis, tiled=tiled)
        quantize = lambda x: fp8.quantize(x, "e4m3", channelwise_axes=axes)
        ours = lambda x: fp8.ring_all_gather(quantize(x), "x", axis=axis, tiled=tiled)
        got = jax.jit(case.mapped(lambda x: ours(x).dequantize()))(case.input)
        plain = lambda x: case.theirs(quantize(x).dequantize())
        want = jax.jit(case.mapped(plain))(case.input)
        helpers.assert_same_bits(got, want)

    def test_one_scale_becomes_a_row_scale(self):
        case = _small("ring_all_gather")
        shapes = []

        def local(x):
            out = fp8.ring_all_gather(fp8.quantize(x, "e4m3"), "x", tiled=True)
            shapes.append((out.qvalue.shape, out.scale.shape, out.carrier.shape))
            return out.scale

        scale = jax.jit(case.mapped(local))(case.input)
        self.assertEqual(shapes[0], ((16, 8), (16, 1), (16, 8)))
        self.assertGreater(len(np.unique(np.asarray(scale[0]))), 1)

    @parameterized.parameters(True, False)
    def test_gradient_is_wide_and_straight_through(self, check_vma):
        case = _small("ring_all_gather", kind="bf16")
        weight = jnp.cos(jnp.arange(16 * 8, dtype=jnp.float32)).reshape(16, 8).astype(jnp.bfloat16)

        def grad(gather):
            loss = lambda x: jnp.sum(case.mapped(lambda x: gather(x) * weight, check_vma)(x))
            return jax.grad(loss)

        def ours(x):
            q = fp8.quantize(x, "e4m3", channelwise_axes=(0,))
            return fp8.ring_all_gather(q, "x", tiled=True).dequantize(x.dtype)

        got = jax.jit(grad(ours))(case.input)
        helpers.assert_close(got, jax.jit(grad(case.theirs))(case.input), 2.0**-6)
        text = str(jax.make_jaxpr(grad(ours))(case.input))
        for line in text.splitlines():
            if "reduce_scatter" in line or "add_any" in line:
                self.assertNotIn("f8_", line)

    @parameterized.parameters(("e5m2", True), ("e4m3", False))
    def test_cotangent_dtype(self, dtype, tiled):
        case = _small("ring_reduce_scatter", tiled=tiled)
        scatter = lambda **kw: lambda x: fp8.ring_reduce_scatter(jnp.sin(x), "x", tiled=tiled, **kw)
        loss = lambda **kw: lambda x: jnp.sum(jnp.sin(case.mapped(scatter(**kw))(x)))
        grad = lambda **kw: jax.jit(jax.grad(loss(**kw)))(case.input)
        got, want = grad(cotangent_dtype=dtype), grad()
        self.assertLess(helpers.distance(got, want), {"e5m2": 0.08, "e4m3": 0.04}[dtype])
        self.assertGreater(helpers.distance(got, want), 1e-4)
        # in the jaxpr the gathered array is float8, and without the option it is not
        text = lambda **kw: str(jax.make_jaxpr(jax.grad(loss(**kw)))(case.input))
        self.assertIn("f8_e", text(cotangent_dtype=dtype))
        self.assertNotIn("f8_e", text())
        # straight-through: the second derivative is that of the plain operation, nearly
        second = lambda **kw: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss(**kw))(x) ** 2)))(
            case.input
        )
        self.assertLess(helpers.distance(second(cotangent_dtype=dtype), second()), 0.15)


class ErrorsTest(parameterized.TestCase):
    X = np.ones((4, 8), np.float32)

    @parameterized.parameters(
        (dict(axis_name="nowhere"), "axis_name.*'nowhere'.*shard_map"),
        (dict(axis_name=("x", "y")), "axis_name"),
        (dict(axis_name=None), "axis_name"),
        (dict(axis=2, tiled=True), "axis"),
        (dict(axis=3), "axis"),
        (dict(axis=0.5), "axis"),
        (dict(x=np.ones((4, 8), bool)), "x: "),
        (dict(x=np.ones((4, 8), np.complex64)), "x: "),
        (dict(x=[1.0]), "x: "),
        (dict(x=fp8.QArray(X.astype(np.int8), np.ones((3, 1), np.float32))), "x: "),
        (dict(x=fp8.QArray(X, np.ones((4, 1), np.float32))), "x: "),
        (dict(x=fp8.QArray(X.astype(np.int8), X[:, :1], X[:2])), "x: "),
    )
    def test_gather(self, change, message):
        call = dict(x=self.X, axis_name="x") | change
        with self.assertRaisesRegex((TypeError, ValueError), message):
            jax.vmap(lambda _: fp8.ring_all_gather(**call), axis_name="x")(jnp.ones(4))

    @parameterized.parameters(
        (dict(axis_name="nowhere"), "axis_name.*'nowhere'.*shard_map"),
        (dict(scatter_dimension=2), "scatter_dimension"),
        (dict(scatter_dimension=None), "scatter_dimension"),
        (dict(x=X[:3], tiled=True), "scatter_dimension"),
        (dict(x=X[:3]), "scatter_dimension"),
        (dict(x=np.float32(1)), "x: "),
        (dict(x=X.astype(np.int8)), "x: "),
        (dict(x=X.astype(jnp.float8_e4m3fn)), "x: "),
        (dict(x=fp8.QArray(X.astype(np.int8), X[:, :1])), "x: .*dequantize"),
        (dict(cotangent_dtype="fp8"), "cotangent_dtype"),
        (dict(cotangent_dtype="int8"), "cotangent_dtype"),
        (dict(x=X[:, 0], cotangent_dtype="e5m2"), "cotangent_dtype"),
        (dict(scatter_dimension=1, tiled=True, cotangent_dtype="e5m2"), "cotangent_dtype"),
    )
    def test_scatter(self, change, message):
        call = dict(x=self.X, axis_name="x") | change
        with self.assertRaisesRegex((TypeError, ValueError), message):
            jax.vmap(lambda _: fp8.ring_reduce_scatter(**call), axis_name="x")(jnp.ones(4))


if __name__ == "__main__":
    absltest.main()
