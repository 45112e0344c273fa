"""The rounding rule that every lowering shares.

A block of values that share one scale is quantized as

    scale  = absmax * float32(1 / max(dtype))         (1 where that is zero or subnormal)
    qvalue = round(x * (1 / scale))                   (0 where the scale was replaced)

all in float32, rounding to nearest even and saturating. The functions are plain jnp code: they
run inside Pallas kernels as well as in XLA programs, so that no lowering has a rule of its own.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

QDTYPES = {
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e5m2": np.dtype(jnp.float8_e5m2),
    "int8": np.dtype(np.int8),
}
_TINY = np.float32(np.finfo(np.float32).tiny)  # the smallest normal float32


def dtype_max(dtype) -> np.float32:
    """The magnitude that a block's absmax is mapped to (127.5 for int8, as in Qwix)."""
    dtype = np.dtype(dtype)
    if dtype == np.int8:
        return np.float32(127.5)
    return np.float32(jnp.finfo(dtype).max)


def is_replaced(absmax, dtype):
    """Whether the scale of a block would be zero or subnormal, so that 1 stands in for it."""
    return absmax * (np.float32(1.0) / dtype_max(dtype)) < _TINY


def block_scale(absmax, dtype):
    """The scale of a block, from its float32 absmax: 1 where it would be zero or subnormal."""
    scale = absmax * (np.float32(1.0) / dtype_max(dtype))
    return jnp.where(scale < _TINY, np.float32(1.0), scale)


def block_inverse(absmax, dtype):
    """What a block is multiplied by before rounding: 1 / scale, or 0 where it is replaced."""
    inverse = np.float32(1.0) / block_scale(absmax, dtype)
    return jnp.where(is_replaced(absmax, dtype), np.float32(0.0), inverse)


def fixed_scale(bound: float, dtype) -> np.float32:
    """The one scale of a tensor whose range is declared to be [-bound, bound]."""
    return np.float32(np.float32(bound) / dtype_max(dtype))


def round_to(x, dtype):
    """float32 to ``dtype``: nearest even, saturating; NaN stays NaN in the float types."""
    dtype = np.dtype(dtype)
    if dtype == np.int8:
        return jnp.clip(jnp.round(x), -128.0, 127.0).astype(dtype)
    top = dtype_max(dtype)
    return jnp.clip(x, -top, top).astype(dtype)


def on_grid(x, dtype):
    """float32 rounded to values of a float8 type, |x| at most its maximum but for rounding.

    Where a machine converts float8 in software this is several times faster than the casts. With p
    bits of mantissa, |x| in [2^e, 2^(e+1)) rounds to a multiple of 2^(e-p), and below the smallest
    normal number to one of the subnormals' spacing: adding and subtracting 1.5 * 2^(e-p+23), whose
    last place is just that, leaves the rounding to the adder. A zero has no sign.
    """
    info = jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(0xFF << 23)
    power = jnp.maximum(
        lax.bitcast_convert_type(bits, jnp.float32), np.float32(2.0 ** int(info.minexp))
    )
    shifter = power * np.float32(1.5 * 2.0 ** (23 - int(info.nmant)))
    return (x + shifter) - shifter


def round_trip(x, dtype):
    """round_to(x, dtype) widened to float32 again, bit for bit, without the casts for float8."""
    dtype = np.dtype(dtype)
    if dtype == np.int8:
        return round_to(x, dtype).astype(jnp.float32)
    top = dtype_max(dtype)
    bits = lax.bitcast_convert_type(on_grid(jnp.clip(x, -top, top), dtype), jnp.int32)
    sign = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**31))
    return lax.bitcast_convert_type(bits | sign, jnp.float32)
