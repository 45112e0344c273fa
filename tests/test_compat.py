"""The drop-in forms against jax.lax.ragged_dot; against tokamax and Qwix themselves where they are.

tokamax and qwix need Python 3.12: .ci/run runs this file once more in an environment that has them.
"""

import importlib.util
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import fp8moe_prims as fp8
from fp8moe_prims.compat import maxtext
from fp8moe_prims.compat import tokamax as ours
from fp8moe_prims.compat.qwix import recipe_of_rule, to_qwix
from tests import helpers

M, K, N, G = 40, 128, 64, 3
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RULE = types.SimpleNamespace(
    weight_qtype=E4M3,
    act_qtype=E4M3,
    bwd_qtype=E5M2,
    act_calibration_method="absmax",
    weight_calibration_method="absmax",
    bwd_calibration_method="absmax",
)


def _inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    normal = lambda *s: jnp.asarray(rng.standard_normal(s), dtype)
    return normal(M, K), normal(G, K, N), jnp.array([10, 0, 23]), normal(M, N)


def _references():
    """name -> ragged_dot_general: JAX's, and tokamax's own CPU reference where it is installed."""
    out = {"jax": lambda *a, **kw: jax.lax.ragged_dot_general(*a, **kw)}
    if importlib.util.find_spec("tokamax"):
        import tokamax

        out["tokamax"] = lambda *a, **kw: tokamax.ragged_dot_general(*a, implementation="xla", **kw)
    return out


REFERENCES = _references()


def _value_and_gradients(fn, lhs, rhs, dout):
    """(out, dlhs, drhs), jitted."""
    return jax.jit(lambda l, r, d: (fn(l, r), *jax.vjp(fn, l, r)[1](d)))(lhs, rhs, dout)


def _numbers(contract, group=(0,)):
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contract, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=list(group),
    )


class TokamaxTest(parameterized.TestCase):
    @parameterized.product(reference=sorted(REFERENCES), transposed=[False, True])
    def test_values_and_gradients(self, reference, transposed):
        lhs, rhs, sizes, dout = _inputs()
        rhs = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
        numbers = _numbers(((1,), (2,)) if transposed else ((1,), (1,)))
        bound = lambda f: lambda l, r: f(l, r, sizes, numbers)
        got = _value_and_gradients(bound(ours.ragged_dot_general), lhs, rhs, dout)
        want = _value_and_gradients(bound(REFERENCES[reference]), lhs, rhs, dout)
        for a, b in zip(got, want, strict=True):
            helpers.assert_close(a, b, 1e-5)

    @parameterized.product(reference=sorted(REFERENCES))
    def test_weight_gradient_form(self, reference):
        lhs, _, sizes, dout = _inputs()
        numbers = _numbers(((0,), (0,)), ())
        got = jax.jit(lambda *a: ours.ragged_dot_general(*a, numbers))(lhs, dout, sizes)
        want = jax.jit(lambda *a: REFERENCES[reference](*a, numbers))(lhs, dout, sizes)
        helpers.assert_close(got, want, 1e-5)

    def test_options(self):
        lhs, rhs, sizes, _ = _inputs(jnp.bfloat16)
        plain = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
        out = ours.ragged_dot(lhs, rhs, sizes, "highest", activation=jnp.tanh)
        self.assertEqual(out.dtype, jnp.bfloat16)
        helpers.assert_close(out, jnp.tanh(plain), 1e-2)
        gate, up = jnp.split(plain, 2, axis=1)
        for name, fn in (("silu", jax.nn.silu), ("gelu_tanh", jax.nn.gelu)):
            got = ours.ragged_dot(lhs, rhs, sizes, fuse_gateup_activation=name)
            helpers.assert_close(got, fn(gate) * up, 2e-2)
        got = ours.ragged_dot(lhs, rhs[1:], sizes, group_offset=jnp.array([1]))
        helpers.assert_close(got, plain.at[:10].set(0), 1e-2)
        got = ours.ragged_dot(lhs, rhs, [10, 0, 23], implementation=("mosaic", "xla"))
        helpers.assert_close(got, plain, 1e-2)
        wrapped = types.SimpleNamespace(value=sizes)  # as tokamax.GroupSizes has it
        helpers.assert_close(ours.ragged_dot(lhs, rhs, wrapped), plain, 1e-2)

    def test_quantized_operands(self):
        lhs, rhs, sizes, _ = _inputs()
        a = fp8.quantize(lhs, "e4m3", channelwise_axes=(0,))
        b = fp8.quantize(rhs, "e4m3", channelwise_axes=(0, 2))
        want = jax.lax.ragged_dot(a.dequantize(jnp.float32), b.dequantize(jnp.float32), sizes)
        helpers.assert_close(
            ours.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32), want, 2e-5
        )

    @parameterized.named_parameters(
        ("precision", dict(precision=jax.lax.DotAlgorithmPreset.F32_F32_F32), "precision"),
        ("implementation", dict(implementation=lambda *a: a), "implementation"),
        ("gated", dict(fuse_gateup_activation="swigluoai"), "fuse_gateup_activation"),
        (
            "unreduced",
            dict(manual_axis_type=types.SimpleNamespace(unreduced={"x"}, varying=set())),
            "manual_axis_type",
        ),
    )
    def test_refused(self, options, name):
        with self.assertRaisesRegex(NotImplementedError, name):
            ours.ragged_dot(*_inputs()[:3], **options)

    @parameterized.parameters((((1,), (0,)), (1,)), (((0,), (0,)), (0,)))
    def test_other_forms_are_refused(self, contract, group):
        with self.assertRaisesRegex(NotImplementedError, "ragged_dot_dimension_numbers"):
            ours.ragged_dot_general(*_inputs()[:3], _numbers(contract, group))

    def test_signature_is_tokamax_s(self):
        if "tokamax" not in REFERENCES:
            return
        import tokamax

        for name in ("ragged_dot", "ragged_dot_general"):
            a, b = (inspect.signature(getattr(m, name)) for m in (ours, tokamax))
            self.assertEqual(list(a.parameters), list(b.parameters))
            for p, q in zip(a.parameters.values(), b.parameters.values(), strict=True):
                self.assertEqual((p.kind, p.default), (q.kind, q.default))


