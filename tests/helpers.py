"""Assertions and loops that several test files use."""

import contextlib
import io

import jax
import numpy as np
from absl.testing import parameterized

import fp8moe_prims as fp8

# A small topology of each chip, to compile for.
TOPOLOGIES = {"v7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}


def named(cases):
    """named_parameters over rows of the table."""
    return parameterized.named_parameters(*((c.name.replace("/", "_"), c) for c in cases))


def assert_close(actual, reference, tolerance):
    """max |error| <= tolerance * max |reference|; NaN and Inf must stand at the same places.

    Of a float16 array, what the reference has beyond its range must be Inf, and what is within 1%
    of its end may be either.
    """
    dtype = np.asarray(actual).dtype
    actual, reference = (np.asarray(x).astype(np.float64) for x in (actual, reference))
    if dtype == np.float16:
        share = np.abs(reference) / np.finfo(dtype).max
        actual = np.where(np.abs(share - 1) <= 0.01, reference, actual)
        reference = np.where(share > 1.01, np.copysign(np.inf, reference), reference)
    assert actual.shape == reference.shape, (actual.shape, reference.shape)
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isfinite(actual), finite)
    actual, reference = (np.where(finite, x, 0.0) for x in (actual, reference))  # no Inf - Inf
    error = np.max(np.abs(actual - reference), initial=0)
    bound = tolerance * max(np.max(np.abs(reference), initial=0), 1e-30)
    assert error <= bound, f"max error {error:.3e} > {bound:.3e}"


def assert_same_bits(actual, reference):
    actual, reference = np.asarray(actual), np.asarray(reference)
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(np.uint8), np.ascontiguousarray(reference).view(np.uint8)
    )


def distance(a, b):
    """|a - b| / |b| in the Frobenius norm."""
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def poisoned(x, valid, value):
    """x, array or QArray, with ``value`` in the rows that are not valid (scales too)."""
    if isinstance(x, fp8.QArray):
        scale = x.scale
        if scale.shape[0] == x.qvalue.shape[0]:
            scale = poisoned(scale, valid, value)
        bad = value if np.isnan(value) or x.qvalue.dtype != np.int8 else 127
        return fp8.QArray(poisoned(x.qvalue, valid, bad), scale)
    x = np.array(x)
    with np.errstate(all="ignore"):
        x[~valid] = np.array(value, np.float32).astype(x.dtype) if x.dtype != np.int8 else 127
    return x


def as_jax(tree):
    return jax.tree.map(jax.numpy.asarray, tree)


def run_tool(main, *argv):
    """(exit code, stdout, stderr) of a tool's main."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(argv))
        except SystemExit as e:
            code = e.code
            if isinstance(code, str):
                print(code, file=err)
    return code, out.getvalue(), err.getvalue()
