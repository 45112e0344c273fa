"""The sum over the devices of a mesh axis, each keeps its own part: ``fp8moe_ring_reduce_scatter``.

    out = sum_j (x of device j)[..., i, ...]    on device i; tiled: [..., i * r : (i + 1) * r, ...]

    x  [*shape] with a dimension n, or one that n divides         out  without it, or an n-th of it

Linear in x; the transpose is ring_all_gather, of the cotangent as it is or quantized per row. The
ring kernel adds in float32 and sends partial sums in x's dtype; see lowering/tpu/ring.py.
Elsewhere it is jax.lax.psum_scatter.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8moe_prims._primitive import batch_leading, define, result_aval, vary_over
from fp8moe_prims.lowering import numerics
from fp8moe_prims.qarray import WIDE_DTYPES, qdtype_name, quantize
from fp8moe_prims.ring_all_gather import (
    BOTH,
    RingAllGatherOperands,
    RingParams,
    bound_axis,
    check_dim,
    gather,
    ring_all_gather_p,
)


class RingReduceScatterOperands(NamedTuple):
    x: Any  # [*b, *shape]


def ring_reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False, cotangent_dtype=None):
    """Sums over the devices of a mesh axis and scatters: ``jax.lax.psum_scatter``, by our ring.

    Called inside jax.shard_map. On TPU a kernel sends partial sums both ways around the ring of
    devices, added in float32 and sent in x's dtype; on other platforms, and where the axis is no
    ring of the torus, jax.lax.psum_scatter runs.

    Args:
      x: bfloat16, float16 or float32, any shape of rank 1 or more.
      axis_name: the mesh axis, of n devices; it may be one of several.
      scatter_dimension: the dimension that is scattered; n where not tiled, else a multiple of n.
      tiled: device i keeps the i-th of n equal parts of the dimension, instead of index i.
      cotangent_dtype: "e5m2" or "e4m3": the backward pass quantizes the cotangent, with a scale per
        row (all but the last dimension), before it is gathered; None: it travels as it is.

    Returns:
      x's dtype; the shape of x without ``scatter_dimension``, or with an n-th of it.

    Raises:
      TypeError, ValueError: an argument is wrong, or axis_name is not bound; it is named.

    >>> import jax, jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> scatter = lambda x: fp8.ring_reduce_scatter(x, "x", tiled=True)
    >>> mapped = jax.shard_map(scatter, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("x"))
    >>> mapped(jnp.ones((4, 8))).shape
    (4, 8)
    """
    return scatter(x, axis_name, scatter_dimension, tiled, cotangent_dtype, BOTH)


def scatter(x, axis_name, scatter_dimension, tiled, cotangent_dtype, rings):
    """`ring_reduce_scatter`, with kernels for the operations in ``rings`` alone."""
    name, size = bound_axis(axis_name)
    if hasattr(x, "qvalue"):
        raise TypeError("x: takes an array, got a QArray; dequantize it, a sum has other scales")
    if not hasattr(x, "shape") or getattr(x, "dtype", None) not in WIDE_DTYPES:
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x: takes an array of bfloat16, float16 or float32, got {got}")
    if x.ndim == 0:
        raise ValueError("x: takes an array of rank 1 or more, got a scalar")
    at = check_dim("scatter_dimension", scatter_dimension, x.ndim)
    if x.shape[at] % size if tiled else x.shape[at] != size:
        takes = "a multiple of " if tiled else ""
        raise ValueError(
            f"scatter_dimension: dimension {at} of x must be {takes}the {size} devices along"
            f" {name!r}, got shape {tuple(x.shape)}"
        )
    if cotangent_dtype is not None:
        cotangent_dtype = qdtype_name("cotangent_dtype", cotangent_dtype, ("e5m2", "e4m3"))
        if x.ndim - (not tiled) < 2 or (tiled and at == x.ndim - 1):
            raise ValueError(
                "cotangent_dtype: quantizes rows, so the result must have rank 2 or more, and the"
                f" tiled dimension not be its last; got x of shape {tuple(x.shape)}"
            )
    params = RingParams(name, size, at - x.ndim, bool(tiled), cotangent_dtype, rings)
    x = vary_over(jnp.asarray(x), name)
    return ring_reduce_scatter_p.call(RingReduceScatterOperands(x), params)


# ------------------------------------------------------------------------------------- rules


def _ring_reduce_scatter_abstract_eval(x: RingReduceScatterOperands, p: RingParams):
    shape = list(x.x.shape)
    if p.tiled:
        shape[p.dim] //= p.size
    else:
        del shape[p.dim]
    return result_aval(x.x, tuple(shape), x.x.dtype)


def _ring_reduce_scatter_batch_rule(x, dims, p):
    return ring_reduce_scatter_p.call(batch_leading(x, dims), p), 0


def _ring_reduce_scatter_jvp_rule(x, t: RingReduceScatterOperands, p: RingParams):
    """dout = reduce_scatter(dx)."""
    return ring_reduce_scatter_p.call(x, p), ring_reduce_scatter_p.call(t, p)


def _ring_reduce_scatter_transpose_rule(ct, x: RingReduceScatterOperands, p: RingParams):
    """dx = gather(dout), dout quantized per row on the way if asked."""
    del x
    plain = dataclasses.replace(p, cotangent_dtype=None)
    if p.cotangent_dtype is None:
        return RingReduceScatterOperands(
            ring_all_gather_p.call(RingAllGatherOperands(ct), plain)[0]
        )
    rows = tuple(range(ct.ndim - 1))
    q = quantize(ct, numerics.QDTYPES[p.cotangent_dtype], channelwise_axes=rows)
    full = gather(q, p.axis, p.dim, p.tiled, p.rings)
    return RingReduceScatterOperands(full.dequantize(ct.dtype))


ring_reduce_scatter_p = define(
    "fp8moe_ring_reduce_scatter",
    operands=RingReduceScatterOperands,
    abstract_eval=_ring_reduce_scatter_abstract_eval,
    batch=_ring_reduce_scatter_batch_rule,
    jvp=_ring_reduce_scatter_jvp_rule,
    transpose=_ring_reduce_scatter_transpose_rule,
    lowerings={
        "cpu": "xla.ring_reduce_scatter:ring_reduce_scatter",
        "cuda": "xla.ring_reduce_scatter:ring_reduce_scatter",
        "rocm": "xla.ring_reduce_scatter:ring_reduce_scatter",
        "tpu": "tpu.ring_reduce_scatter:ring_reduce_scatter",
    },
    collective=True,
)
