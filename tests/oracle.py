"""Naive references in numpy: one loop per row or group, products in float64.

Written apart from the lowerings. Rounding decisions are made in float32, as the rule says (scale =
absmax * float32(1 / max), value * (1 / scale)), with ml_dtypes' casts; everything after them is
float64, so a difference to a lowering is its float32 summation alone.
"""

import ml_dtypes
import numpy as np

QDTYPES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.5}
TINY = np.finfo(np.float32).tiny


def wide(x):
    """float64 of any array, float8 included."""
    return np.asarray(x).astype(np.float32).astype(np.float64)


def round_block(x, name, bound=None):
    """Dequantized float64 values of the float32 block x, which shares one scale."""
    x = np.asarray(x, np.float32)
    if x.size == 0:
        return x.astype(np.float64)
    top, dtype = np.float32(MAX[name]), QDTYPES[name]
    with np.errstate(all="ignore"):
        if bound is not None:
            scale = np.float32(np.float32(bound) / top)
        else:
            scale = np.float32(np.max(np.abs(x)) * np.float32(np.float32(1) / top))
            if scale < TINY:
                return np.zeros(x.shape)
        y = x * np.float32(np.float32(1) / scale)
        q = np.clip(np.round(y), -128, 127) if name == "int8" else np.clip(y, -top, top)
        return q.astype(dtype).astype(np.float64) * np.float64(scale)


def round_rows(x, name, block, bound=None):
    """Each row in blocks of ``block`` elements."""
    if name is None:
        return wide(x)
    out = np.zeros(x.shape)
    for r in range(x.shape[0]):
        for c in range(0, x.shape[1], block):
            out[r, c : c + block] = round_block(x[r, c : c + block], name, bound)
    return out


def round_channels(x, name, bound=None):
    """Each column as one block."""
    if name is None:
        return wide(x)
    columns = [round_block(x[:, c], name, bound) for c in range(x.shape[1])]
    return np.stack(columns, axis=1) if columns else np.zeros(x.shape)


def expand(scale, shape):
    """A scale, each dimension 1, equal, or a divisor, repeated to ``shape``."""
    scale = wide(scale)
    for axis, d in enumerate(shape):
        scale = np.repeat(scale, d // scale.shape[axis], axis=axis)
    return scale


def ranges(sizes, starts, offset, g, m):
    """[(start, end)] of the local groups, clamped."""
    out, row = [], 0
    for e, size in enumerate(sizes):
        size = max(int(size), 0)
        first = row if starts is None else int(starts[e])
        out.append((min(max(first, 0), m), min(max(first + size, 0), m)))
        row += size
    local = [out[e + offset] if 0 <= e + offset < len(out) else (0, 0) for e in range(g)]
    return [(a, max(a, b)) for a, b in local]


def quantize_weights(rhs, name, transpose_rhs, bound=None):
    """Per (expert x output channel)."""
    if name is None:
        return wide(rhs)
    axis = 2 if transpose_rhs else 1
    x = np.asarray(rhs).astype(np.float32)
    top = np.float32(MAX[name])
    if bound is None:
        scale = np.abs(x).max(axis=axis, keepdims=True) * np.float32(np.float32(1) / top)
        scale = np.where(scale < TINY, np.float32(np.inf), scale)
    else:
        scale = np.full((1, 1, 1), np.float32(bound) / top, np.float32)
    y = x * (np.float32(1) / scale)  # as XLA does a division by a broadcast scale
    q = np.clip(np.round(y), -128, 127) if name == "int8" else np.clip(y, -top, top)
    return q.astype(QDTYPES[name]).astype(np.float64) * np.where(np.isinf(scale), 1, scale).astype(
        np.float64
    )


def gmm(lhs, rhs, groups, *, transpose_rhs=False, fold=None):
    """out[r] = lhs[r] @ rhs[e], all float64 already; rows of no group are zero.

    fold is a function (rows, e) -> rows applied to the group's rows first (quantization).
    """
    n = rhs.shape[1 if transpose_rhs else 2]
    out = np.zeros((lhs.shape[0], n))
    with np.errstate(all="ignore"):
        for e, (start, end) in enumerate(groups):
            rows = lhs[start:end] if fold is None else fold(lhs[start:end], e)
            out[start:end] = rows @ (rhs[e].T if transpose_rhs else rhs[e])
    return out


def tgmm(lhs, dout, groups, *, lhs_dtype, dout_dtype, block_m, lhs_scale=None, dout_bound=None):
    """out[e] = sum of lhs[r]^T dout[r], quantized per (row block x channel)."""
    out = np.zeros((len(groups), lhs.shape[1], dout.shape[1]))
    with np.errstate(all="ignore"):
        for e, (start, end) in enumerate(groups):
            for a in range(start, end, block_m):
                b = min(a + block_m, end)
                right = dout[a:b].astype(np.float32)
                if lhs_scale is not None:
                    scale = np.asarray(lhs_scale).astype(np.float32)
                    right = right * np.broadcast_to(scale, (lhs.shape[0], 1))[a:b]
                left = round_channels(lhs[a:b], lhs_dtype)
                out[e] += left.T @ round_channels(right, dout_dtype, dout_bound)
    return out


def gathered(x, indices, start, end, weights=None, scale=None):
    """ragged_gather as a loop: (out, scale)."""
    t, m = len(x), len(indices)
    out, scales = np.zeros((m, x.shape[1]), x.dtype), np.ones((m, 1), np.float32)
    for i in range(start, end):
        if not 0 <= indices[i] < t:
            continue
        out[i] = x[indices[i]]
        if scale is not None:
            scales[i] = scale[indices[i]] * (1 if weights is None else weights[i])
        elif weights is not None:
            out[i] = (x[indices[i]].astype(np.float32) * weights[i]).astype(x.dtype)
    return out, scales
