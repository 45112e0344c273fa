"""The operations that move rows: values, gradients of both orders, batching, poisoned rows."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from tests import checks, helpers, row_cases

CASES = row_cases.CASES
GRAD = [c for c in CASES if "grad" in c.tags]


class ValuesTest(parameterized.TestCase):
    @helpers.named(CASES)
    def test_xla(self, case):
        checks.rows_value(case, "xla")

    @helpers.named([c for c in CASES if "interpret" in c.tags][::6])
    def test_interpret(self, case):
        checks.rows_value(case, "interpret")

    @parameterized.product(lowering=["xla", "interpret"], kind=["f32", "e4m3", "q:e4m3:row"])
    def test_bits_move_unchanged(self, lowering, kind):
        """NaN payloads and negative zeros too; the scale follows its row."""
        case = row_cases.RowCase("bits", "ragged_gather", 40, 2, 128, kind=kind)
        x, _ = row_cases.as_jax(case)
        q = x.qvalue if kind.startswith("q:") else x
        bits = np.random.default_rng(0).integers(0, 256, (40, 128 * q.dtype.itemsize), np.uint8)
        q = jnp.asarray(bits.view(q.dtype))
        x = fp8.QArray(q, x.scale) if kind.startswith("q:") else q
        out = checks.run_rows(case, lowering, x)
        token = case.inputs["token"]
        got = out.qvalue if kind.startswith("q:") else out
        helpers.assert_same_bits(got, np.asarray(q)[token])
        if kind.startswith("q:"):
            helpers.assert_same_bits(out.scale, np.asarray(x.scale)[token])

    @parameterized.product(lowering=["xla", "interpret"], op=["ragged_gather_reduce", "ragged_glu"])
    def test_rows_out_of_range_change_no_bit(self, lowering, op):
        case = row_cases.RowCase("poison", op, 24, 4, 128, start=9, end=70)
        clean = checks.run_rows(case, lowering)
        x = np.array(case.inputs["x"])
        for value in (np.nan, np.inf):
            x[:9], x[70:] = value, value
            helpers.assert_same_bits(checks.run_rows(case, lowering, jnp.asarray(x)), clean)

    @parameterized.parameters("xla", "interpret")
    def test_quantized_glu(self, lowering):
        for qdtype in ("e4m3", "e5m2"):
            case = row_cases.RowCase(
                f"glu/{qdtype}", "ragged_glu", 60, 1, 160, end=50, options=(("qdtype", qdtype),)
            )
            out = checks.run_rows(case, lowering)
            self.assertEqual(out.scale.shape, (60, 1))
            want = case.reference()
            error = np.abs(checks.values(out) - want).max(axis=1)
            step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[qdtype]
            self.assertTrue((error <= step * np.abs(want).max(axis=1) * 1.001).all())
            self.assertTrue((checks.values(out)[50:] == 0).all())


class GradientTest(parameterized.TestCase):
    @helpers.named(GRAD)
    def test_equals_reference(self, case):
        checks.rows_gradients(case, "xla")

    @helpers.named([c for c in GRAD if "interpret" in c.tags][::9])
    def test_equals_reference_interpreted(self, case):
        checks.rows_gradients(case, "interpret")

    @helpers.named([c for c in GRAD if c.weights and c.kind == "f32"])
    def test_second_order(self, case):
        """Against JAX's own derivatives of the same call written with jnp indexing."""
        args = row_cases.as_jax(case)
        i, (start, end) = case.inputs, case.range

        def plain(x, w):
            if case.op == "ragged_gather":
                at = jnp.arange(case.rows)[:, None]
                return jnp.where((at >= start) & (at < end), x[i["token"]] * w[:, None], 0)
            at = jnp.asarray(i["row_of_slot"])[..., None]
            y = jnp.where((at >= start) & (at < end), x[i["row_of_slot"]], 0)
            return jnp.sum(y * w[..., None], axis=1)

        loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))

        def second(f):
            """The gradients of |df/dx|^2 and |df/dw|^2."""
            squares = lambda *z: [jnp.sum(g**2) for g in jax.grad(loss(f), (0, 1))(*z)]
            return jax.jit(lambda *z: jax.jacrev(squares, (0, 1))(*z))(*args)

        for got, want in zip(
            jax.tree.leaves(second(case.function())), jax.tree.leaves(second(plain)), strict=True
        ):
            helpers.assert_close(got, want, 1e-4)

    def test_glu_second_and_third_order(self):
        h = jnp.asarray(np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32))
        ours = lambda h: fp8.ragged_glu(h, end=6)
        plain = lambda h: jnp.where(
            jnp.arange(8)[:, None] < 6, jax.nn.silu(h[:, :10]) * h[:, 10:], 0
        )
        for f, g in ((ours, plain),):
            for _ in range(3):
                f, g = (
                    (lambda fn: lambda h: jax.grad(lambda h: jnp.sum(jnp.sin(fn(h))))(h))(fn)
                    for fn in (f, g)
                )
                helpers.assert_close(jax.jit(f)(h), jax.jit(g)(h), 1e-4)

    def test_scatter_has_no_kernel_and_runs_beside_those(self):
        """A primitive whose lowering on TPU is XLA's, in a program of interpreted kernels."""
        case = next(c for c in CASES if c.name == "reduce/partial")
        checks.rows_gradients(case, "interpret")

    @parameterized.parameters(2.0**10, 2.0**-14)
    def test_loss_scale_passes_a_quantized_gather(self, factor):
        case = next(c for c in CASES if c.name == "gather/inverse/k2d128")
        x = jnp.asarray(case.inputs["x"])
        fn = case.function()

        def loss(x, factor):
            q = fp8.quantize(x, "e4m3", channelwise_axes=(0,))
            return jnp.sum(jnp.sin(fn(q, None).dequantize())) * factor

        grad = jax.jit(jax.grad(loss))
        helpers.assert_same_bits(grad(x, factor), grad(x, 1.0) * factor)
        text = str(jax.make_jaxpr(jax.grad(loss))(x, factor))
        # float8 arrays exist in the forward pass alone: no cotangent is added, zeroed or cast there
        self.assertNotIn("f8_e4m3fn[17,128] = add_any", text)
        self.assertNotIn("f8_e4m3fn[34,128] = add_any", text)


