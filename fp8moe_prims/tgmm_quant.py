"""Transposed grouped matmul, quantized inside, ``fp8moe_tgmm_quant``: the gradient of weights.

    out[e] = sum over the rows r of group e of lhs[r]^T dout[r]

    lhs  [m, k]             dout  [m, n]             out  [g, k, n], or [g, n, k] with transpose_out

Bilinear in lhs and dout, and closed under transposition together with ``fp8moe_gmm``:

    dlhs = gmm(dout, ct transposed)             ddout = gmm(lhs, ct)

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
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.gmm import (
    GmmOperands,
    GmmParams,
    check_row_scale,
    check_rows,
    gmm_p,
    result_dtype,
)
from fp8moe_prims.groups import group_ranges
from fp8moe_prims.qarray import operand, qdtype_name
from fp8moe_prims.recipe import check_block


class TgmmOperands(NamedTuple):
    lhs: Any  # [*b, m, k]
    dout: Any  # [*b, m, n]
    starts: Any  # int32 [*b, g]
    ends: Any  # int32 [*b, g]
    lhs_scale: Any = None  # float32 [*b, m | 1, 1]
    lhs_carrier: Any = None  # like lhs, wide: see qarray.py
    dout_carrier: Any = None  # like dout, wide, where dout is float8 data (the dense backward)


@dataclasses.dataclass(frozen=True)
class TgmmParams:
    """Static parameters of ``fp8moe_tgmm_quant``.

    Attributes:
      out_dtype: dtype of the result; accumulation is in float32.
      lhs_dtype, dout_dtype: what an operand is quantized to per (row block x channel), None for as
        it is. A row scale of lhs is multiplied into dout before that.
      dout_bound: the range [-b, b] of a fixed calibration of dout, None for absmax.
      block_m: rows of a block, counted from the group's first row.
      transpose_out: the result is [g, n, k].
      tail: what gradients with respect to rows of no group hold.
      expected_rows: rows that the cost estimate counts, None for all.
    """

    out_dtype: np.dtype
    lhs_dtype: str | None = None
    dout_dtype: str | None = None
    dout_bound: float | None = None
    block_m: int = 1024
    transpose_out: bool = False
    tail: str = "zero"
    expected_rows: int | None = None


def tgmm_quant(
    lhs,
    dout,
    group_sizes,
    *,
    num_groups=None,
    group_starts=None,
    group_offset=None,
    lhs_dtype="e4m3",
    dout_dtype="e4m3",
    block_m=1024,
    preferred_element_type=None,
    expected_rows=None,
):
    """The weight gradient of ``gmm``: one [k, n] product per group, both sides quantized inside.

    ``out[e] = sum over the rows r of group e + group_offset of lhs[r]^T dout[r]``. Each operand is
    quantized per (row block x channel), in blocks of block_m rows counted from the group's first,
    so that the result of a group depends on its own rows alone. An empty group gives exact zeros.

    Args:
      lhs: activations [m, k], bfloat16, float16, float32, or a QArray with a scale [m, 1] or
        [1, 1]: then its qvalue is used as it is and the scale multiplied into dout's rows.
      dout: cotangent of gmm's result [m, n], bfloat16, float16 or float32.
      group_sizes, group_starts, group_offset: as in ``gmm``.
      num_groups: g, the number of local groups; None: that of group_sizes.
      lhs_dtype, dout_dtype: "e4m3", "e5m2", "int8", or None for not quantized.
      block_m: rows that share a scale, a multiple of 128.
      preferred_element_type: dtype of the result; None: the promoted dtype of the operands that are
        not QArrays.
      expected_rows: as in ``gmm``.

    Returns:
      [g, k, n].

    Raises:
      TypeError, ValueError: an argument has the wrong rank, shape, dtype or value; it is named.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> lhs, dout = jnp.ones((8, 128)), jnp.ones((8, 256))
    >>> fp8.tgmm_quant(lhs, dout, jnp.array([3, 0, 4]))[:, 0, 0]
    Array([3., 0., 4.], dtype=float32)
    """
    x, x_scale, x_carrier = operand("lhs", lhs, ("m", "k"))
    if hasattr(dout, "qvalue"):
        raise TypeError("dout: takes a plain array [m, n], got a QArray; dequantize it first")
    dy, _, _ = operand("dout", dout, ("m", "n"))
    m = x.shape[0]
    if dy.shape[0] != m:
        raise ValueError(f"dout: takes [m, n] with m = {m} as in lhs {x.shape}, got {dy.shape}")
    if 0 in (x.shape[1], dy.shape[1]):
        raise ValueError(f"lhs and dout: k and n must be at least 1, got {x.shape}, {dy.shape}")
    check_row_scale("lhs", x_scale, m)
    check_block("block_m", block_m)
    lhs_dtype, dout_dtype = (
        None if d is None else qdtype_name(name, d)
        for name, d in (("lhs_dtype", lhs_dtype), ("dout_dtype", dout_dtype))
    )
    if num_groups is None:
        num_groups = np.shape(group_sizes)[0] if np.ndim(group_sizes) == 1 else 1
    num_groups = check_rows("num_groups", num_groups)
    starts, ends = group_ranges(
        group_sizes, group_starts, group_offset, num_groups, m, allow_fewer=True
    )
    if debug.enabled():
        debug.check_groups("tgmm_quant", group_sizes, group_starts, group_offset, num_groups, m)
        debug.check_scale("tgmm_quant", "lhs", x_scale, starts, ends)
    wide = (dy.dtype,) if x_scale is not None else (x.dtype, dy.dtype)
    operands = TgmmOperands(x, dy, starts, ends, x_scale, x_carrier)
    return tgmm_quant_p.call(
        operands,
        TgmmParams(
            out_dtype=result_dtype(preferred_element_type, *wide),
            lhs_dtype=lhs_dtype if x_scale is None else None,
            dout_dtype=dout_dtype,
            block_m=block_m,
            expected_rows=check_rows("expected_rows", expected_rows),
        ),
    )


_TIES = (("lhs", "lhs_scale"), ("starts", "ends"))


def _tgmm_abstract_eval(x: TgmmOperands, p: TgmmParams):
    batch = np.broadcast_shapes(x.lhs.shape[:-2], x.dout.shape[:-2], x.starts.shape[:-1])
    k, n = x.lhs.shape[-1], x.dout.shape[-1]
    matrix = (n, k) if p.transpose_out else (k, n)
    return result_aval(x.lhs, (*batch, x.starts.shape[-1], *matrix), p.out_dtype)


def _tgmm_batch_rule(x: TgmmOperands, dims: TgmmOperands, p: TgmmParams):
    return tgmm_quant_p.call(batch_leading(x, dims, _TIES), p), 0


def _tgmm_jvp_rule(x: TgmmOperands, t: TgmmOperands, p: TgmmParams):
    """dout = tgmm(dlhs, quantized dout) + tgmm(quantized lhs, ddout)."""
    out = tgmm_quant_p.call(x, p)
    terms = []
    dlhs = t.lhs if x.lhs_scale is None else t.lhs_carrier
    if dlhs is not None:  # [k, m] @ [m, n]; the tangent itself is not quantized
        plain = dataclasses.replace(p, lhs_dtype=None)
        operands = x._replace(lhs=dlhs, lhs_scale=None, lhs_carrier=None)
        terms.append(tgmm_quant_p.call(operands, plain))
    ddout = t.dout if x.dout_carrier is None else t.dout_carrier
    if ddout is not None:  # [k, m] @ [m, n]; lhs is quantized as it was
        plain = dataclasses.replace(p, dout_dtype=None, dout_bound=None)
        terms.append(tgmm_quant_p.call(x._replace(dout=ddout, dout_carrier=None), plain))
    terms = [jnp.broadcast_to(term, out.shape) for term in terms]
    return out, sum(terms[1:], terms[0]) if terms else None


def _tgmm_transpose_rule(ct, x: TgmmOperands, p: TgmmParams):
    """dlhs[r] = dout[r] @ ct[e]^T, ddout[r] = lhs[r] @ ct[e]; nothing is quantized again."""
    none = TgmmOperands(*(None,) * len(x))
    linear = x.lhs if is_linear(x.lhs) else x.dout
    grad = GmmParams(
        transpose_rhs=p.transpose_out,
        out_dtype=np.dtype(linear.aval.dtype),
        tail=p.tail,
        expected_rows=p.expected_rows,
    )
    if is_linear(x.lhs):  # [m, n] @ [g, n, k]
        grad = dataclasses.replace(grad, transpose_rhs=not p.transpose_out)
        # dout as float8 data is a QArray with scale 1
        unit = None if x.dout_carrier is None else jnp.ones((1,) * x.dout.ndim, jnp.float32)
        operands = GmmOperands(
            x.dout, ct, x.starts, x.ends, lhs_scale=unit, lhs_carrier=x.dout_carrier
        )
        dlhs = gmm_p.call(operands, grad)
        return none._replace(lhs=sum_to(dlhs, linear.aval.shape))
    operands = GmmOperands(  # [m, k] @ [g, k, n]
        x.lhs, ct, x.starts, x.ends, lhs_scale=x.lhs_scale, lhs_carrier=x.lhs_carrier
    )
    return none._replace(dout=sum_to(gmm_p.call(operands, grad), linear.aval.shape))


tgmm_quant_p = define(
    "fp8moe_tgmm_quant",
    operands=TgmmOperands,
    abstract_eval=_tgmm_abstract_eval,
    batch=_tgmm_batch_rule,
    jvp=_tgmm_jvp_rule,
    transpose=_tgmm_transpose_rule,
    lowerings={
        "cpu": "xla.tgmm_quant:tgmm_quant",
        "cuda": "xla.tgmm_quant:tgmm_quant",
        "rocm": "xla.tgmm_quant:tgmm_quant",
        "tpu": "tpu.tgmm_quant:tgmm_quant",
    },
)
