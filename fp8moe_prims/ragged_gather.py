"""Dispatch: rows of a table moved to their places in the ragged buffer, ``fp8moe_ragged_gather``.

    out[i] = x[indices[i]] (* weights[i])       for start <= i < end, else the tail

    x  [t, d]           indices, weights  [m]           inverse  [t, top_k]         out  [m, d]

Linear in x and in weights. Of a quantized x the float32 row scale moves with its row, in one pass,
and takes the weight. Transposed:

    dx       = gather_reduce(dout, inverse, weights[inverse])    where an inverse is given, else
               scatter_add(dout, indices, weights)
    dweights = gather_dot(dout, x, indices)

Leading batch dimensions are as in gmm.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8moe_prims import debug
from fp8moe_prims._primitive import (
    batch_leading,
    define,
    define_carrier,
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.gmm import check_rows, check_tail
from fp8moe_prims.qarray import QArray, operand
from fp8moe_prims.rows import check_indices, check_weights, is_data, row_range


class RaggedGatherOperands(NamedTuple):
    x: Any  # [*b, t, d]
    indices: Any  # int32 [*b, m]
    start: Any  # int32 [*b]
    end: Any  # int32 [*b]
    weights: Any = None  # [*b, m]
    x_scale: Any = None  # float32 [*b, t, 1]
    x_carrier: Any = None  # like x, wide: see qarray.py
    inverse: Any = None  # int32 [*b, t, top_k], read by the transpose only


@dataclasses.dataclass(frozen=True)
class RowsParams:
    """Static parameters of the operations that move rows.

    Attributes:
      out_dtype: dtype of the result.
      tail: "zero" or "undefined", what rows outside [start, end) hold, here and in the gradients.
      expected_rows: rows that the cost estimate counts, None for all.
      sparse_core: whether ragged_gather fetches its rows with the SparseCores, where there are any.
    """

    out_dtype: np.dtype
    tail: str = "zero"
    expected_rows: int | None = None
    sparse_core: bool = False


def ragged_gather(
    x,
    indices,
    *,
    start=0,
    end=None,
    weights=None,
    inverse=None,
    expected_rows=None,
    tail="zero",
    sparse_core=False,
):
    """Gathers rows into the ragged buffer.

    ``out[i] = x[indices[i]] (* weights[i])`` for ``start <= i < end``. Values are moved bit for
    bit; a product with a weight is computed in float32 and rounded once.

    Args:
      x: [t, d], bfloat16, float16, float32, a QArray with a scale [t, 1], [1, 1] or [1, d], or a
        plain float8 or int8 array, moved as data.
      indices: integers [m]. One outside [0, t) gives a zero row and takes no gradient.
      start, end: integer scalars, clamped to [0, m]; end None: m.
      weights: [m], wide; of a QArray they go into the scale.
      inverse: integers [t, top_k] with ``indices[inverse[t, j]] == t``, entries outside [0, m) for
        none: lets the transpose gather instead of scatter.
      expected_rows: rows expected to be valid, for the cost estimate; None: m.
      tail: "zero" or "undefined", what the rows outside [start, end) hold.
      sparse_core: fetch the rows with the SparseCores of a TPU v5p, v6e or v7x, all of them, here
        and in the gathers of the derivatives. The result is the same to the bit. No hardware has
        run it: it compiles for these chips, and its addresses are tested. It moves more bytes (see
        lowering/tpu/sparse_core.py) but leaves the TensorCore free while rows are fetched. The
        default kernel runs instead on a chip without SparseCores (v5e), in an export that names no
        chip, for rows of which 128 do not fit VMEM, and under ``use_lowering("interpret")``, as the
        interpreter has no SparseCore; other platforms ignore it.

    Returns:
      [m, d] of x's dtype; for a QArray x a QArray whose scale [t, 1] has followed its rows, [m, 1]
      (a scale [1, 1] or [1, d] stays, unless weights make it a row scale).

    Raises:
      TypeError, ValueError: an argument has the wrong rank, shape, dtype or value; it is named.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> fp8.ragged_gather(jnp.arange(4.0)[:, None], jnp.array([3, 0, -1, 2]), end=3)[:, 0]
    Array([3., 0., 0., 0.], dtype=float32)
    """
    check_tail(tail)
    if not isinstance(sparse_core, bool):
        raise TypeError(f"sparse_core: takes a bool, got {sparse_core!r}")
    fixed_scale = None
    if is_data(x):
        if x.ndim != 2:
            raise ValueError(f"x: takes an array of rank 2, [t, d], got shape {tuple(x.shape)}")
        values, scale, carrier = jnp.asarray(x), None, None
        if weights is not None:
            raise TypeError(f"weights: not for plain {x.dtype} rows; wrap x in a QArray")
    else:
        values, scale, carrier = operand("x", x, ("t", "d"))
    t, d = values.shape
    given, indices = indices, check_indices("indices", indices, 1)
    m = indices.shape[0]
    weights = check_weights("weights", weights, (m,))
    if scale is not None:
        scale, fixed_scale = _split_scale(scale, t, d, weights)
    if inverse is not None:
        inverse = check_indices("inverse", inverse, 2)
        if inverse.shape[0] != t:
            raise ValueError(f"inverse: takes [t, top_k] with t = {t}, got {inverse.shape}")
    start, end = row_range("ragged_gather", start, end, m)
    if debug.enabled():
        debug.check_indices("ragged_gather", given, start, end, t)
        debug.check_scale("ragged_gather", "x", scale)
    expected_rows = check_rows("expected_rows", expected_rows)
    params = RowsParams(np.dtype(values.dtype), tail, expected_rows, sparse_core)
    operands = RaggedGatherOperands(values, indices, start, end, weights, scale, inverse=inverse)
    out = ragged_gather_p.call(operands, params)
    if scale is None and fixed_scale is None:
        return out[0]
    if carrier is not None:
        operands = operands._replace(x_carrier=carrier)
        if weights is None:  # then the tangent needs no values
            operands = operands._replace(x=None, x_scale=None)
        carrier = ragged_gather_carrier_p.call(operands, params)
    return QArray(out[0], out[1] if scale is not None else fixed_scale, carrier)


def _split_scale(scale, t, d, weights):
    """(scale that moves with the rows or None, scale that stays or None)."""
    if scale.shape not in ((t, 1), (1, 1), (1, d)):
        raise ValueError(
            f"x: takes a scale of shape ({t}, 1), (1, 1) or (1, {d}), got {scale.shape}"
        )
    if scale.shape[1] != 1 and weights is not None:
        raise ValueError("x: a scale per column can't take row weights; dequantize x first")
    if scale.shape == (t, 1) or weights is not None:
        return jnp.broadcast_to(scale, (t, 1)), None
    return None, scale


# ------------------------------------------------------------------------------------- rules

_TIES = (("x", "x_scale"), ("start", "end"))


def _rows_shape(x: RaggedGatherOperands):
    """[*b, m] of the result."""
    table = x.x if x.x is not None else x.x_carrier
    leads = [table.shape[:-2], x.indices.shape[:-1], x.start.shape]
    leads += [] if x.weights is None else [x.weights.shape[:-1]]
    return (*np.broadcast_shapes(*leads), x.indices.shape[-1])


def _ragged_gather_abstract_eval(x: RaggedGatherOperands, p: RowsParams):
    rows = _rows_shape(x)
    out = [result_aval(x.x, (*rows, x.x.shape[-1]), p.out_dtype)]
    if x.x_scale is not None:
        out.append(result_aval(x.x_scale, (*rows, 1), x.x_scale.dtype))
    return out


def _ragged_gather_batch_rule(x, dims, p):
    out = ragged_gather_p.call(batch_leading(x, dims, _TIES), p)
    return out, [0] * len(out)


def _ragged_gather_jvp_rule(x: RaggedGatherOperands, t: RaggedGatherOperands, p: RowsParams):
    """dout = gather(dx, weights) + gather(x, dweights); of a quantized result the carrier's is."""
    out = ragged_gather_p.call(x, p)
    if x.x_scale is not None or is_data(x.x):
        return out, [None] * len(out)
    terms = []
    if t.x is not None:
        terms += ragged_gather_p.call(x._replace(x=t.x), p)
    if t.weights is not None:
        terms += ragged_gather_p.call(x._replace(weights=t.weights), p)
    return out, [_sum(terms, out[0].shape)]


