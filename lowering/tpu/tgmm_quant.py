"""The weight gradient on TPU: out[b, e] = sum over rows r of group e of lhs[r]^T dout[r].

    lhs [*bl, m, k], dout [*bd, m, n], starts, ends int32 [*bs, g]  ->  out [*B, g, k, n]

(or [*B, g, n, k]). Both operands are quantized here, one scale per (row block x channel); the row
blocks of a group count from its first row, wherever that lies.

With the output seen as [p, q] = sum of a[r]^T b[r], (a, b) = (lhs, dout), or (dout, lhs) for the
transposed one, the kernel knows two *roles*: the resident operand R (the narrower one, in tiles of
``tr`` columns) and the streamed operand S (tiles of ``ts``). A *visit* is one row block of one
output tile; visits follow each other as

    unit u = (batch, group)  >  R tile  >  S tile  >  row block j

and are the whole (dynamic) grid, their coordinates in SMEM tables. Where a device has two cores
and S's columns are whole tiles for both, each makes the visits of half of them, by the same tables.
An empty group has one visit per output tile, which writes zeros and fetches nothing. Visit v
quantizes its windows into slabs in VMEM and multiplies the slabs of visit v - 1.

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
from fp8moe_prims.lowering.tpu.mxu import InterpretedMxus, Mxus
from fp8moe_prims.lowering.tpu.tgmm_blocks import Config, Side, Tables, make_tables
from fp8moe_prims.lowering.tpu.tgmm_kernel import kernel
from fp8moe_prims.lowering.tpu.tgmm_tiles import (
    ALIGN,
    MAX_TABLE,
    Problem,
    choose_tiles,
    most_visits,
)

_I32 = np.int32


# ----------------------------------------------------------------------------------------- call
def _scratch(c: Config):
    """name -> VMEM buffer, see tgmm_kernel.py."""
    tiles, shapes = c.tiles, {}
    for side in (c.a, c.b):
        role = side.resident
        depth, width = (tiles.slots, tiles.tr) if role else (2, tiles.ts)
        scale = (2, width, LANES) if side.is_a else (2, 1, width)
        slab = (width, tiles.rows) if side.turned else (tiles.rows, width)
        shapes["slab", role] = pltpu.VMEM((depth, *slab), side.slab)
        if side.scaled:
            shapes["inverse", role] = pltpu.VMEM((2, 1, width), jnp.float32)
            shapes["scale", role] = pltpu.VMEM((depth, *scale), jnp.float32)
    if c.several and np.dtype(c.out_dtype) != np.float32:
        shapes["acc"] = pltpu.VMEM((tiles.tp, tiles.tq), jnp.float32)
    return shapes


def _call(
    c: Config,
    most,
    starts,
    ends,
    maps,
    *,
    batched,
    lhs,
    dout,
    lhs_scale,
    transpose,
    expected,
    interpret,
):
    """One pallas_call: [units, p, q].

    Args:
      c: the configuration.
      most: visits of all units, at most.
      starts, ends: int32 [units].
      maps: which batch element of lhs, of dout and of lhs_scale serves a unit: int32 [units] each,
        or None where it is the first for all.
      batched: whether the units are of several batch elements.
      lhs, dout, lhs_scale: [bl, m, k], [bd, m, n], and [bs, 1, m] or None.
      transpose: whether the output is [.., n, k].
      expected: rows for the cost estimate.
      interpret: passed to pallas_call.
    """
    units = starts.shape[0]
    tiles, window = c.tiles, c.tiles.window
    a, b = (dout, lhs) if transpose else (lhs, dout)
    columns = a.shape[-1], b.shape[-1]
    s, r = (a, b) if tiles.resident_b else (b, a)
    # The last step multiplies only.
    dout_resident = transpose != tiles.resident_b
    elements = None
    if batched or tiles.cores > 1:
        elements = {dout_resident: maps[1], not dout_resident: maps[0]}
    visits, tables, hold_s = make_tables(c, starts, ends, most + 1, elements)
    keys = [False, True] + ["rowscale"] * (lhs_scale is not None)
    arrays = {False: s, True: r}
    role_of = {False: False, True: True, "rowscale": dout_resident}

    # The batch element of each window; None where there is only one.
    scalars, batch_at = list(tables), {}
    for key in keys:
        resident = role_of[key]
        mapped = maps[2 if key == "rowscale" else 1 if resident == dout_resident else 0]
        if mapped is not None:
            batch_at[key] = len(scalars)
            held = tables.r_visit if resident else hold_s
            scalars.append(jnp.take(mapped, jnp.take(tables.unit, held), axis=0))

    def batch_of(key, v, refs):
        return refs[batch_at[key]][v] if key in batch_at else _I32(0)

    def operand_spec(role):
        # Within the padding that the layout in HBM has anyway; more would be a copy outside.
        row_pad = -arrays[role].shape[1] % ALIGN
        col_pad = -arrays[role].shape[2] % LANES

        def index(core, v, *refs):
            base, strip = Tables(*refs[: len(tables)]).place(role, v)
            column = strip * _I32(LANES)
            if tiles.cores > 1 and not role:
                column = column + core * _I32(c.side(False).width)
            return batch_of(role, v, refs), base * _I32(ALIGN), column

        width = c.side(role).tile
        return pl.BlockSpec(
            (None, pl.Element(window, (0, row_pad)), pl.Element(width, (0, col_pad))), index
        )

    def out_index(core, v, *refs):
        w = jnp.maximum(v - _I32(1), _I32(0))
        s_tile, r_tile = Tables(*refs[: len(tables)]).tiles_of(w)
        if tiles.cores > 1:
            s_tile = s_tile + core * _I32(c.n_s)
        return (refs[0][w],) + ((s_tile, r_tile) if tiles.resident_b else (r_tile, s_tile))

    specs = {role: operand_spec(role) for role in (False, True)}
    if lhs_scale is not None:
        # Lanes [128 * (base // 4), + lanes) cover the window wherever its 32-row tile is.
        lanes = round_up(window, LANES) + LANES
        total = round_up(c.m, LANES) + 2 * LANES
        arrays["rowscale"] = jnp.pad(lhs_scale, ((0, 0), (0, 0), (0, total - c.m)))

        def scale_index(_, v, *refs):
            base, _ = Tables(*refs[: len(tables)]).place(dout_resident, v)
            return batch_of("rowscale", v, refs), _I32(0), (base >> _I32(2)) * _I32(LANES)

        specs["rowscale"] = pl.BlockSpec((None, pl.Element(1), pl.Element(lanes)), scale_index)

    scratch_shapes = _scratch(c)
    if lhs_scale is not None:
        scratch_shapes["rowscale"] = pltpu.VMEM((lanes, LANES), jnp.float32)
    if interpret and tiles.pipelined:
        shapes = InterpretedMxus.scratch_shapes()
        scratch_shapes |= {("mxus", i): shape for i, shape in enumerate(shapes)}
    names = list(scratch_shapes)

    def body(*refs):
        prefetch, refs = refs[: len(scalars)], refs[len(scalars) :]
        operands = dict(zip(keys, refs[: len(keys)], strict=True))
        out = refs[len(keys)]
        absent = dict.fromkeys(
            [(name, role) for name in ("scale", "inverse") for role in (True, False)]
            + ["acc", "rowscale"]
        )
        scratch = absent | dict(zip(names, refs[len(keys) + 1 :], strict=True))
        mxus = [scratch[key] for key in names if key[0] == "mxus"]
        scratch["mxus"] = InterpretedMxus(*mxus) if mxus else Mxus()
        kernel(c, Tables(*prefetch[: len(tables)]), operands, out, scratch)

    item = np.dtype(c.out_dtype).itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((units, *columns), c.out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.cores, visits + _I32(1)),
            in_specs=[specs[key] for key in keys],
            out_specs=pl.BlockSpec((None, tiles.tp, tiles.tq), out_index),
            scratch_shapes=list(scratch_shapes.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=c.chip.vmem_bytes,
            disable_bounds_checks=True,  # of the windows, which `place` keeps within
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * expected * math.prod(columns),
            bytes_accessed=expected
            * (columns[0] * a.dtype.itemsize + columns[1] * b.dtype.itemsize)
            + units * math.prod(columns) * item,
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
    maps = [
        jnp.asarray(np.repeat(y, g)) if y.any() else None for y in (lhs_map, dout_map, scale_map)
    ]
    lhs, dout = flat(lhs), flat(dout)

    qdtypes = [None if d is None else numerics.QDTYPES[d] for d in (p.lhs_dtype, p.dout_dtype)]
    plain = [lhs.dtype, dout.dtype if scale is None else np.dtype(np.float32)]
    values = (q or d for q, d in zip(qdtypes, plain, strict=True))
    slabs = dots.dot_dtypes(*values, chip, [q is None for q in qdtypes])
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
        slab_bytes=max(d.itemsize for d in slabs),
        out_dtype=out_dtype,
        rows=rows,
        scales=scales,
        batches=math.prod(batch),
        mxus=chip.mxus_in_hand and all(dots.is_fp8(d) for d in slabs),
    )
    tiles = choose_tiles(problem, chip)
    if tiles is None:
        raise NotImplementedError(
            f"tgmm_quant: block_m={p.block_m} with k={k}, n={n} does not fit the VMEM of "
            f"{chip.name}; use a smaller block_m."
        )
    resident = not tiles.resident_b, tiles.resident_b
    a, b = (
        Side(
            y.dtype,
            **side,
            is_a=i == 0,
            resident=resident[i],
            width=y.shape[-1] // (1 if resident[i] else tiles.cores),
            tile=tiles.tq if i else tiles.tp,
            turned=tiles.pipelined and i == 0,
        )
        for i, (y, side) in enumerate(zip(arrays, sides, strict=True))
    )
    c = Config(m, tiles, a, b, out_dtype, chip)

    # All batch elements in one call; one after the other where its tables would be too long.
    count, most = math.prod(batch), most_visits(problem, tiles)
    if a.tiles * b.tiles > 1 and most > MAX_TABLE:
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
    if count == 1 or count * most <= MAX_TABLE:
        out = call(count * most, starts, ends, maps, batched=count > 1, expected=rows)
    else:
        each = jax.tree.map(lambda y: y.reshape(count, g), (starts, ends, *maps))
        out = lax.map(
            lambda y: call(most, y[0], y[1], y[2:], batched=False, expected=rows // count), each
        )
    return out.reshape(out_shape)
