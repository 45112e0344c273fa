"""Tokens over the expert axis: gathered before the sort, reduce-scattered after the combine.

``jax.lax`` collectives; of a quantized array the values and the scales travel, and in the backward
pass the carrier's cotangent in their place.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fp8moe_prims._primitive import define_carrier, result_aval
from fp8moe_prims.qarray import QArray


class GatherCarrierOperands(NamedTuple):
    x_carrier: Any  # [*b, t, d]


@dataclasses.dataclass(frozen=True)
class GatherParams:
    """Static parameters: the axis and its size."""

    axis: str
    size: int


def all_gather(x, axis: str):
    """The rows of all shards, [t, d] -> [shards * t, d]; x an array or a QArray."""
    gather = lambda a: lax.all_gather(a, axis, tiled=True)
    if not isinstance(x, QArray):
        return gather(x)
    # a scale [1, 1] differs between shards: it becomes a row scale
    scale = jnp.broadcast_to(x.scale, (x.qvalue.shape[0], 1))
    carrier = None
    if x.carrier is not None:
        params = GatherParams(axis, lax.axis_size(axis))
        carrier = gather_carrier_p.call(GatherCarrierOperands(x.carrier), params)
    bits = lax.bitcast_convert_type(x.qvalue, jnp.uint8)  # moved as data on every platform
    qvalue = lax.bitcast_convert_type(gather(bits), x.qvalue.dtype)
    return QArray(qvalue, gather(scale), carrier)


def reduce_scatter(x, axis: str):
    """Sums over the shards, each keeps its own rows, [shards * t, d] -> [t, d]."""
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def _carrier_result(x: GatherCarrierOperands, p: GatherParams):
    *lead, t, d = x.x_carrier.shape
    return result_aval(x.x_carrier, (*lead, p.size * t, d), x.x_carrier.dtype)


def _carrier_tangent(x, t, p: GatherParams):
    del x
    if t.x_carrier is None:
        return None
    return lax.all_gather(t.x_carrier, p.axis, axis=t.x_carrier.ndim - 2, tiled=True)


gather_carrier_p = define_carrier(
    "fp8moe_all_gather_carrier",
    operands=GatherCarrierOperands,
    result=_carrier_result,
    tangent=_carrier_tangent,
)
