"""Dispatch on TPU: out[b, i] = x[b, indices[b, i]] (* weights[b, i]) for the rows [start, end).

    x [*bx, t, d], indices int32 [*bi, m], start, end int32 [*bs]  ->  out [*B, m, d]

How a row of x is fetched (see rows.py), in bytes per d columns of ``item`` bytes each, where t rows
of x become the n valid rows of the output, which are then written once, item * n:

    row words  item * (2 t + n)      always possible; a row scale travels in 512 bytes more
    direct     4 n                   16- and 32-bit rows, d a multiple of 128, t of 8, no row scale

The cheaper one is taken: direct for float32 always, for 16 bits while n <= 2 t (all tokens gathered
over many devices, say), row words where a token goes to several rows here, and for 8 bits.

On request, and where the chip has them, the SparseCores fetch the rows: see sparse_core.py. What
follows is the default.

The grid is (B, tiles), tiles of ``tile`` rows of the output: all of them where the tail is zeroed,
else as many as the longest range covers. A step

    starts a copy per row of the next tile into the other half of the buffer,
    waits for its own rows,
    and moves them from words into the standard layout: out block [tile, d].

Rows without a source (a bad index, or outside the range in the first and last tile) are written as
zeros (scale 1) into the buffer. On v7x with d = 7168 and float8, a row takes 5 cycles of scalar
work to start its copy and 3 of vector work; HBM takes 9.

    index      SMEM int32 [1, 1, tile + 1]   of this tile and of the next one: the source row, or
                                             -1 for none; last, the number of copies
    buffer     [2 * tile slots]              rows as fetched, half for even and half for odd steps
    weights    [1, 1, tile]                  along lanes, 1 for the rows without a source; turned
                                             into a column [tile, 128] in scratch, as are
    shifts     [1, 1, tile]                  what picks a direct 16-bit row from its pair
    scale out  [1, 1, tile]                  float32, along lanes
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import rows, sparse_core
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, as_column, flat_map
from fp8moe_prims.lowering.tpu.unpack import unpack_scale, unpack_tile, zero_tile

_I32 = np.int32
_UNROLL = 16  # copies started per step of their loop: scalar work bounds it


def _start_tile(w, tile, index, source, buffer, slot, semaphore):
    """Starts the copies of one tile to the slots from ``slot``; zeros where there is none."""

    def some(g, carry):
        for u in range(_UNROLL):
            r = g * _I32(_UNROLL) + _I32(u)
            row = index[0, 0, r]

            @pl.when(row >= _I32(0))
            def _copy(r=r, row=row):
                rows.start_row(w, source, row, buffer, slot + r, semaphore)

        return carry

    lax.fori_loop(_I32(0), _I32(tile // _UNROLL), some, _I32(0))

    @pl.when(index[0, 0, tile] < _I32(tile))
    def _gaps():
        def one(r, carry):
            row = index[0, 0, r]

            @pl.when(row < _I32(0))
            def _zero():
                at = (slot + r) * _I32(w.pitch)
                part = buffer.at[pl.ds(at, w.chunks)]
                part[...] = jnp.zeros_like(part)
                if w.scaled:
                    one = jnp.full((1, 1, LANES), rows.ONE_BITS, jnp.int32)
                    buffer[pl.ds(at + _I32(w.chunks), 1)] = one

            return carry

        lax.fori_loop(_I32(0), _I32(tile), one, _I32(0))


def ragged_gather(x, p, *, chip: Chip, interpret=False) -> list[jax.Array]:
    """[out [*B, m, d]], and the scale [*B, m, 1] of each row where x has row scales.

    Args:
      x: operands: x [*bx, t, d], indices int32 [*bi, m], start, end int32 [*bs], weights None |
        [*bw, m], x_scale None | float32 [*bx, t, 1].
      p: parameters: out_dtype, tail, expected_rows, sparse_core.
      chip: the target chip.
      interpret: passed to pallas_call.
    """
    *x_lead, t, d = x.x.shape
    *index_lead, m = x.indices.shape
    leads = [x_lead, index_lead, x.start.shape, x.end.shape]
    leads += [] if x.weights is None else [x.weights.shape[:-1]]
    scaled = x.x_scale is not None
    leads += [x.x_scale.shape[:-2]] if scaled else []
    batch = np.broadcast_shapes(*leads)
    size = math.prod(batch)
    out_dtype = np.dtype(p.out_dtype)
    if 0 in (size, m, t, d):
        out = [jnp.zeros((*batch, m, d), out_dtype)]
        return out + [jnp.zeros((*batch, m, 1), jnp.float32)] * scaled

    # Small things, one or two numbers a row, are brought to the full batch; x is not.
    full = lambda v, *tail: jnp.broadcast_to(v, (*batch, *tail)).reshape(size, *tail)
    start, end = (full(v.astype(jnp.int32)) for v in (x.start, x.end))
    index = full(x.indices, m).astype(jnp.int32)
    valid = (index >= _I32(0)) & (index < _I32(t))
    place = lax.broadcasted_iota(jnp.int32, (size, m), 1)
    inside = (place >= start[:, None]) & (place < end[:, None])
    index = jnp.where(inside & valid, index, _I32(-1))
    weights = None
    if x.weights is not None:
        weights = full(x.weights.astype(jnp.float32), m)
        weights = jnp.where(inside & valid, weights, np.float32(1.0))

    table = x.x.reshape(-1, t, d)
    moved = weights is None or scaled
    if moved and (interpret or table.dtype == np.float16):
        # Mosaic has no float16, and a CPU quiets signalling NaNs when it copies 16-bit floats.
        table = lax.bitcast_convert_type(table, f"int{8 * out_dtype.itemsize}")
    elif table.dtype == np.float16:
        table = table.astype(jnp.float32)  # products with weights are rounded outside
    kernel_dtype = np.dtype(table.dtype)
    scale = None
    if scaled:
        lead = x.x_scale.shape[:-2]
        joint = np.broadcast_shapes(x_lead, lead)
        if tuple(joint) != tuple(x_lead):  # a batch of scales for one x
            table = jnp.broadcast_to(table.reshape(*x_lead, t, d), (*joint, t, d)).reshape(-1, t, d)
            x_lead = joint
        scale = jnp.broadcast_to(x.x_scale, (*x_lead, t, 1)).reshape(-1, t)
    expected = size * m if p.expected_rows is None else int(p.expected_rows)
    packed_bytes = table.dtype.itemsize * (expected + 2 * table.shape[0] * t)
    direct = rows.can_be_direct(table.dtype, table.shape, scaled) and 4 * expected <= packed_bytes
    w = rows.Words(np.dtype(table.dtype), d, scaled, direct)
    move = _call
    by_lines = dataclasses.replace(w, direct=direct and w.per == 1, lines=True)
    if p.sparse_core and sparse_core.usable(by_lines, kernel_dtype, chip, interpret):
        w, move = by_lines, sparse_core.gather
    if w.direct:
        source, padded = (sparse_core.direct_lines if w.lines else rows.direct_view)(table), t
    else:
        zero = jnp.zeros((table.shape[0],), jnp.int32)
        source, padded = rows.pack(
            w, table, scale, zero, zero + _I32(t), t * table.shape[0], chip, interpret
        )
    base = flat_map(tuple(x_lead), batch) * _I32(padded)
    index = jnp.where(index < _I32(0), index, index + jnp.asarray(base)[:, None])
    outs = move(
        w, p, kernel_dtype, batch, m, source, index, weights, start, end, expected, chip, interpret
    )
    out = outs[0].reshape(*batch, m, d)
    if out.dtype != out_dtype:
        out = lax.bitcast_convert_type(out, out_dtype) if moved else out.astype(out_dtype)
    return [out, *outs[1:]]


def _call(w, p, dtype, batch, m, source, index, weights, start, end, expected, chip, interpret):
    """The kernel over flat batches: [out [B, m, d]] and the scales [B, m]."""
    size = index.shape[0]
    row_bytes = 8 * w.pitch * LANES + 2 * w.width * dtype.itemsize
    turned = weights is not None and not w.scaled
    row_bytes += LANES * 4 * (turned + w.paired)
    tile = rows.tile_of(m, row_bytes, chip, 256)
    if tile is None:
        raise rows.too_wide("ragged_gather", w.d, chip)
    lanes = max(tile, LANES)
    tiles = -(-m // tile)
    first, count = rows.tiles_of(start, end, tile)
    index = jnp.pad(index, ((0, 0), (0, tiles * tile - m)), constant_values=-1)
    index = index.reshape(size * tiles, 1, tile)
    shifts = None
    if w.paired:  # what brings the wanted half of a word to the top, along lanes
        shifts = rows.lanes_of(
            (_I32(16) - (index & _I32(1)) * _I32(16)).astype(jnp.float32).reshape(size, -1), tile
        )
    started = jnp.sum(index >= _I32(0), axis=2, keepdims=True, dtype=jnp.int32)
    index = jnp.concatenate([index, started], axis=2)
    all_tiles = p.tail == "zero"
    steps = tiles if all_tiles else jnp.maximum(jnp.max(count), _I32(1))

    def tile_at(b, i, first, count):
        """The output tile of step (b, i), and whether the range has rows there."""
        if all_tiles:
            return i, (i >= first[b]) & (i < first[b] + count[b])
        last = jnp.maximum(count[b] - _I32(1), _I32(0))
        return jnp.minimum(first[b] + jnp.minimum(i, last), _I32(tiles - 1)), i < count[b]

    def following(b, i, steps):
        ends = i + _I32(1) == steps
        return jnp.minimum(b + ends.astype(jnp.int32), _I32(size - 1)), jnp.where(
            ends, _I32(0), i + _I32(1)
        )

    def block(b, i, first, count, *_):
        return b * _I32(tiles) + tile_at(b, i, first, count)[0], _I32(0), _I32(0)

    def next_block(b, i, first, count, steps):
        return block(*following(b, i, steps[0]), first, count)

    in_specs = [
        pl.BlockSpec((1, 1, tile + 1), block, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, tile + 1), next_block, memory_space=pltpu.SMEM),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [index, index, source]
    if weights is not None:
        in_specs.append(pl.BlockSpec((1, 1, lanes), block))
        operands.append(rows.lanes_of(weights, tile))
    if shifts is not None:
        in_specs.append(pl.BlockSpec((1, 1, lanes), block))
        operands.append(shifts)
    out_shape = [jax.ShapeDtypeStruct((size, m, w.d), dtype)]
    out_specs = [
        pl.BlockSpec((None, tile, w.width), lambda b, i, *s: (b, tile_at(b, i, *s[:2])[0], _I32(0)))
    ]
    if w.scaled:
        out_shape.append(jax.ShapeDtypeStruct((size * tiles, 1, lanes), jnp.float32))
        out_specs.append(pl.BlockSpec((1, 1, lanes), block))
    scratch = [rows.buffer_shape(w, 2 * tile), pltpu.SemaphoreType.DMA((2,))]
    scratch += [pltpu.VMEM((lanes, LANES), jnp.float32)] * turned
    scratch += [pltpu.VMEM((lanes, LANES), jnp.int32)] * w.paired

    def body(first, count, steps, *refs):
        refs = list(refs)
        here, following_index, source = refs[:3]
        del refs[:3]
        weight = refs.pop(0) if weights is not None else None
        shift = refs.pop(0) if w.paired else None
        out = refs.pop(0)
        out_scale = refs.pop(0) if w.scaled else None
        buffer, semaphores = refs[:2]
        del refs[:2]
        b, i = pl.program_id(0), pl.program_id(1)
        step = b * steps[0] + i
        half = step & _I32(1)
        _, active = tile_at(b, i, first, count)
        b_next, i_next = following(b, i, steps[0])
        _, active_next = tile_at(b_next, i_next, first, count)

        def start_tile(index, half):
            _start_tile(w, tile, index, source, buffer, half * _I32(tile), semaphores.at[half])

        @pl.when((step == _I32(0)) & active)
        def _first():
            start_tile(here, half)

        @pl.when((step + _I32(1) < _I32(size) * steps[0]) & active_next)
        def _ahead():
            start_tile(following_index, _I32(1) - half)

        @pl.when(active)
        def _move():
            rows.wait_rows(w, here[0, 0, tile], tile, buffer, semaphores.at[half])
            own, base = rows.readable(w, buffer, interpret), half * _I32(tile)
            columns = {}
            for name, row in (("weight", weight if turned else None), ("shift", shift)):
                if row is not None:
                    columns[name] = refs[len(columns)]
                    for part in range(lanes // LANES):
                        at = pl.ds(part * LANES, LANES)
                        values = as_column(row[0, :, at])
                        columns[name][at, :] = values.astype(columns[name].dtype)
            unpack_tile(w, tile, dtype, own, base, out, **columns)
            if w.scaled:
                unpack_scale(w, tile, own, base, out_scale, weight)

        if all_tiles:
            pl.when(jnp.logical_not(active))(lambda: zero_tile(out, out_scale))

    outs = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(size, steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes,
            disable_bounds_checks=True,  # of each row's copy; the rows are within by construction
        ),
        cost_estimate=pl.CostEstimate(
            flops=expected * w.d if weights is not None else 0,
            bytes_accessed=expected * (w.row_bytes + w.d * dtype.itemsize),
            transcendentals=0,
        ),
        name="fp8moe_ragged_gather",
        interpret=interpret,
    )(first, count, jnp.asarray(steps, jnp.int32).reshape(1), *operands)
    outs = list(outs)
    if w.scaled:
        scale = outs[1][..., :tile].reshape(size, tiles * tile)[:, :m]
        outs[1] = scale.reshape(*batch, m, 1)
    return outs