class RuleTest(parameterized.TestCase):
    def test_translated(self):
        recipe = recipe_of_rule(RULE)
        self.assertEqual(
            (recipe.act_dtype, recipe.weight_dtype, recipe.grad_dtype), ("e4m3", "e4m3", "e5m2")
        )
        fixed = types.SimpleNamespace(
            **vars(RULE)
            | dict(act_calibration_method="fixed,-224,224", bwd_weight_grad_tile_size=512)
        )
        recipe = recipe_of_rule(fixed)
        self.assertEqual((recipe.act_calibration, recipe.block_m), ("fixed,-224,224", 512))
        self.assertIsNone(recipe_of_rule(None).act_dtype)

    @parameterized.parameters(
        (dict(weight_qtype=jnp.int4), "weight_qtype"),
        (dict(bwd_qtype=jnp.int8), "bwd_qtype"),
        (dict(act_calibration_method="minmax"), "act_calibration_method"),
        (dict(tile_size=128), "tile_size"),
        (dict(act_static_scale=True), "act_static_scale"),
        (dict(bwd_stochastic_rounding="uniform"), "bwd_stochastic_rounding"),
        (dict(additional_qt_config={"a": 1}), "additional_qt_config"),
        (dict(disable_channelwise_axes=True), "disable_channelwise_axes"),
        (dict(bwd_weight_grad_tile_size=0.25), "bwd_weight_grad_tile_size"),
    )
    def test_refused(self, fields, name):
        with self.assertRaisesRegex((ValueError, NotImplementedError), name):
            recipe_of_rule(types.SimpleNamespace(**vars(RULE) | fields))

    def test_qwix_arrays_go_in_and_out(self):
        if not importlib.util.find_spec("qwix"):
            return
        import qwix

        lhs, rhs, sizes, _ = _inputs()
        theirs = qwix.quantize(lhs, E4M3, channelwise_axes=(0,))
        mine = fp8.quantize(lhs, "e4m3", channelwise_axes=(0,))
        back = to_qwix(mine)
        self.assertEqual(back.qtype, theirs.qvalue.dtype)
        helpers.assert_same_bits(fp8.gmm(theirs, rhs, sizes), fp8.gmm(back, rhs, sizes))
        self.assertEqual(recipe_of_rule(qwix.QtRule(weight_qtype=E4M3)).weight_dtype, "e4m3")

    @parameterized.product(
        qdtype=["e4m3", "e5m2", "int8"],
        calibration=["absmax", "fixed,-2,2"],
        axes=[(), (0,), (0, 1)],
        dtype=[jnp.float32, jnp.bfloat16],
    )
    def test_quantize_equals_qwix(self, qdtype, calibration, axes, dtype):
        if not importlib.util.find_spec("qwix"):
            return
        import qwix

        x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
        x[3], x[:, 5] = 0, 1e4
        x = jnp.asarray(x, dtype)
        mine = jax.jit(
            lambda x: fp8.quantize(x, qdtype, channelwise_axes=axes, calibration=calibration)
        )(x)
        theirs = jax.jit(
            lambda x: qwix.quantize(
                x.astype(jnp.float32),
                mine.qvalue.dtype,
                channelwise_axes=axes,
                calibration_method=calibration,
            )
        )(x)
        helpers.assert_same_bits(mine.qvalue, theirs.qvalue)
        np.testing.assert_array_equal(*np.broadcast_arrays(mine.scale, theirs.scale))


