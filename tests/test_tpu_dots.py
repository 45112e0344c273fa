"""Operands as the MXU takes them: the same values in other dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots
from fp8moe_prims.lowering.tpu.chip import CHIPS

_E4M3, _E5M2, _B11 = numerics.QDTYPES["e4m3"], numerics.QDTYPES["e5m2"], dots.E4M3B11
_BF16 = np.dtype(jnp.bfloat16)


def _in_kernel(fn, x, dtype):
    """fn of an array, in the interpreter."""

    def body(x_ref, out_ref):
        out_ref[...] = fn(x_ref[...])

    out = jax.ShapeDtypeStruct(x.shape, dtype)
    call = pl.pallas_call(body, out_shape=out, interpret=pltpu.InterpretParams())
    return np.asarray(jax.jit(call)(x)).astype(np.float32)


class DotsTest(parameterized.TestCase):
    def test_e4m3_as_b11(self):
        """All values, those that differ in bits (NaN, -0) in every byte of a word."""
        codes = np.random.RandomState(0).permutation(np.arange(32 * 256) % 256)
        codes[: 32 * 16] = np.tile([0x7F, 0xFF, 0x80, 0x00, 0x01], 103)[: 32 * 16]
        x = codes.astype(np.uint8).reshape(32, 256).view(_E4M3)
        got = _in_kernel(lambda x: dots.widen(x, _B11), x, _B11)
        self.assertTrue(np.isnan(got).any())
        np.testing.assert_array_equal(got * np.float32(dots.unit((_B11,))), x.astype(np.float32))

    @parameterized.product(dtype=sorted(numerics.QDTYPES), to=(None, _BF16), scaled=(False, True))
    def test_quantized(self, dtype, to, scaled):
        dtype = numerics.QDTYPES[dtype]
        rng, top = np.random.RandomState(0), numerics.dtype_max(dtype)
        x = rng.randn(32, 256) * np.exp2(rng.randint(-20, 8, (32, 256)))
        x = np.clip(x, -1, 1) * top if scaled else x * top
        x = x.astype(np.float32)
        # As absmax * (1 / scale) may be.
        x[0, 0] = np.nextafter(np.float32(top), np.float32(np.inf))
        x[0, 1], x[0, 2] = 0, -0.0
        got = _in_kernel(lambda x: dots.quantized(x, dtype, to or dtype, scaled), x, to or dtype)
        np.testing.assert_array_equal(got, np.asarray(numerics.round_to(x, dtype), np.float32))

    @parameterized.parameters(
        (_E4M3, _E5M2, "v7x", True, (_E4M3, _E5M2)),
        (_E4M3, _E5M2, "v6e", True, (_B11, _E5M2)),
        (_E4M3, _E5M2, "v5p", False, (_BF16, _E5M2)),
        (_BF16, _E4M3, "v5e", True, (_BF16, _B11)),
        (np.int8, np.int8, "v6e", True, (np.int8, np.int8)),
        (np.int8, np.int8, "v7x", True, (_BF16, _BF16)),
        (np.int8, _E4M3, "v6e", True, (_BF16, _B11)),
        (np.float32, _E4M3, "v6e", True, (np.float32, np.float32)),
    )
    def test_dtypes(self, a, b, chip, stored, want):
        self.assertEqual(dots.dot_dtypes(a, b, CHIPS[chip], (stored, stored)), want)


if __name__ == "__main__":
    absltest.main()
