"""ragged_glu, and its derivatives, on a TPU core: one pass over the tiles that hold valid rows.

Grid: (batch, tiles of tm rows). With an undefined tail the number of tiles is a run-time value,
that of the batch element with the most, and the tiles of an element count from its first; one that
has fewer repeats its last, which moves no data. With a zero tail all tiles are visited, and those
with no valid row read the block they have.

A tile is float32 inside: the row function, then the select of the valid rows, then one absmax and
one rounding per row if the result is quantized. SMEM holds start, end, first and last tile of each
batch element. Bound by HBM: a bf16 [m, 2f] in and an fp8 [m, f] out are 5f bytes a row, some three
vector operations each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import flat_map

_I = np.int32


def ragged_glu(x, p, *, chip: Chip, interpret=False):
    """RaggedGluOperands, RaggedGluParams -> [out] or [out, scale]."""
    xs = [v for v in x[2:] if v is not None]
    m = xs[0].shape[-2]
    batch = np.broadcast_shapes(x.start.shape, *(v.shape[:-2] for v in xs))
    size = int(np.prod(batch))
    dtype = p.out_dtype if p.qdtype is None else numerics.QDTYPES[p.qdtype]
    shapes = [((*batch, m, p.fn.out_width), dtype)]
    shapes += [] if p.qdtype is None else [((*batch, m, 1), np.dtype(np.float32))]
    if m == 0 or size == 0:
        return [jnp.zeros(*s) for s in shapes]

    widths = [v.shape[-1] for v in xs]
    tm = choose_rows(m, widths, [v.dtype for v in xs], p.fn.out_width, dtype, chip)
    tiles = -(-m // tm)
    start, end = (jnp.broadcast_to(v, batch).reshape(-1) for v in (x.start, x.end))
    first = jnp.minimum(lax.div(start, _I(tm)), _I(tiles - 1))
    last = jnp.maximum(lax.div(jnp.maximum(end, _I(1)) - _I(1), _I(tm)), first)
    table = jnp.stack([start, end, first, last])  # [4, size]
    whole = p.tail == "zero"
    steps = _I(tiles) if whole else jnp.max(last - first + _I(1))
    maps = [np.asarray(flat_map(v.shape[:-2], batch)) for v in xs]

    def source(own, b, i, table, *maps):
        tile = i if whole else table[2, b] + i
        return maps[own][b], jnp.clip(tile, table[2, b], table[3, b]), _I(0)

    def target(b, i, table, *maps):
        del maps
        return b, i if whole else jnp.minimum(table[2, b] + i, table[3, b]), _I(0)

    row_bytes = sum(w * v.dtype.itemsize for w, v in zip(widths, xs, strict=True))
    row_bytes += p.fn.out_width * dtype.itemsize
    rows = size * m if p.expected_rows is None else p.expected_rows
    out = pl.pallas_call(
        functools.partial(_kernel, p=p, count=len(xs), tm=tm, whole=whole),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(xs),
            grid=(size, steps),
            in_specs=[
                pl.BlockSpec((None, tm, w), functools.partial(source, own))
                for own, w in enumerate(widths)
            ],
            out_specs=[pl.BlockSpec((None, tm, s[-1]), target) for s, _ in shapes],
        ),
        out_shape=[jax.ShapeDtypeStruct((size, *s[-2:]), t) for s, t in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=12 * rows * p.fn.out_width,
            transcendentals=rows * p.fn.out_width,
            bytes_accessed=rows * row_bytes,
        ),
        interpret=interpret,
        name="fp8moe_ragged_glu",
    )(table, *map(jnp.asarray, maps), *(v.reshape(-1, m, v.shape[-1]) for v in xs))
    return [o.reshape(s) for o, (s, _) in zip(out, shapes, strict=True)]


def choose_rows(m, widths, dtypes, out_width, out_dtype, chip: Chip) -> int:
    """Rows of a tile: a multiple of 32 (or all m) whose blocks and float32 values fit VMEM.

    Blocks are there twice, and the compiler keeps some three float32 copies of a row's operands.
    """
    lanes = lambda w: -(-w // 128) * 128
    cost = lambda w, t: lanes(w) * (2 * np.dtype(t).itemsize + 12)
    row = sum(map(cost, widths, dtypes)) + cost(out_width, out_dtype) + 2 * 4 * 128
    fit = max(32, int(0.8 * chip.vmem_bytes) // row // 32 * 32)
    return m if m <= min(fit, 512) else min(fit, 512)


def _kernel(table, *refs, p, count, tm, whole):
    refs = refs[count:]  # the batch maps are for the index maps
    ins, outs = refs[:count], refs[count:]
    b, i = pl.program_id(0), pl.program_id(1)
    start, end = table[0, b], table[1, b]
    tile = i if whole else jnp.minimum(table[2, b] + i, table[3, b])
    any_row = (tile * _I(tm) < end) & ((tile + _I(1)) * _I(tm) > start) & (start < end)

    @pl.when(any_row)
    def _():
        value = p.fn(*(r[...].astype(jnp.float32) for r in ins))
        rows = tile * _I(tm) + lax.broadcasted_iota(jnp.int32, value.shape, 0)
        value = jnp.where((rows >= start) & (rows < end), value, np.float32(0))
        if p.qdtype is None:
            outs[0][...] = value.astype(p.out_dtype)
            return
        dtype = numerics.QDTYPES[p.qdtype]
        absmax = jnp.max(jnp.abs(value), axis=1, keepdims=True)
        outs[0][...] = numerics.round_to(value * numerics.block_inverse(absmax, dtype), dtype)
        outs[1][...] = numerics.block_scale(absmax, dtype)

    if whole:

        @pl.when(jnp.logical_not(any_row))
        def _():
            outs[0][...] = jnp.zeros(outs[0].shape, outs[0].dtype)
            for scale in outs[1:]:
                scale[...] = jnp.ones(scale.shape, scale.dtype)
