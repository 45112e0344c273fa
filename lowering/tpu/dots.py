"""The matrix product of the TPU kernels: float32 accumulation for any pair of operand dtypes."""

import jax
import jax.numpy as jnp
import numpy as np

from fp8moe_prims.lowering.tpu.chip import Chip

_FP8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_IN_BF16 = (np.dtype(jnp.bfloat16), np.dtype(np.int8)) + _FP8  # dtypes that bf16 holds exactly


def is_fp8(dtype) -> bool:
    """Whether ``dtype`` is one of the two float8 types."""
    return np.dtype(dtype) in _FP8


def fits_bf16(dtype) -> bool:
    """Whether every value of ``dtype`` is a bfloat16."""
    return np.dtype(dtype) in _IN_BF16


def dot_dtypes(a_dtype, b_dtype, chip: Chip):
    """The dtypes that ``dot`` gives its operands to the MXU in."""
    a_dtype, b_dtype = np.dtype(a_dtype), np.dtype(b_dtype)
    if is_fp8(a_dtype) and is_fp8(b_dtype) and chip.native_fp8:
        return a_dtype, b_dtype
    if fits_bf16(a_dtype) and fits_bf16(b_dtype):
        return np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16)
    return np.dtype(np.float32), np.dtype(np.float32)


def widen(x, dtype):
    """``x`` as bf16 or float32, exactly, by conversions that Mosaic has on every chip."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype == np.int8 and dtype == jnp.bfloat16:
        return x.astype(jnp.float32).astype(jnp.bfloat16)
    return x.astype(dtype)


def to_float8(x, dtype):
    """float32 to a float8 type, for values whose absmax was scaled to the type's maximum.

    As numerics.round_to, whose clip changes nothing here: the absmax may exceed the maximum by a
    few units in the last place of a float32, and the conversion rounds it to the maximum.
    """
    return x.astype(dtype)


def dot(a, b, dimension_numbers, chip: Chip):
    """``dot_general(a, b)`` in a kernel, float32 result.

    Two float8 operands multiply as they are where the MXU can (e4m3 with e5m2 too). Otherwise
    operands that bf16 holds exactly go through bf16, one rounding-free conversion; any other pair
    is widened to float32 and multiplied at full float32 precision.
    """
    a_dtype, b_dtype = dot_dtypes(a.dtype, b.dtype, chip)
    (_, (b_axis,)), _ = dimension_numbers
    if b_axis == 1 and b.shape[0] == 1:
        # Mosaic makes a product with one transposed row a sum on the vector unit, in f32 only.
        a_dtype = b_dtype = np.dtype(np.float32)
    exact = a_dtype == np.float32
    # The primitive itself, not jax.lax.dot_general: quantization libraries patch that function.
    return jax.lax.dot_general_p.bind(
        widen(a, a_dtype),
        widen(b, b_dtype),
        dimension_numbers=dimension_numbers,
        precision=(jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,) * 2,
        preferred_element_type=np.dtype(np.float32),
        out_sharding=None,
    )
