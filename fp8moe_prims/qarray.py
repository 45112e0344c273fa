"""Quantized arrays: ``QArray`` and ``quantize``, with straight-through gradients in wide dtypes.

``x ~ qvalue * scale``. A QArray made by ``quantize`` also has a *carrier*: an array of the shape of
qvalue and the dtype of x, whose value no forward pass reads and whose tangent is that of the
dequantized array. Operations differentiate with respect to the carrier, so that the cotangent of a
quantized array is as wide as what it was made from, never float8.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8moe_prims.lowering import numerics

WIDE_DTYPES = tuple(np.dtype(t) for t in (jnp.bfloat16, np.float16, np.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray:
    """A quantized array, a pytree: x ~ qvalue * scale.

    Attributes:
      qvalue: float8_e4m3fn, float8_e5m2 or int8, any shape.
      scale: float32 (bfloat16 and float16 are widened), of the same rank; each dimension is 1, that
        of qvalue, or a divisor of it (one scale per block of dim / divisor elements).
      carrier: what gradients flow to: an array of qvalue's shape in the wide dtype, whose value is
        never read. None: the QArray is a constant and takes no gradient. The gradient with respect
        to a QArray is a QArray whose carrier holds it; its qvalue and scale are zeros.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> q = fp8.QArray(jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.full((4, 1), 2.0))
    >>> q.dequantize(jnp.float32)[0, 0]
    Array(2., dtype=float32)
    """

    qvalue: Any
    scale: Any
    carrier: Any = None

    shape = property(lambda self: self.qvalue.shape)
    ndim = property(lambda self: self.qvalue.ndim)

    def dequantize(self, dtype=jnp.float32):
        """qvalue * scale, computed in float32, as ``dtype``.

        Raises:
          ValueError: scale does not fit qvalue.
        """
        check_scale("scale", self.scale.shape, self.qvalue.shape)
        scale = expand_scale(jax.lax.stop_gradient(self.scale), self.qvalue.shape)
        value = jax.lax.stop_gradient(self.qvalue).astype(jnp.float32) * scale
        value = value.astype(dtype)
        return value if self.carrier is None else _attach(value, self.carrier)


@jax.custom_jvp
def _attach(value, carrier):
    """``value``, with the tangent of ``carrier``."""
    del carrier
    return value


@_attach.defjvp
def _attach_jvp(primals, tangents):
    value, _ = primals
    return value, tangents[1].astype(value.dtype)


def check_scale(name: str, scale_shape, shape) -> None:
    """Raises ValueError unless each dimension of the scale is 1 or divides that of the values."""
    fits = len(scale_shape) == len(shape) and all(
        s == 1 or s == d or (s > 0 and d % s == 0) for s, d in zip(scale_shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: the scale has shape {tuple(scale_shape)}, which does not fit values of shape"
            f" {tuple(shape)}: the rank must be the same and each dimension 1, equal, or a divisor."
        )


def expand_scale(scale, shape):
    """The scale in float32, each block-wise dimension repeated to that of ``shape`` (1 stays 1)."""
    scale = scale.astype(jnp.float32)
    for axis, (s, d) in enumerate(zip(scale.shape, shape, strict=True)):
        if s not in (1, d):
            scale = jnp.repeat(scale, d // s, axis=axis, total_repeat_length=d)
    return scale


def qdtype_name(name: str, dtype, allowed=tuple(numerics.QDTYPES)) -> str:
    """The name of a quantized dtype given by name or as a dtype; ``name`` is the argument's."""
    for key in allowed:
        if isinstance(dtype, str) and dtype == key:
            return key
        if not isinstance(dtype, (str, type(None))):
            try:
                if np.dtype(dtype) == numerics.QDTYPES[key]:
                    return key
            except TypeError:
                break
    raise ValueError(f"{name}: must be one of {tuple(allowed)}, got {dtype!r}")


def parse_calibration(name: str, calibration) -> float | None:
    """The bound b of "fixed,-b,b" or "fixed,b", None for "absmax"; ``name`` is the argument's."""
    if calibration == "absmax":
        return None
    number = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
    match = isinstance(calibration, str) and re.fullmatch(
        rf"fixed,\s*{number}(?:,\s*{number})?", calibration
    )
    if match:
        low, high = match.group(1), match.group(2)
        bound = float(low if high is None else high)
        if 0 < bound < math.inf and (high is None or float(low) == -bound):
            return bound
    raise ValueError(
        f"{name}: must be 'absmax', 'fixed,-b,b' or 'fixed,b' with a finite b > 0,"
        f" got {calibration!r}"
    )


