"""Tokens over the expert axis: gathered before the sort, reduce-scattered after the combine.

The collectives of a forward pass are those of jax.lax unless asked for: a rematerialized forward
pass then has no kernel that speaks with other devices. Of a quantized array the values and the
scales travel, and in the backward pass the carrier's cotangent in their place.
"""

from fp8moe_prims.ring_all_gather import gather
from fp8moe_prims.ring_reduce_scatter import scatter


def all_gather(x, axis: str, *, ring_cotangent=False):
    """The rows of all shards, [t, d] -> [shards * t, d]; x an array or a QArray.

    ring_cotangent: whether the reduce-scatter of its backward pass may be a ring kernel.
    """
    return gather(x, axis, 0, True, ("reduce_scatter",) if ring_cotangent else ())


def reduce_scatter(x, axis: str, *, ring_cotangent=False, cotangent_dtype=None):
    """Sums over the shards, each keeps its own rows, [shards * t, d] -> [t, d].

    ring_cotangent: whether the all-gather of its backward pass may be a ring kernel.
    cotangent_dtype: what that all-gather sends, see `ring_reduce_scatter`.
    """
    rings = ("all_gather",) if ring_cotangent else ()
    return scatter(x, axis, 0, True, cotangent_dtype, rings)
