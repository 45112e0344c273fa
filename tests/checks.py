"""Checks of one row of the tables, that the table's tests and the fuzzer both run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fp8moe_prims as fp8
from tests import helpers, row_cases

_jitted = functools.lru_cache(64)(lambda case: jax.jit(case.function()))


def eps_of(dtype) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


# ---------------------------------------------------------------------------- gmm, tgmm_quant


def run(case, lowering, jit=True, lhs=None, second=None):
    """The result of a `cases.Case`, on its own arrays or on others."""
    a, b = case.arrays()
    a, b = a if lhs is None else lhs, b if second is None else second
    fn = _jitted(case) if jit else case.function()
    with fp8.use_lowering(lowering):
        return np.asarray(fn(*helpers.as_jax((a, b)), case.kwargs()["group_sizes"]))


def value(case, lowering) -> None:
    """The result equals the reference; bfloat16 and float16 results at their own precision."""
    out = run(case, lowering)
    narrow = 2 * eps_of(out.dtype) if out.dtype.itemsize < 4 else 0
    helpers.assert_close(out, case.reference(), max(case.tolerance, narrow))


def tail_changes_no_bit(case, lowering, poison) -> None:
    """Rows of no group hold ``poison``."""
    lhs, second = case.arrays()
    lhs = helpers.poisoned(lhs, case.valid, poison)
    if case.op == "tgmm_quant":
        second = helpers.poisoned(second, case.valid, poison)
    clean = run(case, lowering)
    helpers.assert_same_bits(run(case, lowering, lhs=lhs, second=second), clean)


def gradients(case, lowering) -> None:
    """Both gradients of a gmm equal the reference, and have their operands' dtypes."""
    lhs, rhs = helpers.as_jax(case.arrays())
    quantized = lambda x: isinstance(x, fp8.QArray)
    fn, sizes = case.function(), case.kwargs()["group_sizes"]

    def call(a, b):  # differentiates a QArray through its carrier
        put = lambda x, c: fp8.QArray(x.qvalue, x.scale, c) if quantized(x) else c
        return fn(put(lhs, a), put(rhs, b), sizes)

    with fp8.use_lowering(lowering):
        args = [x.dequantize() if quantized(x) else x for x in (lhs, rhs)]
        out = jax.eval_shape(call, *args)
        dout = np.random.default_rng(0).standard_normal(out.shape).astype(out.dtype)
        grads = jax.jit(lambda a, b, d: jax.vjp(call, a, b)[1](d))(*args, jnp.asarray(dout))
    for got, want, arg in zip(grads, case.gradients(dout), args, strict=True):
        assert got.dtype == arg.dtype, (got.dtype, arg.dtype)
        narrow = 2 * eps_of(got.dtype) if got.dtype.itemsize < 4 else 0
        helpers.assert_close(got, want, max(case.tolerance, 2e-5, narrow))


# ----------------------------------------------------------------- gather, gather_reduce, glu


def run_rows(case, lowering, x=None):
    """The result of a `row_cases.RowCase`, on its own rows or on others."""
    plain, weights = row_cases.as_jax(case)
    with fp8.use_lowering(lowering):
        return _jitted(case)(plain if x is None else x, weights)


def values(out):
    """The float64 values of a result, array or QArray."""
    return row_cases.values_of(jax.tree.map(np.asarray, out))


def rows_value(case, lowering) -> None:
    """Moves are exact; sums and products round in float32, results in their own dtype."""
    out = run_rows(case, lowering)
    dtype = np.float32 if isinstance(out, fp8.QArray) else out.dtype
    moved = case.op == "ragged_gather" and not case.weights
    tolerance = 0.0 if moved else max(4 * eps_of(dtype), 5e-6)
    helpers.assert_close(values(out), case.reference(), tolerance)


def rows_gradients(case, lowering) -> None:
    """The gradients with respect to the rows and the weights equal the reference."""
    x, w = row_cases.as_jax(case)
    quantized = isinstance(x, fp8.QArray)
    fn = case.function()

    def call(wide, w):
        out = fn(fp8.QArray(x.qvalue, x.scale, wide) if quantized else wide, w)
        return out.dequantize() if isinstance(out, fp8.QArray) else out

    wide = x
    if quantized:
        wide = jnp.asarray(row_cases.values_of(case.inputs["x"]).astype(np.float32))
    with fp8.use_lowering(lowering):
        out = jax.eval_shape(call, wide, w)
        ct = np.random.default_rng(0).standard_normal(out.shape).astype(out.dtype)
        got = jax.jit(lambda v, w, ct: jax.vjp(call, v, w)[1](ct))(wide, w, jnp.asarray(ct))
    want = case.gradients(ct.astype(np.float64))
    for g, r, arg in zip(got, want, (wide, w), strict=True):
        if r is not None:
            assert g.dtype == arg.dtype, (g.dtype, arg.dtype)
            helpers.assert_close(g, r, max(4 * eps_of(out.dtype), 5e-6))
