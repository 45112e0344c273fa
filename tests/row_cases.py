"""Rows of the table for the operations that move rows: gather, gather_reduce, glu.

Each row is one call with its naive reference. The primitives that only appear in gradients
(gather_dot, scatter_add) are reached by the rows whose ``reaches`` names them.
"""

import dataclasses
import functools
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import fp8moe_prims as fp8
from tests import oracle

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": oracle.QDTYPES["e4m3"],
    "e5m2": oracle.QDTYPES["e5m2"],
    "int8": np.dtype(np.int8),
}


@dataclasses.dataclass(frozen=True)
class RowCase:
    """One call.

    Attributes:
      name: unique.
      op: "ragged_gather", "ragged_gather_reduce" or "ragged_glu".
      tokens, top_k, width: t, top_k and d (f for glu); the buffer has t * top_k rows.
      start, end: the range, as passed; end None is the buffer's.
      kind: dtype of the rows, or "q:<dtype>:<row|one|channel>" for a QArray.
      weights, inverse: whether they are passed.
      bad: indices that lie outside are mixed in.
      options: further keywords of the call.
      reaches: primitives that the gradients of this call go through, beside its own.
      tags: "interpret" rows run in the interpreter too, "grad" rows are differentiated.
    """

    name: str
    op: str
    tokens: int
    top_k: int
    width: int
    start: int = 0
    end: int | None = None
    kind: str = "f32"
    weights: bool = False
    inverse: bool = False
    bad: bool = False
    options: tuple[tuple[str, object], ...] = ()
    reaches: tuple[str, ...] = ()
    tags: tuple[str, ...] = ("interpret", "grad")

    rows = property(lambda self: self.tokens * self.top_k)

    @property
    def range(self):
        """(start, end) clamped; empty where inverted."""
        end = self.rows if self.end is None else self.end
        start, end = (min(max(v, 0), self.rows) for v in (self.start, end))
        return start, max(start, end)

    @functools.cached_property
    def inputs(self):
        """dict: x, weights (or None), row_of_slot [t, top_k], slot_of_row [m]."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        slot_of_row = rng.permutation(self.rows).astype(np.int32)
        row_of_slot = np.empty_like(slot_of_row)
        row_of_slot[slot_of_row] = np.arange(self.rows, dtype=np.int32)
        count = self.tokens if self.op == "ragged_gather" else self.rows
        width = self.width * (2 if self.op == "ragged_glu" else 1)
        x = _rows(rng, self.kind, (count, width))
        shape = (self.rows,) if self.op == "ragged_gather" else (self.tokens, self.top_k)
        weights = rng.standard_normal(shape).astype(np.float32) if self.weights else None
        row_of_slot = row_of_slot.reshape(self.tokens, self.top_k)
        token = slot_of_row // max(self.top_k, 1)
        if self.bad:
            token[::3], row_of_slot[::2, 0] = -1, self.rows + 5
            token[1::7] = self.tokens
        return dict(x=x, weights=weights, token=token, slot=slot_of_row, row_of_slot=row_of_slot)

    def function(self):
        """The call as a function of (x, weights)."""
        i, options = self.inputs, dict(self.options)
        options |= dict(start=self.start, end=self.end)
        if self.op == "ragged_glu":
            return lambda x, w: fp8.ragged_glu(x, **options)
        if self.op == "ragged_gather":
            inverse = i["row_of_slot"] if self.inverse else None
            return lambda x, w: fp8.ragged_gather(
                x, i["token"], weights=w, inverse=inverse, **options
            )
        inverse = i["slot"] if self.inverse else None
        return lambda x, w: fp8.ragged_gather_reduce(
            x, i["row_of_slot"], weights=w, inverse=inverse, **options
        )

    def reference(self, x=None, weights=None):
        """float64 result, of the dequantized values."""
        i = self.inputs
        x = i["x"] if x is None else x
        weights = i["weights"] if weights is None else weights
        values = values_of(x)
        start, end = self.range
        if self.op == "ragged_glu":
            out = np.zeros((self.rows, self.width))
            gate, up = values[start:end, : self.width], values[start:end, self.width :]
            out[start:end] = gate / (1 + np.exp(-gate)) * up
        elif self.op == "ragged_gather":
            out = np.zeros((self.rows, self.width))
            for r in range(start, end):
                if 0 <= i["token"][r] < self.tokens:
                    out[r] = values[i["token"][r]] * (1 if weights is None else weights[r])
        else:
            out = np.zeros((self.tokens, self.width))
            for t in range(self.tokens):
                for j, r in enumerate(i["row_of_slot"][t]):
                    if start <= r < end:
                        out[t] += values[r] * (1 if weights is None else weights[t, j])
        return out

    def gradients(self, ct):
        """float64 gradients with respect to the (dequantized) rows and the weights."""
        i, (start, end) = self.inputs, self.range
        values, weights = values_of(i["x"]), i["weights"]
        dx = np.zeros(values.shape)
        dw = None if weights is None else np.zeros(weights.shape)
        if self.op == "ragged_glu":
            gate, up = values[start:end, : self.width], values[start:end, self.width :]
            s = 1 / (1 + np.exp(-gate))
            dx[start:end, : self.width] = ct[start:end] * up * (s + gate * s * (1 - s))
            dx[start:end, self.width :] = ct[start:end] * gate * s
        elif self.op == "ragged_gather":
            for r in range(start, end):
                t = i["token"][r]
                if 0 <= t < self.tokens:
                    dx[t] += ct[r] * (1 if weights is None else weights[r])
                    if dw is not None:
                        dw[r] = ct[r] @ values[t]
        else:
            for t in range(self.tokens):
                for j, r in enumerate(i["row_of_slot"][t]):
                    if start <= r < end:
                        dx[r] += ct[t] * (1 if weights is None else weights[t, j])
                        if dw is not None:
                            dw[t, j] = ct[t] @ values[r]
        return dx, dw


def values_of(x):
    if not isinstance(x, fp8.QArray):
        return oracle.wide(x)
    return oracle.wide(x.qvalue) * oracle.wide(x.scale)


def _rows(rng, kind, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    if not kind.startswith("q:"):
        if kind == "int8":
            return rng.integers(-127, 128, shape).astype(np.int8)
        return x.astype(DTYPES[kind])
    _, dtype, scale = kind.split(":")
    scale_shape = {"row": (shape[0], 1), "one": (1, 1), "channel": (1, shape[1])}[scale]
    exponents = rng.permutation(np.prod(scale_shape)).reshape(scale_shape) % 61 - 30
    return fp8.QArray(x.astype(DTYPES[dtype]), np.exp2(exponents).astype(np.float32))


def _all():
    gather = functools.partial(RowCase, op="ragged_gather")
    reduce = functools.partial(RowCase, op="ragged_gather_reduce")
    glu = functools.partial(RowCase, op="ragged_glu")
    scatter, dot = "ragged_scatter_add", "ragged_gather_dot"
    shapes = ((20, 1, 96), (17, 2, 128), (9, 3, 200), (7, 6, 96), (5, 8, 128))
    for t, k, d in shapes:
        size = dict(tokens=t, top_k=k, width=d)
        for kind in ("f32", "bf16", "e4m3", "int8"):
            tags = ("interpret", "grad") if kind == "f32" else ("interpret",)
            reach = (scatter,) if kind == "f32" else ()
            yield gather(f"gather/{kind}/k{k}d{d}", **size, kind=kind, tags=tags, reaches=reach)
        for kind in ("f32", "bf16", "q:e4m3:row"):
            yield reduce(f"reduce/{kind}/k{k}d{d}", **size, kind=kind, reaches=(scatter,))
        yield gather(f"gather/inverse/k{k}d{d}", **size, inverse=True, start=2, end=t * k - 2)
        yield reduce(f"reduce/inverse/k{k}d{d}", **size, inverse=True, start=2, end=t * k - 2)
    for weights in (False, True):
        yield reduce(
            f"reduce/inverse_quantized{'_weighted' * weights}",
            **dict(tokens=9, top_k=3, width=43),
            kind="q:e4m3:row",
            inverse=True,
            weights=weights,
        )
    size = dict(tokens=24, top_k=4, width=128)
    for name, start, end in (
        ("partial", 5, 61),
        ("empty", 7, 7),
        ("reversed", 50, 20),
        ("beyond", -5, 1000),
        ("last", 95, 96),
        ("first", 0, 1),
    ):
        yield gather(f"gather/{name}", **size, start=start, end=end, reaches=(scatter,))
        yield reduce(f"reduce/{name}", **size, start=start, end=end, reaches=(scatter,))
        yield glu(f"glu/{name}", **size, start=start, end=end)
    weighted = dict(weights=True, reaches=(scatter, dot), start=3, end=90)
    yield gather("gather/weights", **size, **weighted)
    yield reduce("reduce/weights", **size, **weighted)
    weighted["reaches"] = (dot,)
    yield gather("gather/weights_inverse", **size, **weighted, inverse=True)
    yield reduce("reduce/weights_inverse", **size, **weighted, inverse=True)
    yield gather("gather/bad_indices", **size, bad=True, reaches=(scatter,))
    yield reduce("reduce/bad_indices", **size, bad=True, reaches=(scatter,))
    for kind in ("q:e4m3:row", "q:e5m2:one", "q:int8:row", "q:e4m3:channel"):
        yield gather(f"gather/{kind}", **size, kind=kind, start=3, end=90)
    yield gather("gather/q:e4m3:row/weights", **size, kind="q:e4m3:row", **weighted)
    yield reduce("reduce/q:e5m2:one", **size, kind="q:e5m2:one", **weighted)
    yield gather("gather/wide", tokens=12, top_k=8, width=7168, kind="bf16", tags=())
    yield glu("glu/bf16", **size, kind="bf16", end=70)
    yield glu("glu/odd", tokens=37, top_k=1, width=43, end=30)


CASES = tuple(_all())


def as_jax(case):
    x, w = case.inputs["x"], case.inputs["weights"]
    if isinstance(x, fp8.QArray):
        x = fp8.QArray(jnp.asarray(x.qvalue), jnp.asarray(x.scale))
    else:
        x = jnp.asarray(x)
    return x, None if w is None else jnp.asarray(w)


def random_bits(rng, shape, dtype):
    """Arrays of any bit pattern: NaNs with payloads, infinities, subnormals."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return rng.randint(0, 256, size).astype(np.uint8).view(dtype)


def small(rng, shape, dtype):
    """Numbers whose products and sums are exact in float32, in every type."""
    return rng.randint(-8, 9, shape).astype(np.float32).astype(dtype)


def gather_inputs(dtype, t: int, m: int, d: int, weighted: bool, scaled: bool):
    """(x [t, d], indices [m] of which some name no row, weights or None, row scale or None)."""
    rng = np.random.RandomState(0)
    x = small(rng, (t, d), dtype)
    if not weighted or scaled:
        x = random_bits(rng, (t, d), dtype)
    indices = rng.randint(-2, t + 2, m).astype(np.int32)
    indices[m // 2] = 2**31 - 1
    weights = rng.randint(-9, 9, m).astype(np.float32) / 4 if weighted else None
    scale = np.exp2(rng.permutation(t) - t // 2).astype(np.float32)[:, None] if scaled else None
    return x, indices, weights, scale
