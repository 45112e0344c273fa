"""The weight gradient on TPU: out[b, e] = sum over rows r of group e of lhs[r]^T dout[r].

    lhs [*bl, m, k], dout [*bd, m, n], starts, ends int32 [*bs, g]  ->  out [*B, g, k, n]

(or [*B, g, n, k]). Both operands are quantized here, one scale per (row block x channel); the row
blocks of a group count from its first row, wherever that lies.

With the output seen as [p, q] = sum of a[r]^T b[r], (a, b) = (lhs, dout), or (dout, lhs) for the
transposed one, the kernel knows two *roles*: the resident operand R (the narrower one, in tiles of
``tr`` columns) and the streamed operand S (tiles of ``ts``). A *visit* is one row block of one
output tile; visits follow each other as

    unit u = (batch, group)  >  R tile  >  S tile  >  row block j

and are the whole (dynamic) grid, their coordinates in SMEM tables. An empty group has one visit
per output tile, which writes zeros and fetches nothing. Visit v quantizes its windows into slabs in
VMEM and multiplies the slabs of visit v - 1.

tgmm_tiles.py chooses the tiles, tgmm_blocks.py says which rows a visit has, tgmm_windows.py
quantizes them, tgmm_kernel.py is the kernel.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, flat_map, round_up
from fp8moe_prims.lowering.tpu.tgmm_blocks import (
    DIRECT,
    NOTHING,
    TAKE,
    TILE_SHIFT,
    Config,
    Side,
    merged,
    row_block,
)
from fp8moe_prims.lowering.tpu.tgmm_kernel import kernel
from fp8moe_prims.lowering.tpu.tgmm_tiles import ALIGN, MAX_TABLE, Problem, Tiles, choose_tiles

_I32 = np.int32


# --------------------------------------------------------------------------------------- tables
def make_tables(starts, ends, tiles: Tiles, n_s: int, n_r: int, limit: int):
    """The visits of units with rows [starts, ends), int32 [units] each.

    Returns the number of visits (fewer than limit) and the tables, int32 [limit] each: the unit;
    code = (R tile * n_s + S tile) << TILE_SHIFT | row block; the slot of the R ring; the last visit
    up to here that fetches an S window, where the pipeline stays while nothing new is needed; the
    visit whose R window is there; and what the visit does with R, see tgmm_kernel.py.
    """
    rows = jnp.maximum(ends - starts, _I32(0))
    blocks = (rows + _I32(tiles.block - 1)) // _I32(tiles.block)  # [units]
    blocks = jnp.where(merged(tiles, rows), _I32(1), blocks)
    steps = jnp.maximum(blocks, _I32(1))
    last = jnp.cumsum(steps * _I32(n_s * n_r), dtype=np.int32)
    cached = blocks <= _I32(tiles.slots)
    writes = blocks * jnp.where(cached, _I32(n_r), _I32(n_r * n_s))
    used = jnp.cumsum(writes, dtype=np.int32) - writes
    v = lax.iota(np.int32, limit)
    unit = jnp.searchsorted(last, v, side="right", method="scan_unrolled").astype(np.int32)
    unit = jnp.minimum(unit, _I32(starts.shape[0] - 1))
    take = lambda x: jnp.take(x, unit, axis=0, mode="clip")
    local = v - take(last - steps * _I32(n_s * n_r))
    step = take(steps)
    tile, j = local // step, local % step
    s_tile, r_tile = tile % _I32(n_s), tile // _I32(n_s)
    total = jnp.minimum(last[-1], _I32(limit - 1))
    real = (take(blocks) > _I32(0)) & (v < total)
    fresh = real & ((s_tile == _I32(0)) | ~take(cached))
    slot = jnp.where(take(cached), r_tile * step + j, local) + take(used)
    hold_s = lax.cummax(jnp.where(real, v, _I32(0)))
    # A pass (unit, R tile) stages the first row block of the next one, which begins at ``after``.
    begins = real & (s_tile == _I32(0)) & (j == _I32(0))
    far = _I32(limit)
    after = lax.cummin(jnp.where(begins, v, far), reverse=True)
    after = jnp.concatenate([after[1:], jnp.full((1,), far)])
    stages = real & take(cached) & (after < far) & _I32(n_s > 1).astype(bool)
    staging = stages & (s_tile > _I32(0))
    staged = lax.cummax(jnp.where(staging, after, _I32(-1)))
    task = jnp.where(fresh, _I32(DIRECT), _I32(NOTHING))
    task = jnp.where(begins & (staged == v), _I32(TAKE), task)
    hold_r = jnp.where(task == _I32(DIRECT), v, jnp.where(staging, after, _I32(0)))
    code = (tile << _I32(TILE_SHIFT)) | j
    return total, (unit, code, slot % _I32(tiles.slots), hold_s, lax.cummax(hold_r), task)


# ----------------------------------------------------------------------------------------- call
def _scratch(c: Config):
    """name -> VMEM buffer, see tgmm_kernel.py."""
    tiles, shapes = c.tiles, {}
    for side in (c.a, c.b):
        role = side.resident
        depth, width = (tiles.slots, tiles.tr) if role else (2, tiles.ts)
        scale = (2, width, LANES) if side.is_a else (2, 1, width)
        shapes["slab", role] = pltpu.VMEM((depth, tiles.rows, width), side.slab)
        if role:
            shapes["stage"] = pltpu.VMEM((tiles.rows, width), side.slab)
        if side.scaled:
            shapes["inverse", role] = pltpu.VMEM((2, 1, width), jnp.float32)
            shapes["scale", role] = pltpu.VMEM((depth, *scale), jnp.float32)
            if role:
                shapes["stage_scale"] = pltpu.VMEM(scale, jnp.float32)
    if c.several and np.dtype(c.out_dtype) != np.float32:
        shapes["acc"] = pltpu.VMEM((tiles.tp, tiles.tq), jnp.float32)
    return shapes


def _call(
    c: Config, blocks, starts, ends, maps, *, lhs, dout, lhs_scale, transpose, expected, interpret
):
    """One pallas_call: [units, p, q].

    Args:
      c: the configuration.
      blocks: row blocks of all units (an empty one counts), at most.
      starts, ends: int32 [units].
      maps: which batch element of lhs, of dout and of lhs_scale serves a unit: int32 [units] each.
      lhs, dout, lhs_scale: [bl, m, k], [bd, m, n], and [bs, 1, m] or None.
      transpose: whether the output is [.., n, k].
      expected: rows for the cost estimate.
      interpret: passed to pallas_call.
    """
    units = starts.shape[0]
    tiles = c.tiles
    a, b = (dout, lhs) if transpose else (lhs, dout)
    lhs_is_a = not transpose
    rows_p, cols_q = a.shape[-1], b.shape[-1]
    s, r = (a, b) if tiles.resident_b else (b, a)
    n_s, n_r = -(-s.shape[-1] // tiles.ts), -(-r.shape[-1] // tiles.tr)
    limit = n_s * n_r * blocks + 1  # the last step multiplies only
    visits, tables = make_tables(starts, ends, tiles, n_s, n_r, limit)
    lhs_map, dout_map, scale_map = maps
    lhs_resident = lhs_is_a != tiles.resident_b
    window = tiles.window

    def columns(role, tile):
        """First window strip of a tile, and how far right of it the tile's columns begin.

        The last window ends with the array, so that it may start before its tile does.
        """
        array, width = (r, tiles.tr) if role else (s, tiles.ts)
        last = -(-array.shape[2] // LANES) - width // LANES
        start = tile * _I32(width // LANES)
        strip = jnp.minimum(start, _I32(last))
        return strip, (start - strip) * _I32(LANES)

    def tile_of(role, code):
        tile = code >> _I32(TILE_SHIFT)
        return tile // _I32(n_s) if role else tile % _I32(n_s)

    def fetch(role, v, refs):
        """Unit, tile of the role, and first 32-row tile of the window in VMEM at visit v."""
        unit, code, _, hold_s, hold_r, _, starts, ends = refs[:8]
        w = (hold_r if role else hold_s)[v]
        return unit[w], tile_of(role, code[w]), row_block(c, unit[w], code[w], starts, ends).base

    def operand_spec(role, array):
        width = tiles.tr if role else tiles.ts
        table = 8 if role == lhs_resident else 9
        # Within the padding that the layout in HBM has anyway; more would be a copy outside.
        row_pad = -array.shape[1] % ALIGN
        col_pad = -array.shape[2] % LANES

        def index(v, *refs):
            unit, tile, base = fetch(role, v, refs)
            return refs[table][unit], base * _I32(ALIGN), columns(role, tile)[0] * _I32(LANES)

        return pl.BlockSpec(
            (None, pl.Element(window, (0, row_pad)), pl.Element(width, (0, col_pad))), index
        )

    def out_index(v, *refs):
        w = jnp.maximum(v - _I32(1), _I32(0))
        s_tile, r_tile = tile_of(False, refs[1][w]), tile_of(True, refs[1][w])
        return (refs[0][w],) + ((s_tile, r_tile) if tiles.resident_b else (r_tile, s_tile))

    specs = {False: operand_spec(False, s), True: operand_spec(True, r)}
    arrays = {False: s, True: r}
    if lhs_scale is not None:
        # Lanes [128 * (base // 4), + lanes) cover the window wherever its 32-row tile is.
        lanes = round_up(window, LANES) + LANES
        total = round_up(c.m, LANES) + 2 * LANES
        arrays["rowscale"] = jnp.pad(lhs_scale, ((0, 0), (0, 0), (0, total - c.m)))

        def scale_index(v, *refs):
            unit, _, base = fetch(not lhs_resident, v, refs)
            return refs[10][unit], _I32(0), (base >> _I32(2)) * _I32(LANES)

        specs["rowscale"] = pl.BlockSpec((None, pl.Element(1), pl.Element(lanes)), scale_index)
    keys = list(specs)

    scratch_shapes = _scratch(c)
    if lhs_scale is not None:
        scratch_shapes["rowscale"] = pltpu.VMEM((lanes, LANES), jnp.float32)
    names = list(scratch_shapes)

    scalars = (*tables, starts, ends, lhs_map, dout_map, scale_map)

    shifts = {
        role: lambda code, role=role: columns(role, tile_of(role, code))[1]
        for role in (True, False)
    }

    def body(*refs):
        prefetch, refs = refs[: len(scalars)], refs[len(scalars) :]
        operands = dict(zip(keys, refs[: len(keys)], strict=True))
        out = refs[len(keys)]
        absent = dict.fromkeys(
            [(name, role) for name in ("scale", "inverse") for role in (True, False)]
            + ["stage_scale", "acc", "rowscale"]
        )
        scratch = absent | dict(zip(names, refs[len(keys) + 1 :], strict=True))
        kernel(c, shifts, prefetch, operands, out, scratch)

    item = np.dtype(c.out_dtype).itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((units, rows_p, cols_q), c.out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(visits + _I32(1),),
            in_specs=[specs[key] for key in keys],
            out_specs=pl.BlockSpec((None, tiles.tp, tiles.tq), out_index),
            scratch_shapes=list(scratch_shapes.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=c.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * expected * rows_p * cols_q,
            bytes_accessed=expected * (rows_p * a.dtype.itemsize + cols_q * b.dtype.itemsize)
            + units * rows_p * cols_q * item,
            transcendentals=0,
        ),
        name="fp8moe_tgmm_quant",
        interpret=interpret,
    )(*scalars, *(arrays[key] for key in keys))


def _halves(x, p, chip, interpret):
    """The call in two, for shorter tables. A column of lhs or dout knows nothing of the others."""
    k, n = x.lhs.shape[-1], x.dout.shape[-1]
    name, width = ("lhs", k) if k > n else ("dout", n)
    half = round_up(width, 2 * LANES) // 2
    operands = {key: getattr(x, key) for key in ("lhs", "lhs_scale", "dout", "starts", "ends")}
    parts = []
    for columns in (slice(half), slice(half, None)):
        part = types.SimpleNamespace(**operands | {name: operands[name][..., columns]})
        parts.append(tgmm_quant(part, p, chip=chip, interpret=interpret))
    return jnp.concatenate(parts, axis=-2 if (name == "lhs") != p.transpose_out else -1)


def tgmm_quant(x, p, *, chip: Chip, interpret=False) -> jax.Array:
    """The grouped product of two quantized operands: [*B, g, k, n], or [*B, g, n, k].

    Args:
      x: operands: lhs [*bl, m, k], lhs_scale None | f32 [*bl, m | 1, 1], dout [*bd, m, n],
        starts, ends int32 [*bs, g].
      p: parameters: lhs_dtype, dout_dtype, dout_bound, block_m, out_dtype, transpose_out,
        expected_rows.
      chip: the target chip.
      interpret: passed to pallas_call.
    """
    lhs, dout = x.lhs, x.dout
    m, k = lhs.shape[-2:]
    n, g = dout.shape[-1], x.starts.shape[-1]
    batch = np.broadcast_shapes(
        lhs.shape[:-2],
        dout.shape[:-2],
        x.starts.shape[:-1],
        x.ends.shape[:-1],
        () if x.lhs_scale is None else x.lhs_scale.shape[:-2],
    )
    out_dtype = np.dtype(p.out_dtype)
    out_shape = (*batch, g) + ((n, k) if p.transpose_out else (k, n))
    if math.prod(out_shape) == 0 or m == 0:
        return jnp.zeros(out_shape, out_dtype)

    # Mosaic has no float16; float32 holds it exactly.
    lhs, dout = (y.astype(jnp.float32) if y.dtype == np.float16 else y for y in (lhs, dout))
    flat = lambda y: y.reshape(-1, *y.shape[-2:])  # batch dims only: no copy
    units = math.prod(batch) * g
    starts, ends = (
        jnp.broadcast_to(y, (*batch, g)).reshape(units).astype(np.int32) for y in (x.starts, x.ends)
    )
    lhs_map, dout_map = flat_map(lhs.shape[:-2], batch), flat_map(dout.shape[:-2], batch)
    scale, scale_map = None, np.zeros_like(lhs_map)
    if x.lhs_scale is not None:
        scale_map = flat_map(x.lhs_scale.shape[:-2], batch)
        scale = flat(x.lhs_scale).astype(jnp.float32)
        scale = jnp.broadcast_to(scale, (scale.shape[0], m, 1)).reshape(-1, 1, m)
    maps = [jnp.asarray(np.repeat(y, g)) for y in (lhs_map, dout_map, scale_map)]
    lhs, dout = flat(lhs), flat(dout)

    qdtypes = [None if d is None else numerics.QDTYPES[d] for d in (p.lhs_dtype, p.dout_dtype)]
    plain = [lhs.dtype, dout.dtype if scale is None else np.dtype(np.float32)]
    slabs = dots.dot_dtypes(*(q or d for q, d in zip(qdtypes, plain, strict=True)), chip)
    lhs_side = dict(qdtype=qdtypes[0], bound=None, slab=slabs[0], rowscale=False)
    dout_side = dict(
        qdtype=qdtypes[1],
        bound=p.dout_bound if qdtypes[1] is not None else None,
        slab=slabs[1],
        rowscale=scale is not None,
    )
    sides = (dout_side, lhs_side) if p.transpose_out else (lhs_side, dout_side)
    arrays = (dout, lhs) if p.transpose_out else (lhs, dout)
    scales = tuple(s["qdtype"] is not None and s["bound"] is None for s in sides)
    rows = m * math.prod(batch) if p.expected_rows is None else int(p.expected_rows)
    problem = Problem(
        m=m,
        p=arrays[0].shape[-1],
        q=arrays[1].shape[-1],
        groups=units,
        block_m=p.block_m if any(scales) else None,
        a_bytes=arrays[0].dtype.itemsize,
        b_bytes=arrays[1].dtype.itemsize,
        slab_bytes=np.dtype(slabs[0]).itemsize,
        out_dtype=out_dtype,
        rows=rows,
        scales=scales,
        batches=math.prod(batch),
    )
    tiles = choose_tiles(problem, chip)
    if tiles is None:
        raise NotImplementedError(
            f"tgmm_quant: block_m={p.block_m} with k={k}, n={n} does not fit the VMEM of "
            f"{chip.name}; use a smaller block_m."
        )
    a, b = (
        Side(**s, is_a=i == 0, resident=tiles.resident_b == (i == 1)) for i, s in enumerate(sides)
    )
    s_width = arrays[0 if tiles.resident_b else 1].shape[-1]
    c = Config(m, tiles, a, b, out_dtype, chip, -(-s_width // tiles.ts))

    # All batch elements in one call; one after the other where its tables would be too long.
    blocks = m // tiles.block + g  # row blocks of one batch element, at most
    p_width, q_width = (y.shape[-1] for y in arrays)
    tile_count = -(-p_width // tiles.tp) * -(-q_width // tiles.tq)
    count = math.prod(batch)
    length = blocks * tile_count + g  # of the tables of one batch element
    if tile_count > 1 and length > MAX_TABLE:
        return _halves(x, p, chip, interpret)
    call = functools.partial(
        _call,
        c,
        lhs=lhs,
        dout=dout,
        lhs_scale=scale,
        transpose=p.transpose_out,
        interpret=interpret,
    )
    if count == 1 or count * length <= MAX_TABLE:
        out = call(count * blocks, starts, ends, maps, expected=rows)
    else:
        each = [y.reshape(count, g) for y in (starts, ends, *maps)]
        out = lax.map(
            lambda y: call(blocks, y[0], y[1], y[2:], expected=rows // count), tuple(each)
        )
    return out.reshape(out_shape)
