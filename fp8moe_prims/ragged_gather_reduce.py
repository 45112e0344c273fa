"""Combine: each token's rows of the ragged buffer, weighted and summed.

``fp8moe_ragged_gather_reduce``:

    out[t] = sum_j weights[t, j] * y[indices[t, j]]     over j with start <= indices[t, j] < end

    y  [m, d]           indices, weights  [t, top_k]            inverse  [m]        out  [t, d]

Linear in y and in weights; float32 accumulation, j ascending. Transposed:

    dy       = gather(dout, inverse // top_k, weights[inverse])    where an inverse is given, else
               scatter_add(dout, indices, weights)
    dweights = gather_dot(dout, y, indices)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8moe_prims import debug
from fp8moe_prims._primitive import (
    batch_leading,
    define,
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.gmm import check_row_scale, check_rows, check_tail
from fp8moe_prims.qarray import operand
from fp8moe_prims.ragged_gather import (
    RaggedGatherOperands,
    RowsParams,
    ragged_gather_p,
    take,
    whole,
)
from fp8moe_prims.rows import check_indices, check_weights, row_range


class RaggedGatherReduceOperands(NamedTuple):
    y: Any  # [*b, m, d]
    indices: Any  # int32 [*b, t, top_k]
    start: Any  # int32 [*b]
    end: Any  # int32 [*b]
    weights: Any = None  # [*b, t, top_k]
    y_scale: Any = None  # float32 [*b, m | 1, 1]
    y_carrier: Any = None  # like y, wide: see qarray.py
    inverse: Any = None  # int32 [*b, m], read by the transpose only


def ragged_gather_reduce(
    y,
    indices,
    *,
    weights=None,
    start=0,
    end=None,
    inverse=None,
    expected_rows=None,
    tail="zero",
):
    """Sums each token's rows of the ragged buffer, weighted.

    ``out[t] = sum_j weights[t, j] * y[indices[t, j]]`` over the j with ``start <= indices[t, j] <
    end``, accumulated in float32; a QArray is dequantized on the way.

    Args:
      y: [m, d], bfloat16, float16, float32, or a QArray with a scale [m, 1] or [1, 1]. Rows outside
        [start, end) may hold anything.
      indices: integers [t, top_k].
      weights: [t, top_k], wide; None: 1.
      start, end: integer scalars, clamped to [0, m]; end None: m.
      inverse: integers [m] with ``indices.reshape(-1)[inverse[r]] == r`` for the rows r that one
        index names (no row may be named twice), anything outside [0, t * top_k) for the others:
        lets the transpose gather instead of scatter.
      expected_rows: rows expected to be valid, for the cost estimate; None: t * top_k.
      tail: "zero" or "undefined", what the gradient holds in rows outside [start, end).

    Returns:
      [t, d], of y's dtype, bfloat16 for a QArray.

    Raises:
      TypeError, ValueError: an argument has the wrong rank, shape, dtype or value; it is named.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> y = jnp.array([[1.0], [2.0], [4.0]])
    >>> fp8.ragged_gather_reduce(y, jnp.array([[0, 2], [1, -1]]))[:, 0]
    Array([5., 2.], dtype=float32)
    """
    check_tail(tail)
    values, scale, carrier = operand("y", y, ("m", "d"))
    m = values.shape[0]
    check_row_scale("y", scale, m)
    indices = check_indices("indices", indices, 2)
    weights = check_weights("weights", weights, indices.shape)
    if inverse is not None:
        inverse = check_indices("inverse", inverse, 1)
        if inverse.shape != (m,):
            raise ValueError(f"inverse: takes [m] with m = {m}, got {inverse.shape}")
    start, end = row_range("ragged_gather_reduce", start, end, m)
    if debug.enabled():
        debug.check_scale("ragged_gather_reduce", "y", scale, start, end)
    dtype = np.dtype(jnp.bfloat16) if scale is not None else np.dtype(values.dtype)
    return ragged_gather_reduce_p.call(
        RaggedGatherReduceOperands(values, indices, start, end, weights, scale, carrier, inverse),
        RowsParams(dtype, tail, check_rows("expected_rows", expected_rows)),
    )


# ------------------------------------------------------------------------------------- rules

_TIES = (("y", "y_scale"), ("start", "end"))


def _ragged_gather_reduce_abstract_eval(x: RaggedGatherReduceOperands, p: RowsParams):
    leads = [x.y.shape[:-2], x.indices.shape[:-2], x.start.shape]
    leads += [] if x.weights is None else [x.weights.shape[:-2]]
    batch = np.broadcast_shapes(*leads)
    return result_aval(x.y, (*batch, x.indices.shape[-2], x.y.shape[-1]), p.out_dtype)


def _ragged_gather_reduce_batch_rule(x, dims, p):
    return ragged_gather_reduce_p.call(batch_leading(x, dims, _TIES), p), 0


def _ragged_gather_reduce_jvp_rule(x, t, p: RowsParams):
    """dout = gather_reduce(dy, weights) + gather_reduce(y, dweights)."""
    out = ragged_gather_reduce_p.call(x, p)
    terms = []
    dy = t.y if x.y_scale is None else t.y_carrier
    if dy is not None:
        operands = x._replace(y=dy, y_scale=None, y_carrier=None)
        terms.append(ragged_gather_reduce_p.call(operands, p))
    if t.weights is not None:
        terms.append(ragged_gather_reduce_p.call(x._replace(weights=t.weights), p))
    terms = [jnp.broadcast_to(term, out.shape) for term in terms]
    return out, sum(terms[1:], terms[0]) if terms else None


def _ragged_gather_reduce_transpose_rule(ct, x: RaggedGatherReduceOperands, p: RowsParams):
    from fp8moe_prims.ragged_gather_dot import RaggedGatherDotOperands, ragged_gather_dot_p

    none = RaggedGatherReduceOperands(*(None,) * len(x))
    if is_linear(x.y):
        aval = x.y.aval
        dy = transposed_rows(ct, x, x.weights, np.dtype(aval.dtype), aval.shape[-2], p)
        return none._replace(y=sum_to(dy, aval.shape))
    # dweights[t, j] = <dout[t], y[indices[t, j]]>
    operands = RaggedGatherDotOperands(
        ct, x.y, x.indices, x.start, x.end, x.y_scale, x.y_carrier, x.inverse
    )
    dot_params = RowsParams(np.dtype(np.float32), p.tail, p.expected_rows)
    dot = ragged_gather_dot_p.call(operands, dot_params)
    aval = x.weights.aval
    return none._replace(weights=sum_to(dot.astype(aval.dtype), aval.shape))


def transposed_rows(ct, x, weights, dtype, m, p):
    """dy[indices[t, j]] += weights[t, j] * ct[t] within [start, end): [*b, m, d].

    x has the indices, range and inverse of a gather_reduce or gather_dot.
    """
    from fp8moe_prims.ragged_scatter_add import (
        RaggedScatterAddOperands,
        ScatterParams,
        ragged_scatter_add_p,
    )

    top_k = x.indices.shape[-1]
    if x.inverse is not None:
        if weights is not None:
            flat = weights.reshape(*weights.shape[:-2], -1)
            weights = take(flat, x.inverse[..., None])[..., 0]
        source = jnp.floor_divide(x.inverse, np.int32(top_k))
        operands = RaggedGatherOperands(ct, source, x.start, x.end, weights)
        # A gather without weights moves rows as they are.
        moved = ct.dtype if weights is None else dtype
        (dy,) = ragged_gather_p.call(operands, RowsParams(moved, p.tail, p.expected_rows))
        return dy.astype(dtype)
    inside = (x.indices >= x.start[..., None, None]) & (x.indices < x.end[..., None, None])
    targets = jnp.where(inside, x.indices, np.int32(-1))
    start, end = whole(ct)
    operands = RaggedScatterAddOperands(ct, targets, start, end, weights)
    return ragged_scatter_add_p.call(operands, ScatterParams(dtype, m))


ragged_gather_reduce_p = define(
    "fp8moe_ragged_gather_reduce",
    operands=RaggedGatherReduceOperands,
    abstract_eval=_ragged_gather_reduce_abstract_eval,
    batch=_ragged_gather_reduce_batch_rule,
    jvp=_ragged_gather_reduce_jvp_rule,
    transpose=_ragged_gather_reduce_transpose_rule,
    lowerings={
        "cpu": "xla.ragged_gather_reduce:ragged_gather_reduce",
        "cuda": "xla.ragged_gather_reduce:ragged_gather_reduce",
        "rocm": "xla.ragged_gather_reduce:ragged_gather_reduce",
        "tpu": "tpu.ragged_gather_reduce:ragged_gather_reduce",
    },
)
