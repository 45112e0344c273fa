"""The gradient of router weights, ``fp8moe_ragged_gather_dot``.

    out[t, j] = <a[t], y[indices[t, j]]>        where start <= indices[t, j] < end, else 0

    a  [t, d]           y  [m, d]           indices  [t, top_k]         out  float32 [t, top_k]

Bilinear in a and y, the third of the set that gather_reduce closes under transposition:

    da = gather_reduce(y, indices, dout)            dy = scatter_add(a, indices, dout)

A primitive of its own so that the backward pass of the combine reads the buffer's valid rows once
and writes top_k numbers a token, not a gathered copy of the buffer.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8moe_prims._primitive import batch_leading, define, is_linear, result_aval, sum_to
from fp8moe_prims.ragged_gather import RowsParams
from fp8moe_prims.ragged_gather_reduce import (
    RaggedGatherReduceOperands,
    ragged_gather_reduce_p,
    transposed_rows,
)


class RaggedGatherDotOperands(NamedTuple):
    a: Any  # [*b, t, d]
    y: Any  # [*b, m, d]
    indices: Any  # int32 [*b, t, top_k]
    start: Any  # int32 [*b]
    end: Any  # int32 [*b]
    y_scale: Any = None  # float32 [*b, m | 1, 1]
    y_carrier: Any = None  # like y, wide
    inverse: Any = None  # int32 [*b, m], read by the transpose only


_TIES = (("y", "y_scale"), ("start", "end"))


def _ragged_gather_dot_abstract_eval(x: RaggedGatherDotOperands, p: RowsParams):
    leads = x.a.shape[:-2], x.y.shape[:-2], x.indices.shape[:-2], x.start.shape
    shape = (*np.broadcast_shapes(*leads), *x.indices.shape[-2:])
    return result_aval(x.a, shape, p.out_dtype)


def _ragged_gather_dot_batch_rule(x, dims, p):
    return ragged_gather_dot_p.call(batch_leading(x, dims, _TIES), p), 0


def _ragged_gather_dot_jvp_rule(x, t, p):
    """dout = gather_dot(da, y) + gather_dot(a, dy)."""
    out = ragged_gather_dot_p.call(x, p)
    terms = []
    if t.a is not None:
        terms.append(ragged_gather_dot_p.call(x._replace(a=t.a), p))
    dy = t.y if x.y_scale is None else t.y_carrier
    if dy is not None:
        operands = x._replace(y=dy, y_scale=None, y_carrier=None)
        terms.append(ragged_gather_dot_p.call(operands, p))
    terms = [jnp.broadcast_to(term, out.shape) for term in terms]
    return out, sum(terms[1:], terms[0]) if terms else None


def _ragged_gather_dot_transpose_rule(ct, x: RaggedGatherDotOperands, p: RowsParams):
    none = RaggedGatherDotOperands(*(None,) * len(x))
    if is_linear(x.y):  # dy[indices[t, j]] += dout[t, j] * a[t]
        aval = x.y.aval
        dy = transposed_rows(x.a, x, ct, np.dtype(aval.dtype), aval.shape[-2], p)
        return none._replace(y=sum_to(dy, aval.shape))
    operands = RaggedGatherReduceOperands(  # da[t] = sum_j dout[t, j] * y[indices[t, j]]
        x.y, x.indices, x.start, x.end, ct, x.y_scale, x.y_carrier, x.inverse
    )
    aval = x.a.aval
    params = RowsParams(np.dtype(aval.dtype), p.tail, p.expected_rows)
    return none._replace(a=sum_to(ragged_gather_reduce_p.call(operands, params), aval.shape))


ragged_gather_dot_p = define(
    "fp8moe_ragged_gather_dot",
    operands=RaggedGatherDotOperands,
    abstract_eval=_ragged_gather_dot_abstract_eval,
    batch=_ragged_gather_dot_batch_rule,
    jvp=_ragged_gather_dot_jvp_rule,
    transpose=_ragged_gather_dot_transpose_rule,
    lowerings={
        "cpu": "xla.ragged_gather_dot:ragged_gather_dot",
        "cuda": "xla.ragged_gather_dot:ragged_gather_dot",
        "rocm": "xla.ragged_gather_dot:ragged_gather_dot",
        "tpu": "tpu.ragged_gather_dot:ragged_gather_dot",
    },
)