def _sum(terms, shape):
    terms = [jnp.broadcast_to(term, shape) for term in terms]
    return sum(terms[1:], terms[0]) if terms else None


def _carrier_result(x: RaggedGatherOperands, p: RowsParams):
    d = x.x_carrier.shape[-1]
    return result_aval(x.x_carrier, (*_rows_shape(x), d), x.x_carrier.dtype)


def _carrier_tangent(x: RaggedGatherOperands, t: RaggedGatherOperands, p: RowsParams):
    """gather(dx_carrier, weights) + gather(dequantized x, dweights)."""
    from fp8moe_prims.ragged_gather_reduce import RaggedGatherReduceOperands, ragged_gather_reduce_p

    p = dataclasses.replace(p, out_dtype=np.dtype(x.x_carrier.dtype))
    terms = []
    if t.x_carrier is not None:
        operands = x._replace(x=t.x_carrier, x_scale=None, x_carrier=None)
        terms += ragged_gather_p.call(operands, p)
    if t.weights is not None:
        start, end = whole(x.x)
        operands = RaggedGatherReduceOperands(
            x.x,
            masked_positions(x)[..., None],
            start,
            end,
            weights=t.weights[..., None],
            y_scale=x.x_scale,
            y_carrier=x.x_carrier,
        )
        terms.append(ragged_gather_reduce_p.call(operands, p))
    return _sum(terms, (*_rows_shape(x), x.x_carrier.shape[-1]))


