"""The blocks of all devices along a mesh axis, on each of them: ``fp8moe_ring_all_gather``.

    out[..., j, ...] = x of device j      tiled: out[..., j * r : (j + 1) * r, ...] = x of device j

    x  [*shape]         out  [*shape] with a dimension n more, or with one n times as long

Linear in x; the transpose is ring_reduce_scatter. A row scale travels beside a quantized x in the
same kernel, and where gradients flow the cotangent of its carrier in their place (see qarray.py).
Of the ring of the name see lowering/tpu/ring.py; elsewhere it is jax.lax.all_gather.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims._primitive import (
    batch_leading,
    define,
    define_carrier,
    result_aval,
    vary_over,
)
from fp8moe_prims.lowering import numerics
from fp8moe_prims.qarray import WIDE_DTYPES, QArray, check_scale


class RingAllGatherOperands(NamedTuple):
    x: Any  # [*b, *shape]
    x_scale: Any = None  # float32, of the same rank


class RingCarrierOperands(NamedTuple):
    x_carrier: Any  # like x, wide


BOTH = ("all_gather", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class RingParams:
    """Static parameters of both ring collectives.

    Attributes:
      axis: name of the mesh axis.
      size: devices along it.
      dim: the dimension that tells the devices' blocks apart, in the array that has all of them,
        counted from the end, so that leading batch dimensions don't matter.
      tiled: whether the blocks are concatenated along ``dim``, else stacked.
      cotangent_dtype: what the cotangent of a reduce-scatter is quantized to, or None.
      rings: which of the two operations may run as kernels, here and in the derivatives; the others
        are those of jax.lax on every platform.
    """

    axis: Hashable
    size: int
    dim: int
    tiled: bool
    cotangent_dtype: str | None = None
    rings: tuple[str, ...] = BOTH


def ring_all_gather(x, axis_name, *, axis=0, tiled=False):
    """Gathers the blocks of all devices along a mesh axis: ``jax.lax.all_gather``, by our ring.

    Called inside jax.shard_map. On TPU a kernel sends the blocks both ways around the ring of
    devices; on other platforms, and where the axis is no ring of the torus, jax.lax.all_gather is
    used.

    Args:
      x: this device's block, any shape; bfloat16, float16, float32, or float8 and integers of up to
        32 bits, which are moved as data and have no gradient; or a QArray.
      axis_name: the mesh axis; it may be one of several.
      axis: where the blocks go: the position of the new dimension, or of the lengthened one.
      tiled: concatenate along dimension ``axis`` of x, instead of stacking along a new one.

    Returns:
      x's dtype; with n devices the shape of x with a new dimension n at ``axis``, or with dimension
      ``axis`` n times as long. Of a QArray a QArray: scales are gathered too. Where the values of a
      device share one scale along a tiled ``axis``, [1, 1] say, it is repeated for each of them, as
      those of the devices differ: a row scale.

    Raises:
      TypeError, ValueError: an argument is wrong, or axis_name is not bound; it is named.

    >>> import jax, jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> gather = lambda x: fp8.ring_all_gather(x, "x", tiled=True)
    >>> mapped = jax.shard_map(gather, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("x"))
    >>> mapped(jnp.ones((4, 8))).shape
    (4, 8)
    """
    return gather(x, axis_name, axis, tiled, BOTH)


def gather(x, axis_name, axis, tiled, rings):
    """`ring_all_gather`, with kernels for the operations in ``rings`` alone."""
    name, size = bound_axis(axis_name)
    quantized = hasattr(x, "qvalue") and hasattr(x, "scale")
    values, scale, carrier = _quantized(x) if quantized else (_checked("x", x, _MOVED), None, None)
    full_rank = values.ndim + (0 if tiled else 1)
    at = check_dim("axis", axis, full_rank)
    params = RingParams(name, size, at - full_rank, bool(tiled), rings=rings)
    operands = RingAllGatherOperands(vary_over(values, name))
    if scale is not None:
        operands = operands._replace(x_scale=vary_over(scale, name))
    out = ring_all_gather_p.call(operands, params)
    if not quantized:
        return out[0]
    if tiled and scale.shape[at] == 1:
        out[1] = jnp.repeat(out[1], values.shape[at], at, total_repeat_length=out[0].shape[at])
    if carrier is not None:
        carrier = vary_over(carrier, name)
        carrier = ring_all_gather_carrier_p.call(RingCarrierOperands(carrier), params)
    return QArray(*out, carrier)


_MOVED = (*WIDE_DTYPES, *numerics.QDTYPES.values(), *map(np.dtype, (np.int16, np.int32)))
_MOVED = (*_MOVED, *map(np.dtype, (np.uint8, np.uint16, np.uint32)))


def bound_axis(axis_name) -> tuple[Hashable, int]:
    """(the name, its size) of the one mesh axis that ``axis_name`` gives."""
    if isinstance(axis_name, (tuple, list)):
        if len(axis_name) != 1:
            raise ValueError(
                f"axis_name: takes one mesh axis, got {axis_name!r}; call once for each axis"
            )
        (axis_name,) = axis_name
    try:
        return axis_name, lax.axis_size(axis_name)
    except (NameError, TypeError) as e:
        raise ValueError(
            f"axis_name: {axis_name!r} is not bound; call inside jax.shard_map over that axis"
        ) from e


def check_dim(name: str, dim, rank: int) -> int:
    """``dim``, not negative."""
    if not isinstance(dim, (int, np.integer)) or isinstance(dim, bool) or not -rank <= dim < rank:
        raise ValueError(f"{name}: takes an integer in [{-rank}, {rank}), got {dim!r}")
    return int(dim) % rank


def _checked(name: str, x, dtypes):
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name}: takes an array, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = ", ".join(map(str, dtypes))
        raise TypeError(f"{name}: takes an array of {allowed}, got {x.dtype}")
    return jnp.asarray(x)


def _quantized(x):
    """(values, float32 scale, carrier or None) of a QArray of any rank."""
    if getattr(x, "zero_point", None) is not None:
        raise ValueError("x: takes a symmetric QArray, got one with a zero_point")
    values = _checked("x: qvalue", x.qvalue, tuple(numerics.QDTYPES.values()))
    scale = _checked("x: scale", x.scale, WIDE_DTYPES).astype(jnp.float32)
    check_scale("x", scale.shape, values.shape)
    carrier = getattr(x, "carrier", None)
    if carrier is not None and carrier.shape != values.shape:
        raise ValueError(f"x: the carrier has shape {carrier.shape}, the qvalue {values.shape}")
    return lax.stop_gradient(values), lax.stop_gradient(scale), carrier


# ------------------------------------------------------------------------------------- rules


def gathered_shape(shape, p: RingParams):
    """The shape with the blocks of all devices."""
    shape = list(shape)
    if p.tiled:
        shape[p.dim] *= p.size
    else:
        shape.insert(len(shape) + 1 + p.dim, p.size)
    return tuple(shape)


def _ring_all_gather_abstract_eval(x: RingAllGatherOperands, p: RingParams):
    present = [a for a in x if a is not None]
    return [result_aval(a, gathered_shape(a.shape, p), a.dtype) for a in present]


def _ring_all_gather_batch_rule(x, dims, p):
    out = ring_all_gather_p.call(batch_leading(x, dims, (("x", "x_scale"),)), p)
    return out, [0] * len(out)


def _ring_all_gather_jvp_rule(x: RingAllGatherOperands, t: RingAllGatherOperands, p: RingParams):
    """dout = gather(dx); float8 and quantized values have no tangent, but their carrier has."""
    out = ring_all_gather_p.call(x, p)
    if t.x is None or x.x_scale is not None or x.x.dtype not in WIDE_DTYPES:
        return out, [None] * len(out)
    return out, ring_all_gather_p.call(RingAllGatherOperands(t.x), p)


def _ring_all_gather_transpose_rule(cts, x: RingAllGatherOperands, p: RingParams):
    """dx = reduce_scatter(dout)."""
    from fp8moe_prims.ring_reduce_scatter import RingReduceScatterOperands, ring_reduce_scatter_p

    del x
    return RingAllGatherOperands(ring_reduce_scatter_p.call(RingReduceScatterOperands(cts[0]), p))


def _carrier_result(x: RingCarrierOperands, p: RingParams):
    return result_aval(x.x_carrier, gathered_shape(x.x_carrier.shape, p), x.x_carrier.dtype)


def _carrier_tangent(x: RingCarrierOperands, t: RingCarrierOperands, p: RingParams):
    """gather(dx_carrier)."""
    del x
    if t.x_carrier is None:
        return None
    return ring_all_gather_p.call(RingAllGatherOperands(t.x_carrier), p)[0]


ring_all_gather_p = define(
    "fp8moe_ring_all_gather",
    operands=RingAllGatherOperands,
    abstract_eval=_ring_all_gather_abstract_eval,
    batch=_ring_all_gather_batch_rule,
    jvp=_ring_all_gather_jvp_rule,
    transpose=_ring_all_gather_transpose_rule,
    lowerings={
        "cpu": "xla.ring_all_gather:ring_all_gather",
        "cuda": "xla.ring_all_gather:ring_all_gather",
        "rocm": "xla.ring_all_gather:ring_all_gather",
        "tpu": "tpu.ring_all_gather:ring_all_gather",
    },
    multiple_results=True,
    collective=True,
)

ring_all_gather_carrier_p = define_carrier(
    "fp8moe_ring_all_gather_carrier",
    operands=RingCarrierOperands,
    result=_carrier_result,
    tangent=_carrier_tangent,
)