class BatchingTest(parameterized.TestCase):
    @helpers.named([c for c in GRAD if c.name in ("gather/weights_inverse", "reduce/weights")])
    def test_subsets(self, case):
        x, w = row_cases.as_jax(case)
        fn = case.function()
        stack = lambda a: jnp.stack([a, 2 * a, -a])
        pull = lambda f: jax.jit(lambda x, w, ct: (f(x, w), *jax.vjp(f, x, w)[1](ct)))
        one = pull(fn)
        ct = np.random.default_rng(0).standard_normal((3, *jax.eval_shape(fn, x, w).shape))
        ct = jnp.asarray(ct, jnp.float32)
        for axes in ((0, None), (None, 0), (0, 0)):
            args = [stack(a) if ax == 0 else a for a, ax in zip((x, w), axes, strict=True)]
            pick = lambda i: [a[i] if ax == 0 else a for a, ax in zip(args, axes, strict=True)]
            wants = [one(*pick(i), ct[i]) for i in range(3)]
            gots = pull(jax.vmap(fn, axes))(*args, ct)
            for got, parts, ax in zip(gots, zip(*wants, strict=True), (0, *axes), strict=True):
                want = jnp.stack(parts) if ax == 0 else sum(parts)
                helpers.assert_close(got, want, 1e-5)

    def test_ranges_batch(self):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((10, 32)).astype(np.float32))
        at = jnp.arange(20, dtype=jnp.int32) % 10
        ends = jnp.asarray([3, 0, 20], jnp.int32)
        out = jax.vmap(lambda end: fp8.ragged_gather(x, at, end=end))(ends)
        for i, end in enumerate((3, 0, 20)):
            np.testing.assert_array_equal(out[i, :end], np.asarray(x)[np.asarray(at)[:end]])
            np.testing.assert_array_equal(out[i, end:], 0)


class ErrorsTest(parameterized.TestCase):
    X, AT = np.ones((4, 8), np.float32), np.array([0, 1, 2])

    @parameterized.parameters(
        (dict(x=np.ones(4, np.float32)), "x"),
        (dict(x=np.ones((4, 8), np.int32)), "x"),
        (dict(indices=np.array([0.5])), "indices"),
        (dict(indices=np.array([[0]])), "indices"),
        (dict(start=0.5), "start"),
        (dict(end=np.array([1, 2])), "end"),
        (dict(weights=np.ones(2, np.float32)), "weights"),
        (dict(weights=np.ones(3, np.int32)), "weights"),
        (dict(inverse=np.array([[0], [1]])), "inverse"),
        (dict(tail="nan"), "tail"),
        (dict(expected_rows=-1), "expected_rows"),
        (dict(x=fp8.QArray(np.ones((4, 8), np.int8), np.ones((2, 1), np.float32))), "x"),
    )
    def test_gather(self, change, argument):
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.ragged_gather(**(dict(x=self.X, indices=self.AT) | change))

    @parameterized.parameters(
        (dict(y=np.ones((4, 8), np.int8)), "y"),
        (dict(indices=np.array([0])), "indices"),
        (dict(weights=np.ones((2, 1), np.float32)), "weights"),
        (dict(inverse=np.array([0])), "inverse"),
    )
    def test_gather_reduce(self, change, argument):
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.ragged_gather_reduce(**(dict(y=self.X, indices=self.AT[:, None]) | change))

    @parameterized.parameters(
        (dict(h=np.ones((4, 7), np.float32)), "h"),
        (dict(activation="swish"), "activation"),
        (dict(qdtype="fp8"), "qdtype"),
    )
    def test_glu(self, change, argument):
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.ragged_glu(**(dict(h=self.X) | change))


if __name__ == "__main__":
    absltest.main()
