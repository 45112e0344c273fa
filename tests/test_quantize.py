"""quantize, QArray and the shared rounding rule."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from fp8moe_prims.lowering import numerics
from tests import helpers, oracle


class QuantizeTest(parameterized.TestCase):
    @parameterized.product(
        dtype=["e4m3", "e5m2"],
        axes=[(), (0,), (1,), (0, 1)],
        wide=[np.float32, ml_dtypes.bfloat16, np.float16],
    )
    def test_absmax(self, dtype, axes, wide):
        x = np.random.default_rng(0).standard_normal((24, 40)).astype(wide)
        q = jax.jit(lambda x: fp8.quantize(x, dtype, channelwise_axes=axes))(jnp.asarray(x))
        self.assertEqual(q.qvalue.dtype, oracle.QDTYPES[dtype])
        shared = tuple(a for a in (0, 1) if a not in axes)
        absmax = np.abs(x.astype(np.float32)).max(axis=shared, keepdims=True)
        want = absmax * np.float32(np.float32(1) / np.float32(oracle.MAX[dtype]))
        np.testing.assert_array_equal(q.scale, want)
        error = np.abs(oracle.wide(x) - np.asarray(q.dequantize(), np.float64))
        step = {"e4m3": 2**-4, "e5m2": 2**-3}[dtype]
        self.assertTrue((error <= step * np.abs(oracle.wide(x)) + want * 2.0**-7).all())

    def test_fixed_is_one_scale_and_saturates(self):
        x = jnp.asarray([[1.0, -300.0, 224.0, 1e9]])
        for text in ("fixed,-224,224", "fixed,224"):
            q = fp8.quantize(x, "e4m3", channelwise_axes=(1,), calibration=text)
            self.assertEqual(q.scale.shape, (1, 1))
            np.testing.assert_array_equal(q.scale, np.float32(224 / 448))
            np.testing.assert_array_equal(q.dequantize(), [[1, -224, 224, 224]])

    def test_zero_and_tiny_blocks(self):
        x = np.zeros((4, 8), np.float32)
        x[1], x[2], x[3] = 1e-40, 1e-36, -0.0
        q = fp8.quantize(jnp.asarray(x), "e4m3", channelwise_axes=(0,))
        np.testing.assert_array_equal(np.asarray(q.scale)[[0, 1, 3]], 1)
        np.testing.assert_array_equal(oracle.wide(q.qvalue)[[0, 1, 3]], 0)
        self.assertTrue(np.isfinite(q.dequantize()).all())

    def test_cotangent_passes_unchanged(self):
        x = jnp.linspace(-3, 3, 32, dtype=jnp.bfloat16).reshape(4, 8)
        ct = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
        loss = lambda x: jnp.sum(fp8.quantize(x, "e4m3").dequantize() * ct)
        grad = jax.grad(loss)(x)
        self.assertEqual(grad.dtype, jnp.bfloat16)
        helpers.assert_same_bits(grad, ct.astype(jnp.bfloat16))

    def test_blockwise_dequantize(self):
        q = fp8.QArray(jnp.ones((4, 6), jnp.int8), jnp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        want = np.repeat(np.repeat(np.asarray(q.scale), 2, 0), 2, 1)
        np.testing.assert_array_equal(q.dequantize(), want)

    def test_values_saved_by_a_checkpoint_are_unchanged(self):
        """jax.checkpoint's reduce_precision would make NaN of every e4m3 value above 240."""
        x = jnp.full((4, 8), 3.0)

        def layer(x):
            q = fp8.quantize(x, "e4m3")
            name = lambda a: jax.ad_checkpoint.checkpoint_name(a, "q")
            values = name(q.qvalue).astype(jnp.float32) * q.scale
            return jnp.sum(jnp.sin(values) * x)

        for policy in ("everything_saveable", "nothing_saveable"):
            fn = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
            np.testing.assert_allclose(jax.jit(jax.grad(fn))(x), jnp.sin(x), rtol=1e-5)

    def test_is_a_pytree(self):
        q = fp8.quantize(jnp.ones((4, 8)), "e4m3")
        self.assertLen(jax.tree.leaves(q), 3)
        out = jax.jit(lambda q: q)(q)
        self.assertIsInstance(out, fp8.QArray)


class RoundTest(parameterized.TestCase):
    @parameterized.parameters("e4m3", "e5m2")
    def test_casts_round_to_nearest_even_and_saturate(self, name):
        dtype, top = numerics.QDTYPES[name], float(numerics.dtype_max(numerics.QDTYPES[name]))
        rng = np.random.default_rng(0)
        x = rng.standard_normal(1 << 16).astype(np.float32) * np.exp2(rng.uniform(-20, 20, 1 << 16))
        edge = np.array([0, -0.0, top, top * 1.01, -2 * top, 3e38, 1e-40, np.nan], np.float32)
        x = np.concatenate([x.astype(np.float32), edge])
        want = np.clip(x, -top, top).astype(dtype)
        helpers.assert_same_bits(jax.jit(lambda x: numerics.round_to(x, dtype))(x), want)


if __name__ == "__main__":
    absltest.main()