class MaxTextTest(parameterized.TestCase):
    @parameterized.product(transposed=[False, True], rule=[None, RULE])
    def test_values_and_gradients(self, transposed, rule):
        """MaxText's own imports are too heavy for a test: held against the documented meaning."""
        lhs, rhs, sizes, dout = _inputs()
        given = jnp.swapaxes(rhs, 1, 2) if transposed else rhs

        def fn(l, r):
            out = maxtext.gmm(
                l,
                r,
                sizes,
                transpose_rhs=transposed,
                use_qwix_quantization=rule is not None,
                qwix_rule=rule,
            )
            return out

        got, dl, dr = _value_and_gradients(fn, lhs, given, dout)
        dr = jnp.swapaxes(dr, 1, 2) if transposed else dr
        reference = lambda l, r: jax.lax.ragged_dot(l, r, sizes)
        wants = _value_and_gradients(reference, lhs, rhs, dout)
        bound = 1e-5 if rule is None else 0.12
        for a, b in zip((got, dl, dr), wants, strict=True):
            self.assertLess(helpers.distance(a, b), bound)

    @parameterized.parameters(*(([a],) for a in ("x2", "x1", "x0")), (["x1", "y2"],))
    def test_weight_gather_axes(self, axes):
        """The shards' parts are quantized, gathered and used; gradients are reduce-scattered."""
        axes = [(a[0], int(a[1])) for a in axes]
        lhs, rhs, sizes, dout = _inputs()
        rhs = jnp.concatenate([rhs, rhs])  # four experts and two that are empty
        sizes = jnp.array([10, 0, 23, 0, 0, 0])
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
        spec = [None] * 3
        for name, axis in axes:
            spec[axis] = name

        def local(l, r, d):
            fn = lambda l, r: maxtext.gmm(
                l, r, sizes, weight_gather_axes=axes, use_qwix_quantization=True, qwix_rule=RULE
            )
            out, pull = jax.vjp(fn, l, r)
            return out, pull(d)

        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(*spec), P()),
            out_specs=(P(), (P(), P(*spec))),
            check_vma=False,
        )
        out, (dl, dr) = jax.jit(sharded)(lhs, rhs, dout)
        want, pull = jax.vjp(lambda l, r: jax.lax.ragged_dot(l, r, sizes), lhs, rhs)
        dl_want, dr_want = pull(dout)
        self.assertLess(helpers.distance(out, want), 0.12)
        self.assertLess(helpers.distance(dl, dl_want), 0.12)
        shards = 2 ** len(axes)  # every shard has the same rows: each adds its gradient
        self.assertLess(helpers.distance(dr, shards * dr_want), 0.12)

    @parameterized.parameters(
        (dict(existing_out=0), "existing_out"),
        (dict(partial_sum=0), "partial_sum"),
        (dict(use_manual_quantization=True), "use_manual_quantization"),
        (dict(lhs_quantize_dtype=jnp.int4), "lhs_quantize_dtype"),
    )
    def test_refused(self, options, name):
        with self.assertRaisesRegex(NotImplementedError, name):
            maxtext.gmm(*_inputs()[:3], **options)

    def test_int8_without_a_rule(self):
        lhs, rhs, sizes, _ = _inputs()
        got = maxtext.gmm(lhs, rhs, sizes, lhs_quantize_dtype=jnp.int8, rhs_quantize_dtype=jnp.int8)
        self.assertLess(helpers.distance(got, jax.lax.ragged_dot(lhs, rhs, sizes)), 0.02)


if __name__ == "__main__":
    absltest.main()