def _ragged_gather_transpose_rule(cts, x: RaggedGatherOperands, p: RowsParams):
    from fp8moe_prims.ragged_gather_dot import RaggedGatherDotOperands, ragged_gather_dot_p
    from fp8moe_prims.ragged_gather_reduce import RaggedGatherReduceOperands, ragged_gather_reduce_p
    from fp8moe_prims.ragged_scatter_add import (
        RaggedScatterAddOperands,
        ScatterParams,
        ragged_scatter_add_p,
    )

    none = RaggedGatherOperands(*(None,) * len(x))
    (ct,) = cts
    if not is_linear(x.x):  # dweights[i] = <dout[i], x[indices[i]]>
        start, end = whole(x.x)
        operands = RaggedGatherDotOperands(ct, x.x, masked_positions(x)[..., None], start, end)
        dot = ragged_gather_dot_p.call(operands, RowsParams(np.dtype(np.float32)))
        aval = x.weights.aval
        return none._replace(weights=sum_to(dot[..., 0].astype(aval.dtype), aval.shape))
    aval = x.x.aval
    dtype = np.dtype(aval.dtype)
    if x.inverse is not None:  # dx[t] = sum_j (weights * dout)[inverse[t, j]]
        weights = None if x.weights is None else take(x.weights, x.inverse)
        operands = RaggedGatherReduceOperands(ct, x.inverse, x.start, x.end, weights=weights)
        dx = ragged_gather_reduce_p.call(operands, RowsParams(dtype))
    else:  # dx[indices[i]] += weights[i] * dout[i]
        weights = None if x.weights is None else x.weights[..., None]
        operands = RaggedScatterAddOperands(
            ct, masked_positions(x)[..., None], x.start, x.end, weights
        )
        dx = ragged_scatter_add_p.call(operands, ScatterParams(dtype, aval.shape[-2]))
    return none._replace(x=sum_to(dx, aval.shape))


def masked_positions(x: RaggedGatherOperands):
    """The indices, -1 at positions outside [start, end): int32 [*b, m]."""
    at = jnp.arange(x.indices.shape[-1], dtype=jnp.int32)
    at = at.reshape((1,) * (x.indices.ndim - 1) + at.shape)
    inside = (at >= x.start[..., None]) & (at < x.end[..., None])
    return jnp.where(inside, x.indices, np.int32(-1))


def whole(x):
    """The range of all rows of x [*b, t, d]."""
    lead = (1,) * (x.ndim - 2)
    return jnp.zeros(lead, jnp.int32), jnp.full(lead, x.shape[-2], jnp.int32)


def take(values, at):
    """values [*b, m] at [*b, t, k], 0 where at is outside."""
    lead = np.broadcast_shapes(values.shape[:-1], at.shape[:-2])
    flat = jnp.broadcast_to(at, (*lead, *at.shape[-2:])).reshape(*lead, -1)
    m = values.shape[-1]
    inside = (flat >= 0) & (flat < m)
    values = jnp.broadcast_to(values, (*lead, m))
    got = jnp.take_along_axis(values, jnp.clip(flat, 0, m - 1), axis=-1)
    return jnp.where(inside, got, 0).reshape(*lead, *at.shape[-2:])


ragged_gather_p = define(
    "fp8moe_ragged_gather",
    operands=RaggedGatherOperands,
    abstract_eval=_ragged_gather_abstract_eval,
    batch=_ragged_gather_batch_rule,
    jvp=_ragged_gather_jvp_rule,
    transpose=_ragged_gather_transpose_rule,
    lowerings={
        "cpu": "xla.ragged_gather:ragged_gather",
        "cuda": "xla.ragged_gather:ragged_gather",
        "rocm": "xla.ragged_gather:ragged_gather",
        "tpu": "tpu.ragged_gather:ragged_gather",
    },
    multiple_results=True,
)

ragged_gather_carrier_p = define_carrier(
    "fp8moe_ragged_gather_carrier",
    operands=RaggedGatherOperands,
    result=_carrier_result,
    ties=_TIES,
    tangent=_carrier_tangent,
)
