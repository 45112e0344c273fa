"""The transpose of the gathers where no inverse is known, ``fp8moe_ragged_scatter_add``.

    out[targets[i, j]] += weights[i, j] * rows[i]       for start <= i < end, targets in [0, t)

    rows  [r, d]            targets, weights  [r, k]            out  [t, d], float32 accumulation

Linear in rows and in weights, and the transpose of gather_reduce:

    drows = gather_reduce(dout, targets, weights)         dweights = gather_dot(rows, dout, targets)

Slower than a gather and not parallel over duplicates: pass an ``inverse`` to the gathers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8moe_prims._primitive import (
    batch_leading,
    define,
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.ragged_gather import RowsParams, whole
from fp8moe_prims.ragged_gather_dot import RaggedGatherDotOperands, ragged_gather_dot_p
from fp8moe_prims.ragged_gather_reduce import RaggedGatherReduceOperands, ragged_gather_reduce_p


class RaggedScatterAddOperands(NamedTuple):
    rows: Any  # [*b, r, d]
    targets: Any  # int32 [*b, r, k]
    start: Any  # int32 [*b], range of the rows
    end: Any  # int32 [*b]
    weights: Any = None  # [*b, r, k]


@dataclasses.dataclass(frozen=True)
class ScatterParams:
    """Static parameters: the dtype and the number of rows of the result."""

    out_dtype: np.dtype
    num_rows: int


def _ragged_scatter_add_abstract_eval(x: RaggedScatterAddOperands, p: ScatterParams):
    leads = [x.rows.shape[:-2], x.targets.shape[:-2], x.start.shape]
    leads += [] if x.weights is None else [x.weights.shape[:-2]]
    batch = np.broadcast_shapes(*leads)
    return result_aval(x.rows, (*batch, p.num_rows, x.rows.shape[-1]), p.out_dtype)


def _ragged_scatter_add_batch_rule(x, dims, p):
    return ragged_scatter_add_p.call(batch_leading(x, dims, (("start", "end"),)), p), 0


def _ragged_scatter_add_jvp_rule(x, t, p):
    """dout = scatter_add(drows, weights) + scatter_add(rows, dweights)."""
    out = ragged_scatter_add_p.call(x, p)
    terms = []
    if t.rows is not None:
        terms.append(ragged_scatter_add_p.call(x._replace(rows=t.rows), p))
    if t.weights is not None:
        terms.append(ragged_scatter_add_p.call(x._replace(weights=t.weights), p))
    terms = [jnp.broadcast_to(term, out.shape) for term in terms]
    return out, sum(terms[1:], terms[0]) if terms else None


def _ragged_scatter_add_transpose_rule(ct, x: RaggedScatterAddOperands, p: ScatterParams):
    none = RaggedScatterAddOperands(*(None,) * len(x))
    at = jnp.arange(x.targets.shape[-2], dtype=jnp.int32)[:, None]
    at = at.reshape((1,) * (x.targets.ndim - 2) + at.shape)
    inside = (at >= x.start[..., None, None]) & (at < x.end[..., None, None])
    targets = jnp.where(inside, x.targets, np.int32(-1))
    start, end = whole(ct)
    if is_linear(x.rows):  # drows[i] = sum_j weights[i, j] * dout[targets[i, j]]
        aval = x.rows.aval
        operands = RaggedGatherReduceOperands(ct, targets, start, end, x.weights)
        params = RowsParams(np.dtype(aval.dtype))
        return none._replace(rows=sum_to(ragged_gather_reduce_p.call(operands, params), aval.shape))
    aval = x.weights.aval  # dweights[i, j] = <rows[i], dout[targets[i, j]]>
    operands = RaggedGatherDotOperands(x.rows, ct, targets, start, end)
    dot = ragged_gather_dot_p.call(operands, RowsParams(np.dtype(np.float32)))
    return none._replace(weights=sum_to(dot.astype(aval.dtype), aval.shape))


ragged_scatter_add_p = define(
    "fp8moe_ragged_scatter_add",
    operands=RaggedScatterAddOperands,
    abstract_eval=_ragged_scatter_add_abstract_eval,
    batch=_ragged_scatter_add_batch_rule,
    jvp=_ragged_scatter_add_jvp_rule,
    transpose=_ragged_scatter_add_transpose_rule,
    lowerings={
        "cpu": "xla.ragged_scatter_add:ragged_scatter_add",
        "cuda": "xla.ragged_scatter_add:ragged_scatter_add",
        "rocm": "xla.ragged_scatter_add:ragged_scatter_add",
        "tpu": "xla.ragged_scatter_add:ragged_scatter_add",
    },
)
