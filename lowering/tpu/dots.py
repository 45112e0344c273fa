"""The matrix product of the TPU kernels: float32 accumulation for any pair of operand dtypes."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu.chip import Chip

_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
# Its values are a sixteenth of those that float8_e4m3fn has with the same bits; MXUs without float8
# arithmetic take it and float8_e5m2, and widen them to bf16 themselves.
E4M3B11 = np.dtype(jnp.float8_e4m3b11fnuz)
_IN_BF16 = (_E4M3, _E5M2, E4M3B11, np.dtype(np.int8), np.dtype(jnp.bfloat16))  # which holds them
EXACT_INT8 = 1 << 16  # products of int8 whose sum fits int32, with room


def is_fp8(dtype) -> bool:
    """Whether ``dtype`` is one of the two float8 types that values are quantized to."""
    return np.dtype(dtype) in (_E4M3, _E5M2)


def dot_dtypes(a_dtype, b_dtype, chip: Chip, stored=(False, False)):
    """The dtypes that ``dot`` gives its operands to the MXU in.

    Args:
      a_dtype, b_dtype: of the values.
      chip: the target.
      stored: whether an operand comes from memory as it is, in rows that fill tiles of 32: then
        e4m3 becomes E4M3B11 by a few operations for 4096 values at once. What the kernel quantizes
        to e4m3 is sooner made as bf16.
    """
    dtypes = np.dtype(a_dtype), np.dtype(b_dtype)
    if chip.native_fp8 and all(map(is_fp8, dtypes)):
        return dtypes
    if chip.native_int8 and all(d == np.int8 for d in dtypes):
        return dtypes
    if not all(d in _IN_BF16 for d in dtypes):
        return (np.dtype(np.float32),) * 2

    def in_bf16(dtype, stored):
        if dtype == _E4M3 and stored:
            dtype = E4M3B11
        widened = chip.widens_fp8 and dtype in (_E5M2, E4M3B11)
        return dtype if widened else np.dtype(jnp.bfloat16)

    return tuple(map(in_bf16, dtypes, stored))


def unit(dtypes) -> float:
    """What a product of operands in these dtypes is multiplied by."""
    return 16.0 ** sum(d == E4M3B11 for d in dtypes)


def widen(x, dtype):
    """``x`` as bf16 or float32, exactly, by conversions that Mosaic has on every chip.

    Or, of e4m3 with a multiple of 32 rows, as E4M3B11: a sixteenth of it.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == E4M3B11:
        return _to_e4m3b11(x)
    if x.dtype == np.int8 and dtype == jnp.bfloat16:
        return x.astype(jnp.float32).astype(jnp.bfloat16)
    return x.astype(dtype)


def _to_e4m3b11(x):
    """The same bits but for NaN, which is 0x80 there, and -0, which is not there."""
    bits = pltpu.bitcast(x, jnp.int8)
    low, nan, zero = np.int8(0x7F), np.int8(-0x80), np.int8(0)
    out = jnp.where((bits & low) == low, nan, jnp.where(bits == nan, zero, bits))
    return pltpu.bitcast(out, E4M3B11)


def quantized(x, dtype, to, scaled: bool):
    """float32 to a quantized dtype, as values of the dtype ``to`` that the MXU takes.

    As numerics.round_to; float8 in other dtypes without the casts, which chips emulate.
    ``scaled``: the absmax of x was scaled to the type's maximum. It may exceed that by a few units
    in the last place, and is rounded to the maximum.
    """
    dtype, to = np.dtype(dtype), np.dtype(to)
    if dtype == np.int8:
        return widen(numerics.round_to(x, dtype), to)
    if not scaled:
        top = numerics.dtype_max(dtype)
        x = jnp.clip(x, -top, top)
    return x.astype(dtype) if to == dtype else numerics.on_grid(x, dtype).astype(to)


def dot(a, b, dimension_numbers, chip: Chip):
    """``dot_general(a, b)`` in a kernel, float32 result.

    Two float8 operands multiply as they are where the MXU can (e4m3 with e5m2 too), two of int8 to
    an exact int32 where that is the faster way; the contraction is at most EXACT_INT8 elements
    then. Otherwise operands that bf16 holds exactly are multiplied as bf16, without rounding; any
    other pair is widened to float32 and multiplied at full float32 precision.
    """
    a_dtype, b_dtype = dot_dtypes(a.dtype, b.dtype, chip)
    (_, (b_axis,)), _ = dimension_numbers
    if b_axis == 1 and b.shape[0] == 1:
        # Mosaic makes a product with one transposed row a sum on the vector unit, in f32 only.
        a_dtype = b_dtype = np.dtype(np.float32)
    exact = a_dtype == np.float32
    # The primitive itself, not lax.dot_general: quantization libraries patch that function.
    out = lax.dot_general_p.bind(
        widen(a, a_dtype),
        widen(b, b_dtype),
        dimension_numbers=dimension_numbers,
        precision=(lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,) * 2,
        preferred_element_type=np.dtype(np.int32 if a_dtype == np.int8 else np.float32),
        out_sharding=None,
    )
    return out.astype(jnp.float32)