def quantize(x, qdtype, *, channelwise_axes=(), calibration="absmax") -> QArray:
    """Quantizes an array as a whole or per channel, outside any kernel.

    The result equals Qwix's ``quantize`` of the float32-widened array bit for bit, except that a
    block whose scale is a normal float32 is never replaced by zeros. The gradient is straight
    through: the cotangent of the result, in the dtype of x, is that of x.

    Args:
      x: bfloat16, float16 or float32, any shape.
      qdtype: "e4m3", "e5m2" or "int8" (or the dtype itself).
      channelwise_axes: axes along which each index has a scale of its own; the others share it.
      calibration: "absmax", or "fixed,-b,b" / "fixed,b": one scale for the tensor, values beyond
        the range saturate.

    Returns:
      A QArray; its scale is float32 with 1 in the axes that share it.

    Raises:
      TypeError: x is not of such a dtype, or channelwise_axes is a single integer.
      ValueError: qdtype, channelwise_axes or calibration is none of these.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> fp8.quantize(jnp.ones((4, 8)), "e4m3", channelwise_axes=(0,)).scale.shape
    (4, 1)
    """
    dtype = numerics.QDTYPES[qdtype_name("qdtype", qdtype)]
    bound = parse_calibration("calibration", calibration)
    if getattr(x, "dtype", None) not in WIDE_DTYPES:
        raise TypeError(f"x: must be bfloat16, float16 or float32, got {_describe(x)}")
    if not isinstance(channelwise_axes, Iterable):
        raise TypeError(f"channelwise_axes: takes a tuple of axes, got {channelwise_axes!r}")
    axes = tuple(channelwise_axes)
    if not all(isinstance(a, (int, np.integer)) and -x.ndim <= a < x.ndim for a in axes):
        raise ValueError(f"channelwise_axes: must lie in [-{x.ndim}, {x.ndim}), got {axes}")
    kept = {a % x.ndim for a in axes}

    wide = jax.lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32)
    if bound is None:
        shared = tuple(a for a in range(x.ndim) if a not in kept)
        absmax = jnp.max(jnp.abs(wide), axis=shared, keepdims=True, initial=0.0)
        scale = numerics.block_scale(absmax, dtype)
        # A replaced scale divides by infinity: zeros that keep their sign, as rounding would.
        divisor = jnp.where(numerics.is_replaced(absmax, dtype), np.float32(np.inf), scale)
    else:
        fixed = numerics.fixed_scale(bound, dtype)
        scale = divisor = jnp.full((1,) * x.ndim, fixed, jnp.float32)
    return QArray(numerics.round_to(wide / divisor, dtype), scale, jnp.asarray(x))


def operand(name: str, x, shape: tuple[str, ...]):
    """(values, float32 scale or None, carrier or None) of an array or QArray argument.

    Args:
      name: the argument's name, for errors.
      x: an array of a wide dtype, a QArray, or any object with qvalue and scale (and a zero_point
        that is None).
      shape: the names of its dimensions, which fix its rank.
    """
    what = f"an array of rank {len(shape)}, [{', '.join(shape)}]"
    if not (hasattr(x, "qvalue") and hasattr(x, "scale")):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"{name}: takes {what} or a QArray, got {type(x).__name__}")
        if len(x.shape) != len(shape):
            raise ValueError(f"{name}: takes {what}, got shape {tuple(x.shape)}")
        if x.dtype not in WIDE_DTYPES:
            hint = "; wrap quantized values and their scale in a QArray"
            hint = hint if x.dtype in numerics.QDTYPES.values() else ""
            raise TypeError(f"{name}: takes bfloat16, float16 or float32, got {x.dtype}{hint}")
        return jnp.asarray(x), None, None
    if getattr(x, "zero_point", None) is not None:
        raise ValueError(f"{name}: takes a symmetric QArray, got one with a zero_point")
    if len(x.qvalue.shape) != len(shape):
        raise ValueError(f"{name}: takes {what}, got a qvalue of shape {tuple(x.qvalue.shape)}")
    if x.qvalue.dtype not in numerics.QDTYPES.values():
        names = ", ".join(str(d) for d in numerics.QDTYPES.values())
        raise TypeError(f"{name}: takes a qvalue of {names}, got {x.qvalue.dtype}")
    if x.scale.dtype not in WIDE_DTYPES:
        raise TypeError(f"{name}: takes a float32, bfloat16 or float16 scale, got {x.scale.dtype}")
    check_scale(name, x.scale.shape, x.qvalue.shape)
    carrier = getattr(x, "carrier", None)
    if carrier is not None and carrier.shape != x.qvalue.shape:
        raise ValueError(
            f"{name}: the carrier has shape {carrier.shape}, the qvalue {x.qvalue.shape}"
        )
    scale = jax.lax.stop_gradient(jnp.asarray(x.scale)).astype(jnp.float32)
    return jax.lax.stop_gradient(jnp.asarray(x.qvalue)), scale, carrier


def _describe(x) -> str:
    return str(x.dtype) if hasattr(x, "dtype") else type(x).__name__
