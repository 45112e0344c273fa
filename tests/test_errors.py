"""Wrong calls: each raises TypeError or ValueError at trace time and names the argument."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from fp8moe_prims.primitives import unsupported

LHS, RHS, SIZES = np.ones((8, 128), np.float32), np.ones((2, 128, 16), np.float32), np.array([3, 4])
DOUT = np.ones((8, 16), np.float32)
Q = lambda shape, scale: fp8.QArray(np.ones(shape, jnp.float8_e4m3fn), np.ones(scale, np.float32))

GMM = {
    "lhs_rank": (dict(lhs=LHS[0]), "lhs"),
    "rhs_rank": (dict(rhs=RHS[0]), "rhs"),
    "contraction": (dict(rhs=RHS[:, :64]), "rhs"),
    "contraction_transposed": (dict(transpose_rhs=True), "rhs"),
    "transposed_weights": (
        dict(rhs=np.swapaxes(RHS, 1, 2)),
        r"got \(2, 16, 128\); pass transpose_rhs=True for \[g, n, k\]",
    ),
    "lhs_integer": (dict(lhs=LHS.astype(np.int32)), "lhs"),
    "lhs_float64": (dict(lhs=LHS.astype(np.float64)), "lhs"),
    "lhs_plain_float8": (dict(lhs=LHS.astype(jnp.float8_e4m3fn)), "lhs"),
    "lhs_list": (dict(lhs=[[1.0]]), "lhs"),
    "rhs_integer": (dict(rhs=RHS.astype(np.int8)), "rhs"),
    "float_sizes": (dict(group_sizes=np.array([3.0, 4.0])), "group_sizes"),
    "bool_sizes": (dict(group_sizes=np.array([True, False])), "group_sizes"),
    "sizes_2d": (dict(group_sizes=np.array([[3, 4]])), "group_sizes"),
    "too_few_sizes": (
        dict(group_sizes=np.array([3])),
        "group_sizes: takes at least the 2 groups of rhs, got 1",
    ),
    "starts_shape": (dict(group_starts=np.array([0])), "group_starts"),
    "starts_float": (dict(group_starts=np.array([0.0, 3.0])), "group_starts"),
    "offset_float": (dict(group_offset=0.5), "group_offset"),
    "offset_shape": (dict(group_offset=np.array([0, 1])), "group_offset"),
    "lhs_scale": (dict(lhs=Q((8, 128), (4, 1))), "lhs"),
    "lhs_scale_channel": (dict(lhs=Q((8, 128), (1, 128))), "lhs"),
    "lhs_scale_rank": (dict(lhs=Q((8, 128), (8,))), "lhs"),
    "rhs_scale": (dict(rhs=Q((2, 128, 16), (2, 3, 1))), "rhs"),
    "rhs_scale_large": (dict(rhs=Q((2, 128, 16), (2, 256, 1))), "rhs"),
    "scale_dtype": (dict(lhs=fp8.QArray(Q((8, 128), (8, 1)).qvalue, np.ones((8, 1), int))), "lhs"),
    "qvalue_dtype": (dict(lhs=fp8.QArray(LHS, np.ones((8, 1), np.float32))), "lhs"),
    "recipe_type": (dict(recipe="e4m3"), "recipe"),
    "tail": (dict(tail="nan"), "tail"),
    "out_dtype": (dict(preferred_element_type=jnp.float8_e4m3fn), "preferred_element_type"),
    "expected_rows": (dict(expected_rows=-1), "expected_rows"),
    "no_columns": (dict(rhs=RHS[:, :, :0]), "k and n"),
}
TGMM = {
    "rows": (dict(dout=DOUT[:4]), "dout"),
    "dout_rank": (dict(dout=DOUT[0]), "dout"),
    "dout_qarray": (dict(dout=Q((8, 16), (8, 1))), "dout"),
    "float_sizes": (dict(group_sizes=np.array([3.0, 4.0])), "group_sizes"),
    "sizes_2d": (dict(group_sizes=np.array([[3, 4]])), "group_sizes"),
    "lhs_dtype": (dict(lhs_dtype="e3m4"), "lhs_dtype"),
    "dout_dtype": (dict(dout_dtype="fp8"), "dout_dtype"),
    "zero_block": (dict(block_m=0), "block_m"),
    "odd_block": (dict(block_m=100), "block_m"),
    "num_groups": (dict(num_groups=-1), "num_groups"),
}
RECIPE = {
    "act_dtype": dict(act_dtype="e3m4"),
    "weight_dtype": dict(weight_dtype="fp4"),
    "grad_dtype": dict(grad_dtype="int8"),
    "act_calibration": dict(act_calibration="rms"),
    "weight_calibration": dict(weight_calibration="fixed,-1,2"),
    "grad_calibration": dict(grad_calibration="fixed,0"),
    "backward": dict(backward="fast"),
    "block_m": dict(block_m=0),
    "block_k": dict(block_k=100),
}


class ErrorsTest(parameterized.TestCase):
    @parameterized.named_parameters((name, *row) for name, row in GMM.items())
    def test_gmm(self, change, argument):
        call = dict(lhs=LHS, rhs=RHS, group_sizes=SIZES) | change
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.gmm(**call)

    @parameterized.named_parameters((name, *row) for name, row in TGMM.items())
    def test_tgmm_quant(self, change, argument):
        call = dict(lhs=LHS, dout=DOUT, group_sizes=SIZES) | change
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.tgmm_quant(**call)

    @parameterized.named_parameters(RECIPE.items())
    def test_recipe(self, fields):
        with self.assertRaisesRegex(ValueError, next(iter(fields))):
            fp8.QuantRecipe(**fields)

    @parameterized.parameters(
        (dict(x=LHS.astype(np.int32)), "x"),
        (dict(qdtype="e3m4"), "qdtype"),
        (dict(channelwise_axes=(2,)), "channelwise_axes"),
        (dict(channelwise_axes=0), "channelwise_axes: takes a tuple of axes, got 0"),
        (dict(calibration="max"), "calibration"),
    )
    def test_quantize(self, change, argument):
        with self.assertRaisesRegex((TypeError, ValueError), argument):
            fp8.quantize(**(dict(x=LHS, qdtype="e4m3") | change))

    def test_dequantize(self):
        with self.assertRaisesRegex(ValueError, "scale"):
            Q((8, 128), (3, 1)).dequantize()

    def test_use_lowering(self):
        with self.assertRaisesRegex(ValueError, "use_lowering.*'pallas'"):
            fp8.use_lowering("pallas")

    def test_zero_point(self):
        q = types.SimpleNamespace(
            qvalue=LHS.astype(np.int8), scale=np.ones((8, 1), np.float32), zero_point=1
        )
        with self.assertRaisesRegex(ValueError, "lhs.*zero_point"):
            fp8.gmm(q, RHS, SIZES)

    def test_explicit_mesh(self):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            lhs = jax.device_put(jnp.asarray(LHS), jax.P("x"))
            with self.assertRaisesRegex(TypeError, "shard_map"):
                fp8.gmm(lhs, jnp.asarray(RHS), SIZES)

    def test_unsupported_rule_says_why(self):
        with self.assertRaisesRegex(NotImplementedError, "because; do that"):
            unsupported("because; do that")(None, None)


if __name__ == "__main__":
    absltest.main()
