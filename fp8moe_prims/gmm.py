"""Grouped matmul of a ragged buffer, ``fp8moe_gmm``.

    out[r] = lhs[r] @ rhs[e]        for the rows r of group e;  rows of no group: the tail

    lhs  [m, k]             rhs  [g, k, n], or [g, n, k] with transpose_rhs        out  [m, n]

Bilinear in lhs and rhs, and closed under transposition together with ``fp8moe_tgmm_quant``:

    dlhs = gmm(dout, rhs transposed)            drhs = tgmm(lhs, dout)

Inside the primitive every operand has the same number of leading batch dimensions, each 1 or the
full size; vmap adds one. A lowering turns (batch, group) into groups of one flat problem, so an
operand that is not batched is never copied.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8moe_prims import debug, dense
from fp8moe_prims._primitive import (
    batch_leading,
    define,
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.groups import group_ranges
from fp8moe_prims.qarray import operand, parse_calibration, quantize
from fp8moe_prims.recipe import UNQUANTIZED, QuantRecipe


class GmmOperands(NamedTuple):
    lhs: Any  # [*b, m, k]
    rhs: Any  # [*b, g, k, n], or [*b, g, n, k]
    starts: Any  # int32 [*b, g], first row of each group
    ends: Any  # int32 [*b, g], the row after its last
    lhs_scale: Any = None  # float32 [*b, m | 1, 1]
    rhs_scale: Any = None  # float32 [*b, g | 1, ...], each of the others 1, equal, or a divisor
    lhs_carrier: Any = None  # like lhs, wide: see qarray.py
    rhs_carrier: Any = None  # like rhs, wide


@dataclasses.dataclass(frozen=True)
class GmmParams:
    """Static parameters of ``fp8moe_gmm``.

    Attributes:
      transpose_rhs: rhs is [g, n, k].
      out_dtype: dtype of the result; accumulation is in float32.
      lhs_dtype: what lhs is quantized to in the kernel per (row x block_k), None for as it is. An
        rhs scale that varies along the contraction only is multiplied into lhs before that.
      lhs_bound: the range [-b, b] of a fixed calibration, None for absmax.
      block_k: elements of the contraction that share a scale.
      tail: "zero" or "undefined", what rows of no group hold, here and in the gradients.
      expected_rows: rows that the cost estimate counts, None for all.
      recipe: how the transposes quantize.
    """

    transpose_rhs: bool
    out_dtype: np.dtype
    lhs_dtype: str | None = None
    lhs_bound: float | None = None
    block_k: int = 512
    tail: str = "zero"
    expected_rows: int | None = None
    recipe: QuantRecipe = UNQUANTIZED


def gmm(
    lhs,
    rhs,
    group_sizes,
    *,
    group_starts=None,
    group_offset=None,
    transpose_rhs=False,
    recipe=None,
    preferred_element_type=None,
    tail="zero",
    expected_rows=None,
):
    """Multiplies each group of rows by its own matrix, quantizing inside the kernel.

    ``out[r] = lhs[r] @ rhs[e]`` for a row r of group ``e + group_offset``: what ``ragged_dot`` is,
    with the quantization of lhs, and in the backward pass of the cotangent, fused into it. The rows
    are sorted by group, and group_sizes counts them (``jnp.bincount(expert, length=G)``).

    lhs is quantized per (row x block_k elements of k), rhs per (group x output channel), the
    cotangent per (row x block_k elements of n) for dlhs and per (row block x channel) for drhs, by
    the rule of ``lowering/numerics.py``. The gradient is straight through.

    Args:
      lhs: activations [m, k], bfloat16, float16, float32, or a QArray with a scale [m, 1] or
        [1, 1].
      rhs: weights [g, k, n], or [g, n, k] with transpose_rhs, of the same dtypes, or a QArray with
        a scale [1|g, 1, 1|n] (n in its place when transposed) or blocked along k.
      group_sizes: integers [G], rows of each group, G >= g. Negative sizes count as 0, groups that
        overrun are cut at m, rows of groups that are not local are the tail.
      group_starts: integers [G], ascending, first row of each group; None: they follow each other
        from row 0. Rows of no group are the tail, wherever they lie.
      group_offset: index of the first local group, an integer or integer array of shape () or (1,).
      transpose_rhs: whether rhs is [g, n, k].
      recipe: what is quantized; None: nothing but what is a QArray already.
      preferred_element_type: dtype of the result; None: the promoted dtype of the operands that are
        not QArrays, bfloat16 if both are.
      tail: "zero" fills the rows of no group; "undefined" leaves them as memory had them, at no
        cost. Gradients with respect to those rows follow the same choice.
      expected_rows: rows expected to be valid, for the scheduler's cost estimate; None: m.

    Returns:
      [m, n].

    Raises:
      TypeError, ValueError: an argument has the wrong rank, shape, dtype or value; it is named.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> lhs, rhs = jnp.ones((8, 128)), jnp.ones((2, 128, 256))
    >>> fp8.gmm(lhs, rhs, jnp.array([3, 4]), recipe=fp8.QuantRecipe())[:, 0]
    Array([128., 128., 128., 128., 128., 128., 128.,   0.], dtype=float32)
    """
    recipe = check_recipe(recipe)
    check_tail(tail)
    x, x_scale, x_carrier = operand("lhs", lhs, ("m", "k"))
    rhs_dims = ("g", "n", "k") if transpose_rhs else ("g", "k", "n")
    w, w_scale, w_carrier = operand("rhs", rhs, rhs_dims)
    (m, k), g = x.shape, w.shape[0]
    if w.shape[rhs_dims.index("k")] != k:
        hint = "; pass transpose_rhs=True for [g, n, k]" if w.shape[2] == k else ""
        raise ValueError(
            f"rhs: takes [{', '.join(rhs_dims)}] with k = {k} as in lhs {x.shape},"
            f" got {w.shape}{hint}"
        )
    if 0 in (k, w.shape[rhs_dims.index("n")]):
        raise ValueError(f"lhs and rhs: k and n must be at least 1, got {x.shape} and {w.shape}")
    check_row_scale("lhs", x_scale, m)
    starts, ends = group_ranges(group_sizes, group_starts, group_offset, g, m)
    if debug.enabled():
        debug.check_groups("gmm", group_sizes, group_starts, group_offset, g, m)
        if group_offset is None:
            debug.check_surplus("gmm", group_sizes, g, tail)
        debug.check_scale("gmm", "lhs", x_scale, starts, ends)
        debug.check_scale("gmm", "rhs", w_scale)
    out_dtype = result_dtype(
        preferred_element_type, *(a.dtype for a, s in ((x, x_scale), (w, w_scale)) if s is None)
    )
    if w_scale is None and recipe.weight_dtype is not None:
        q = quantize_weights(w, recipe, transpose_rhs)
        w, w_scale, w_carrier = q.qvalue, q.scale, q.carrier
    quantize_lhs = x_scale is None and recipe.act_dtype is not None
    operands = GmmOperands(x, w, starts, ends, x_scale, w_scale, x_carrier, w_carrier)
    return gmm_p.call(
        operands,
        GmmParams(
            transpose_rhs=bool(transpose_rhs),
            out_dtype=out_dtype,
            lhs_dtype=recipe.act_dtype if quantize_lhs else None,
            lhs_bound=parse_calibration("act_calibration", recipe.act_calibration)
            if quantize_lhs
            else None,
            block_k=recipe.block_k,
            tail=tail,
            expected_rows=check_rows("expected_rows", expected_rows),
            recipe=recipe,
        ),
    )


def quantize_weights(w, recipe: QuantRecipe, transpose_rhs: bool = False):
    """Weights as `gmm` multiplies by them: one scale per group and output channel.

    What is a QArray already, or not to be quantized, stays as it is.
    """
    if recipe.weight_dtype is None or hasattr(w, "qvalue"):
        return w
    return quantize(
        w,
        recipe.weight_dtype,
        channelwise_axes=(0, 1 if transpose_rhs else 2),
        calibration=recipe.weight_calibration,
    )


# ---------------------------------------------------------------- checks shared with tgmm_quant


def check_recipe(recipe) -> QuantRecipe:
    if recipe is not None and not isinstance(recipe, QuantRecipe):
        raise TypeError(f"recipe: takes a QuantRecipe or None, got {type(recipe).__name__}")
    return UNQUANTIZED if recipe is None else recipe


def check_tail(tail) -> None:
    if tail not in ("zero", "undefined"):
        raise ValueError(f"tail: must be 'zero' or 'undefined', got {tail!r}")


def check_rows(name, rows) -> int | None:
    if rows is not None and (not isinstance(rows, (int, np.integer)) or rows < 0):
        raise ValueError(f"{name}: takes a non-negative integer or None, got {rows!r}")
    return None if rows is None else int(rows)


def check_row_scale(name, scale, m) -> None:
    if scale is not None and scale.shape not in ((m, 1), (1, 1)):
        raise ValueError(f"{name}: takes a scale of shape ({m}, 1) or (1, 1), got {scale.shape}")


def result_dtype(preferred, *unquantized) -> np.dtype:
    """The dtype asked for, else the promoted one of the unquantized operands, else bfloat16."""
    if preferred is not None:
        dtype = np.dtype(preferred)
        if dtype not in (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)):
            raise TypeError(
                f"preferred_element_type: takes bfloat16, float16 or float32, got {dtype}"
            )
        return dtype
    if not unquantized:
        return np.dtype(jnp.bfloat16)
    first, last = (np.dtype(d) for d in (unquantized[0], unquantized[-1]))
    return first if first == last else np.dtype(np.float32)  # also under strict promotion


# ------------------------------------------------------------------------------------- rules

_TIES = (("lhs", "lhs_scale"), ("rhs", "rhs_scale"), ("starts", "ends"))


def _gmm_abstract_eval(x: GmmOperands, p: GmmParams):
    batch = np.broadcast_shapes(x.lhs.shape[:-2], x.rhs.shape[:-3], x.starts.shape[:-1])
    n = x.rhs.shape[-2 if p.transpose_rhs else -1]
    return result_aval(x.lhs, (*batch, x.lhs.shape[-2], n), p.out_dtype)


def _gmm_batch_rule(x: GmmOperands, dims: GmmOperands, p: GmmParams):
    return gmm_p.call(batch_leading(x, dims, _TIES), p), 0


def _gmm_jvp_rule(x: GmmOperands, t: GmmOperands, p: GmmParams):
    """dout = gmm(dlhs, quantized rhs) + gmm(quantized lhs, drhs)."""
    out = gmm_p.call(x, p)
    terms = []
    dlhs = t.lhs if x.lhs_scale is None else t.lhs_carrier
    if dlhs is not None:  # [m, k] @ [g, k, n]; the tangent itself is not quantized
        plain = dataclasses.replace(p, lhs_dtype=None, lhs_bound=None)
        operands = x._replace(lhs=dlhs, lhs_scale=None, lhs_carrier=None)
        terms.append(gmm_p.call(operands, plain))
    drhs = t.rhs if x.rhs_scale is None else t.rhs_carrier
    if drhs is not None:  # [m, k] @ [g, k, n]; lhs is quantized as it was
        terms.append(gmm_p.call(x._replace(rhs=drhs, rhs_scale=None, rhs_carrier=None), p))
    terms = [jnp.broadcast_to(term, out.shape) for term in terms]
    return out, sum(terms[1:], terms[0]) if terms else None


def _gmm_transpose_rule(ct, x: GmmOperands, p: GmmParams):
    none = GmmOperands(*(None,) * len(x))
    if is_linear(x.lhs):
        return none._replace(lhs=sum_to(_dlhs(ct, x, p), x.lhs.aval.shape))
    return none._replace(rhs=sum_to(_drhs(ct, x, p), x.rhs.aval.shape))


def _dlhs(dout, x: GmmOperands, p: GmmParams):
    """dlhs[r] = quantize(dout[r] * rhs_scale[e]) @ rhs[e]^T, [*b, m, k]."""
    grad = GmmParams(
        transpose_rhs=not p.transpose_rhs,
        out_dtype=np.dtype(x.lhs.aval.dtype),
        lhs_dtype=p.recipe.grad_dtype,
        lhs_bound=parse_calibration("grad_calibration", p.recipe.grad_calibration),
        block_k=p.recipe.block_k,
        tail=p.tail,
        expected_rows=p.expected_rows,
        recipe=p.recipe,
    )
    operands = x._replace(lhs=dout, lhs_scale=None, lhs_carrier=None)
    if p.recipe.backward == "dense" and p.recipe.grad_dtype is not None:
        operands = dense.quantize_cotangent(operands, grad)
        grad = dataclasses.replace(grad, lhs_dtype=None, lhs_bound=None)
    return gmm_p.call(operands, grad)


def _drhs(dout, x: GmmOperands, p: GmmParams):
    """drhs[e] = quantize(lhs_e)^T quantize(dout_e), [*b, g, k, n] or [*b, g, n, k]."""
    from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams, tgmm_quant_p

    operands = TgmmOperands(x.lhs, dout, x.starts, x.ends, x.lhs_scale, x.lhs_carrier)
    grad = TgmmParams(
        out_dtype=np.dtype(x.rhs.aval.dtype),
        lhs_dtype=p.lhs_dtype,
        dout_dtype=p.recipe.grad_dtype,
        dout_bound=parse_calibration("grad_calibration", p.recipe.grad_calibration),
        block_m=p.recipe.block_m,
        transpose_out=p.transpose_rhs,
        tail=p.tail,
        expected_rows=p.expected_rows,
    )
    if p.recipe.backward == "dense" and p.recipe.grad_dtype is not None:
        return dense.tgmm(operands, grad)
    return tgmm_quant_p.call(operands, grad)


gmm_p = define(
    "fp8moe_gmm",
    operands=GmmOperands,
    abstract_eval=_gmm_abstract_eval,
    batch=_gmm_batch_rule,
    jvp=_gmm_jvp_rule,
    transpose=_gmm_transpose_rule,
    lowerings={
        "cpu": "xla.gmm:gmm",
        "cuda": "xla.gmm:gmm",
        "rocm": "xla.gmm:gmm",
        "tpu": "tpu.gmm:gmm",
    },
)
