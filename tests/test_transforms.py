"""vmap, derivatives of both modes and both orders, checkpoint, scan, integer types, x64."""

import itertools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from fp8moe_prims.primitives import registry
from tests import cases, checks, helpers, oracle, ring_cases, row_cases

SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]


def _eqns(jaxpr):
    """Every equation, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _eqns(sub)


def _count(closed, name):
    return sum(eqn.primitive.name == name for eqn in _eqns(closed.jaxpr))


def _small(op, **fields):
    base = dict(shape=(40, 96, 33, 3), sizes=(10, 0, 21), recipe=cases.E4M3)
    return cases.Case(f"small/{op}/{fields}", op, **{**base, **fields})


class TableTest(absltest.TestCase):
    def test_every_primitive_has_rows(self):
        ops = {f"fp8moe_{c.op}" for c in (*cases.CASES, *row_cases.CASES, *ring_cases.CASES)}
        ops |= {f"fp8moe_{op}" for c in row_cases.CASES for op in c.reaches}
        self.assertEqual(ops, set(registry))


class AbstractEvalTest(parameterized.TestCase):
    @helpers.named(cases.select())
    def test_shape_and_dtype(self, case):
        a, b = helpers.as_jax(case.arrays())
        out = jax.eval_shape(case.function(), a, b, case.kwargs()["group_sizes"])
        m, k, n, g = case.shape
        self.assertEqual(out.shape, (m, n) if case.op == "gmm" else (g, k, n))
        self.assertFalse(out.weak_type)

    def test_shape_arithmetic_beyond_32_bits(self):
        lhs = jax.ShapeDtypeStruct((262144, 7168), jnp.bfloat16)
        rhs = jax.ShapeDtypeStruct((512, 7168, 2048), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((512,), jnp.int32)
        fn = lambda *a: fp8.gmm(*a, recipe=fp8.QuantRecipe())
        grads = jax.eval_shape(jax.grad(lambda l, r, s: fn(l, r, s).sum(), (0, 1)), lhs, rhs, sizes)
        self.assertEqual(grads[1].shape, rhs.shape)


class BatchingTest(parameterized.TestCase):
    @parameterized.product(op_lhs=[("gmm", "f32"), ("tgmm_quant", "q:row")], subset=SUBSETS)
    def test_subset_equals_loop(self, op_lhs, subset):
        op, lhs = op_lhs
        case = _small(op, lhs=lhs)
        fn = case.function()
        args = [*helpers.as_jax(case.arrays()), jnp.asarray(case.sizes, jnp.int32)]
        stacked = [
            jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, 0)]), a) if on else a
            for a, on in zip(args, subset, strict=True)
        ]
        axes = [0 if on else None for on in subset]
        mapped = jax.vmap(fn, axes)
        pick = lambda i: [
            jax.tree.map(lambda x: x[i], a) if on else a
            for a, on in zip(stacked, subset, strict=True)
        ]
        expected = jnp.stack([fn(*pick(i)) for i in range(2)])
        helpers.assert_close(jax.jit(mapped)(*stacked), expected, 1e-6)
        jaxpr = jax.make_jaxpr(mapped)(*stacked)
        self.assertEqual(_count(jaxpr, f"fp8moe_{op}"), 1)
        # No operand that is not batched was copied: only the batched ones have a doubled size.
        (eqn,) = [e for e in _eqns(jaxpr.jaxpr) if e.primitive.name == f"fp8moe_{op}"]
        names = eqn.params["operands"]
        for name, on in zip(
            ("lhs", "rhs" if op == "gmm" else "dout", "starts"), subset, strict=True
        ):
            size = eqn.invars[names.index(name)].aval.shape[0]
            self.assertEqual(size, 2 if on else 1)

    @parameterized.parameters("gmm", "tgmm_quant")
    def test_any_axis_nested_and_batch_of_one(self, op):
        case = _small(op)
        fn = case.function()
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        expected = fn(a, b, sizes)
        out = jax.vmap(fn, (2, 1, 0), out_axes=1)(
            jnp.stack([a, a], 2), jnp.stack([b, b], 1), jnp.stack([sizes, sizes])
        )
        helpers.assert_close(out[:, 1], expected, 1e-6)
        nested = jax.vmap(jax.vmap(fn, (0, None, None)), (None, 0, None))
        out = nested(jnp.stack([a, 2 * a, a]), jnp.stack([b, b]), sizes)
        self.assertEqual(out.shape, (2, 3, *expected.shape))
        helpers.assert_close(out[1, 2], expected, 1e-6)
        one = jax.vmap(fn, (0, None, None))(a[None], b, sizes)
        helpers.assert_close(one[0], expected, 1e-6)

    @parameterized.parameters(
        *((subset, "in_kernel") for subset in SUBSETS),
        ((True, False, False), "dense"),
        ((False, True, True), "dense"),
    )
    def test_gradient_of_vmap_equals_loop(self, subset, backward):
        case = _small("gmm", recipe=fp8.QuantRecipe(backward=backward))
        fn = case.function()
        args = [*helpers.as_jax(case.arrays()), jnp.asarray(case.sizes, jnp.int32)]
        args = [
            jnp.stack([x, jnp.roll(x, 1, 0)]) if on else x
            for x, on in zip(args, subset, strict=True)
        ]
        pick = lambda args, i: [x[i] if on else x for x, on in zip(args, subset, strict=True)]
        axes = [0 if on else None for on in subset]
        loss = lambda *a: jnp.sum(jnp.sin(jax.vmap(fn, axes)(*a)))
        loop = lambda *a: sum(jnp.sum(jnp.sin(fn(*pick(a, i)))) for i in range(2))
        for got, want in zip(
            jax.jit(jax.grad(loss, (0, 1)))(*args),
            jax.jit(jax.grad(loop, (0, 1)))(*args),
            strict=True,
        ):
            helpers.assert_close(got, want, 2e-5)


class GradientTest(parameterized.TestCase):
    @helpers.named(cases.select(tag="grad", op="gmm")[::2])
    def test_equals_reference(self, case):
        checks.gradients(case, "xla")

    @helpers.named(cases.select(tag="grad", op="gmm")[::10])
    def test_equals_reference_interpreted(self, case):
        checks.gradients(case, "interpret")

    @parameterized.parameters(None, cases.DEFAULT, fp8.QuantRecipe(backward="dense"))
    def test_against_einsum(self, recipe):
        case = _small("gmm", recipe=recipe)
        lhs, rhs = helpers.as_jax(case.arrays())
        member = np.zeros((40, 3), np.float32)
        for e, (start, end) in enumerate(case.groups):
            member[start:end, e] = 1
        member, sizes = jnp.asarray(member), jnp.asarray(case.sizes, jnp.int32)
        einsum = lambda l, r: jnp.einsum("mk,gkn,mg->mn", l, r, member, precision="highest")
        ours = lambda l, r: case.function()(l, r, sizes)
        noise = 1e-5 if recipe is None else 0.12
        first = lambda f: lambda l, r: jnp.sum(jnp.sin(0.02 * f(l, r)))
        for i in (0, 1):
            got, want = (jax.grad(first(f), i)(lhs, rhs) for f in (ours, einsum))
            self.assertLess(helpers.distance(got, want), noise)
            # second order: how the gradient of one operand depends on the other, and on itself
            for j in (0, 1):
                second = lambda f: lambda l, r: jnp.sum(jax.grad(first(f), i)(l, r) ** 2)
                got, want = (jax.grad(second(f), j)(lhs, rhs) for f in (ours, einsum))
                self.assertLess(helpers.distance(got, want), 2 * noise)
        tangents = jnp.cos(lhs), jnp.cos(rhs)
        for mode in ("both", "lhs", "rhs"):
            t = tuple(
                x if mode in ("both", n) else jnp.zeros_like(x)
                for x, n in zip(tangents, ("lhs", "rhs"), strict=True)
            )
            got, want = (jax.jvp(f, (lhs, rhs), t)[1] for f in (ours, einsum))
            self.assertLess(helpers.distance(got, want), noise)
            got = jax.linearize(ours, lhs, rhs)[1](*t)
            self.assertLess(helpers.distance(got, want), noise)

    @parameterized.parameters(0, 1)
    def test_jvp_of_one_operand_is_one_product(self, argnum):
        case = _small("gmm")
        args = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)

        def jvp(x):
            fn = lambda x: case.function()(*args[:argnum], x, *args[argnum + 1 :], sizes)
            return jax.jvp(fn, (x,), (x,))

        self.assertEqual(_count(jax.make_jaxpr(jvp)(args[argnum]), "fp8moe_gmm"), 2)

    def test_no_tangent_no_product(self):
        case = _small("gmm")
        a, b = helpers.as_jax(case.arrays())
        fn = lambda x: case.function()(a, b, jnp.asarray(case.sizes, jnp.int32)) * x
        jaxpr = jax.make_jaxpr(lambda x: jax.jvp(fn, (x,), (x,)))(2.0)
        self.assertEqual(_count(jaxpr, "fp8moe_gmm"), 1)

    @parameterized.parameters("e5m2", "e4m3")
    def test_in_kernel_and_dense_agree(self, grad_dtype):
        make = lambda backward: _small(
            "gmm",
            shape=(200, 160, 96, 3),
            sizes=(90, 0, 70),
            recipe=fp8.QuantRecipe(grad_dtype=grad_dtype, backward=backward),
        )
        lhs, rhs = helpers.as_jax(make("dense").arrays())
        sizes = jnp.asarray((90, 0, 70), jnp.int32)
        grad = lambda b: jax.grad(
            lambda l, r: jnp.sum(jnp.sin(make(b).function()(l, r, sizes))), (0, 1)
        )(lhs, rhs)
        for a, b in zip(grad("in_kernel"), grad("dense"), strict=True):
            self.assertLess(helpers.distance(a, b), 0.1 if grad_dtype == "e5m2" else 0.05)

    @parameterized.product(scale=[2.0**10, 2.0**-14], lhs=["plain", "quantized"])
    def test_scaled_loss_scales_gradients_exactly(self, scale, lhs):
        case = _small("gmm", recipe=cases.DEFAULT)
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)

        def loss(a, b, factor):
            x = a if lhs == "plain" else fp8.quantize(a, "e4m3", channelwise_axes=(0,))
            return jnp.sum(jnp.sin(case.function()(x, b, sizes))) * factor

        grad = jax.jit(jax.grad(loss, (0, 1)))
        for got, want in zip(grad(a, b, scale), grad(a, b, 1.0), strict=True):
            helpers.assert_same_bits(got, want * scale)

    def test_no_float8_cotangent(self):
        case = _small("gmm", recipe=cases.DEFAULT)
        a, b = helpers.as_jax(case.arrays())

        def loss(a, b):
            x = fp8.quantize(a.astype(jnp.bfloat16), "e4m3", channelwise_axes=(0,))
            return jnp.sum(case.function()(x, b, jnp.asarray(case.sizes, jnp.int32)))

        # The cotangent of a QArray is that of its carrier: bfloat16 here.
        grads = jax.grad(loss, (0, 1))(a, b)
        self.assertEqual([g.dtype for g in grads], [jnp.float32] * 2)
        pull = jax.vjp(lambda x: fp8.quantize(x, "e4m3"), a.astype(jnp.bfloat16))[0]
        self.assertEqual(pull.carrier.dtype, jnp.bfloat16)

    def test_tail_of_cotangent_changes_no_bit(self):
        case = _small("gmm", recipe=cases.DEFAULT)
        a, b = helpers.as_jax(case.arrays())
        fn = lambda a, b: case.function()(a, b, jnp.asarray(case.sizes, jnp.int32))
        rng = np.random.default_rng(0)
        dout = rng.standard_normal(fn(a, b).shape).astype(np.float32)
        grads = lambda a, d: jax.jit(lambda a, b, d: jax.vjp(fn, a, b)[1](d))(a, b, d)
        clean = grads(a, jnp.asarray(dout))
        for value in (np.nan, np.inf, 3e38):
            bad = [jnp.asarray(helpers.poisoned(x, case.valid, value)) for x in (a, dout)]
            for x, y in zip(grads(*bad), clean, strict=True):
                helpers.assert_same_bits(x, y)


class ControlFlowTest(parameterized.TestCase):
    @parameterized.product(
        lowering=["xla", "interpret"], policy=["everything_saveable", "nothing_saveable"]
    )
    def test_checkpointed_scan(self, lowering, policy):
        case = _small("gmm", shape=(24, 40, 40, 2), sizes=(10, 9), recipe=cases.DEFAULT)
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        step = lambda x, w: (x + 0.1 * case.function()(x, w, sizes), None)
        stack = jnp.stack([b, 0.5 * b, b])

        def loss(a, stack, wrap):
            return jnp.sum(jnp.sin(jax.lax.scan(wrap(step), a, stack)[0]))

        policy = getattr(jax.checkpoint_policies, policy)
        with fp8.use_lowering(lowering):
            run = lambda wrap: jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(a, stack, wrap)
            got = run(lambda f: jax.checkpoint(f, policy=policy))
            # Of the same lowering: another's sums round differently, and so may the next layer.
            want = run(lambda f: f)
        for x, y in zip(got, want, strict=True):
            helpers.assert_close(x, y, 1e-5)

    def test_scan_of_grad_of_vmap(self):
        case = _small("gmm", shape=(24, 40, 40, 2), sizes=(10, 9), recipe=cases.DEFAULT)
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        loss = lambda b: jnp.sum(
            jax.vmap(case.function(), (0, None, None))(jnp.stack([a, a]), b, sizes) ** 2
        )
        step = lambda b, _: (b - 1e-6 * jax.grad(loss)(b), None)
        out = jax.jit(lambda b: jax.lax.scan(step, b, None, length=2)[0])(b)
        want = step(step(b, None)[0], None)[0]
        helpers.assert_close(out, want, 1e-6)

    def test_derivatives_keep_the_lowering(self):
        case = _small("gmm")
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        with fp8.use_lowering("xla"):
            _, pull = jax.vjp(lambda a, b: case.function()(a, b, sizes), a, b)
        text = str(jax.make_jaxpr(pull)(jnp.ones((40, 33))))
        self.assertIn("lowering=xla", text)
        self.assertNotIn("lowering=auto", text)

    def test_lowering_is_part_of_jits_key(self):
        case = _small("gmm")
        a, b = helpers.as_jax(case.arrays())
        fn = jax.jit(case.function())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        fn(a, b, sizes)
        with fp8.use_lowering("mosaic"), self.assertRaisesRegex(ValueError, "compiled for cpu"):
            fn(a, b, sizes)


class TypesTest(parameterized.TestCase):
    @parameterized.parameters(
        (np.int8, False), (np.uint8, True), (np.uint32, False), (np.uint32, True), (np.int64, True)
    )
    def test_integers_of_any_width(self, dtype, x64):
        case = _small("gmm")
        a, b = case.arrays()
        want = case.reference()
        with jax.enable_x64(x64):
            sizes = jnp.asarray(np.array(case.sizes, dtype))
            a, b = helpers.as_jax((a, b))
            out = jax.jit(case.function())(a, b, sizes)
            grads = jax.jit(jax.grad(lambda a, b: jnp.sum(case.function()(a, b, sizes)), (0, 1)))(
                a, b
            )
        helpers.assert_close(out, want, 2e-3)
        self.assertEqual([g.dtype for g in grads], [jnp.float32] * 2)

    def test_large_unsigned_sizes_overrun(self):
        a, b = helpers.as_jax(_small("gmm", recipe=None).arrays())
        sizes = jnp.asarray(np.array([2**32 - 1, 5, 7], np.uint32))
        out = fp8.gmm(a, b, sizes)
        helpers.assert_close(out, oracle.wide(a) @ oracle.wide(b)[0], 2e-5)

    @parameterized.parameters((), (1,))
    def test_traced_offsets_of_shards_add_up(self, *shape):
        rng = np.random.default_rng(0)
        a = jnp.asarray(rng.standard_normal((60, 32)).astype(np.float32))
        b = jnp.asarray(rng.standard_normal((8, 32, 24)).astype(np.float32))
        sizes = jnp.asarray([7, 0, 9, 11, 3, 8, 0, 12], jnp.int32)
        whole = fp8.gmm(a, b, sizes)
        part = jax.jit(lambda w, offset: fp8.gmm(a, w, sizes, group_offset=offset))
        offset = lambda i: jnp.full(shape, i, jnp.int32)
        helpers.assert_close(part(b[:4], offset(0)) + part(b[4:], offset(4)), whole, 1e-6)
        np.testing.assert_array_equal(part(b[:4], offset(100)), 0)

    def test_patched_dot_general_does_not_reach_the_kernel(self):
        case = _small("gmm")
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        want = jax.jit(case.function())(a, b, sizes)
        original = jax.lax.dot_general
        try:
            jax.lax.dot_general = lambda *a, **k: original(*a, **k) * 0
            out = jax.jit(lambda *x: case.function()(*x))(a, b, sizes)
        finally:
            jax.lax.dot_general = original
        helpers.assert_same_bits(out, want)


if __name__ == "__main__":
    absltest.main()
