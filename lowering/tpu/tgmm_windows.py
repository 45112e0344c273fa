"""From windows to slabs, in the tgmm_quant kernel: rows of others removed, the rest quantized.

A strip is 128 or 256 columns of a window. `measure` finds its scales, `write` quantizes it, both as
lists of tasks, which the kernel spreads over a product's steps.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots, layout
from fp8moe_prims.lowering.tpu.layout import LANES, loop_from
from fp8moe_prims.lowering.tpu.tgmm_blocks import Block, Config, Side
from fp8moe_prims.lowering.tpu.tgmm_tiles import ALIGN, SHORT, TAIL

_I32 = np.int32
# Rows that are quantized at a time. With more, the compiler keeps more than its registers hold, and
# the tasks do not spread evenly over a product's steps.
_ROWS = 32


def _row_mask(low, high, itemsize: int):
    """int32 [8 * itemsize, 128]: all ones in the bytes of the rows [low, high) of a 32-row tile."""
    per = 4 // itemsize  # rows in a 32-bit word
    word = lax.broadcasted_iota(jnp.int32, (ALIGN // per, LANES), 0) * _I32(per)
    mask = jnp.zeros((ALIGN // per, LANES), jnp.int32)
    for i in range(per):
        bits = np.uint32((2 ** (8 * itemsize) - 1) << (8 * itemsize * i)).astype(np.int32)
        row = word + _I32(i)
        mask = mask | jnp.where((row >= low) & (row < high), bits, _I32(0))
    return mask


def clean(c: Config, window, block: Block, start=0):
    """Shapes a full block's window [window, t] in place, see the module docstring.

    ``start``: the window's first row in the ref, a multiple of 32.
    """
    size, fold = c.tiles.block, c.tiles.window - c.tiles.block
    itemsize = np.dtype(window.dtype).itemsize
    low, high = block.low, block.low + block.count
    end = high + block.tail

    def at(tile, column):
        rows = pl.ds(pl.multiple_of(start + tile * _I32(ALIGN), ALIGN), ALIGN)
        return rows, slice(column, column + LANES)

    def get(tile, column):
        return pltpu.bitcast(window[at(tile, column)], jnp.int32)

    def put(tile, column, x):
        window[at(tile, column)] = pltpu.bitcast(x, window.dtype)

    columns = range(0, window.shape[-1], LANES)

    def keep(tile, low, high):
        mask = _row_mask(low - tile * _I32(ALIGN), high - tile * _I32(ALIGN), itemsize)
        for column in columns:
            put(tile, column, get(tile, column) & mask)

    def folded(tile):
        row = tile * _I32(ALIGN)
        here = _row_mask(low - row, high - row, itemsize)
        there = _row_mask(low - row - _I32(size), high - row - _I32(size), itemsize)
        other = tile + _I32(size // ALIGN)
        for column in columns:
            x = get(tile, column) & here
            put(tile, column, x | (get(other, column) & there))

    tiles, folds = _I32(size // ALIGN), _I32(fold // ALIGN)
    first = _I32(0)
    if fold:
        first = jnp.where(low >= _I32(ALIGN), folds, _I32(1))
        loop_from(0, first, folded)
        if c.tiles.tail:
            upper = jnp.where(block.tail > _I32(0), tiles + folds, _I32(0))
            loop_from(tiles, upper, lambda tile: keep(tile, high, end))
    last_low = jnp.minimum((low >> _I32(5)) + _I32(1), tiles)
    loop_from(first, last_low, lambda tile: keep(tile, low, high))
    loop_from(jnp.maximum(first, high >> _I32(5)), tiles, lambda tile: keep(tile, low, high))


def _top(c: Config, side: Side, load, row, count):
    """[8 or 16, columns]: the largest magnitudes of the rows [row, row + count), by sublane."""
    as_it_is = c.chip.bf16_vector and side.dtype == jnp.bfloat16 and not side.rowscale
    x = load(row, count, as_it_is)
    step = 16 if x.dtype == jnp.bfloat16 else 8
    return layout.tree_max([jnp.abs(x[i : i + step]) for i in range(0, count, step)])


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the rows of a role come from, at one visit.

    Attributes:
      side: the operand.
      window: ref [window, t].
      rowscale: ref [lanes, 128], equal in all lanes, and its row for window row 0; or None.
      block: the row block in the window.
      shift: the first of the window's columns that belongs to the tile.
    """

    side: Side
    window: object
    rowscale: object
    block: Block
    shift: object


def _loader(source: Source, column, keep=None):
    """load(row, count, as_it_is) of a strip: float32 times the row scales, or what the window has.

    ``keep``: window rows [low, high), others are zeros.
    """
    side, window = source.side, source.window

    def load(row, count, as_it_is):
        if not isinstance(row, int):
            row = pl.multiple_of(row, ALIGN)
        x = window[pl.ds(row, count), pl.ds(column, side.strip)]
        row = _I32(row) if isinstance(row, int) else row
        if as_it_is:
            return x if keep is None else _keep_rows(x, row, keep)
        x = x.astype(jnp.float32)
        if side.rowscale:
            ref, start = source.rowscale
            factor = ref[pl.ds(pl.multiple_of(start + row, ALIGN), count), :]
            x = x * jnp.concatenate([factor] * (side.strip // LANES), axis=1)
        if keep is None:
            return x
        index = lax.broadcasted_iota(jnp.int32, x.shape, 0) + row
        return jnp.where((index >= keep[0]) & (index < keep[1]), x, np.float32(0))

    return load


def _keep_rows(x, row, keep):
    """x, window rows from ``row``, with zeros where they are not in [low, high)."""
    low, high = (bound - row for bound in keep)
    starts = [_I32(r) for r in range(0, x.shape[0], ALIGN)]
    masks = [_row_mask(low - r, high - r, x.dtype.itemsize) for r in starts]
    mask = jnp.concatenate([jnp.concatenate(masks, axis=0)] * (x.shape[1] // LANES), axis=1)
    return pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & mask, x.dtype)


def _columns(source: Source, i):
    """First column of strip i in the slab and in the window."""
    column = pl.multiple_of(i * _I32(source.side.strip), source.side.strip)
    width = source.window.shape[-1]
    other = jnp.minimum(column + source.shift, _I32(width - source.side.strip))
    return column, pl.multiple_of(other, LANES)


def _pieces(side: Side, first, rows):
    """[(first row, rows)] that are quantized by one task."""
    size = LANES if side.turned else _ROWS
    return [(r, min(size, first + rows - r)) for r in range(first, first + rows, size)]


def full_rows(c: Config, source: Source, other):
    """[(index of the scale, load, [(first row, rows)])] of a clean window's strip."""
    return [(0, _loader(source, other), _pieces(source.side, 0, c.tiles.block))]


def tail_rows(c: Config, source: Source, other):
    """The same of the short block after a full one."""
    return [(1, _loader(source, other), _pieces(source.side, c.tiles.block, TAIL))]


def short_rows(c: Config, source: Source, other):
    """The same of a short block, for 256 rows of the slab."""
    block = source.block
    offset = jnp.minimum(block.low >> _I32(5), _I32((c.tiles.window - SHORT) // ALIGN))
    offset = offset * _I32(ALIGN)
    inner = _loader(source, other, (block.low, block.low + block.count))
    load = lambda row, count, as_it_is: inner(offset + _I32(row), count, as_it_is)
    return [(0, load, [(0, SHORT // 2), (SHORT // 2, SHORT // 2)])]


def masked_rows(c: Config, source: Source, other):
    """The same of a full block in a window that is not clean."""
    block, size = source.block, c.tiles.block
    fold, high = c.tiles.window - size, block.low + block.count
    full = _loader(source, other, (block.low, high))

    def main(row, count, as_it_is):
        x = full(row, count, as_it_is)
        if row >= fold:
            return x
        # One of the two is zero in each row.
        bits = [pltpu.bitcast(y, jnp.int32) for y in (x, full(row + size, count, as_it_is))]
        return pltpu.bitcast(bits[0] | bits[1], x.dtype)

    tail = _loader(source, other, (high, high + block.tail))
    rows = [(0, fold)] if fold else []
    rows += [(r, min(LANES, size - r)) for r in range(fold, size, LANES)]
    return [(0, main, rows)] + ([(1, tail, [(size, TAIL)])] if c.tiles.tail else [])


def measure(c: Config, source: Source, rows_of, scales, inverse):
    """tasks(i): what finds the scales of strip i of a window, and their inverses for `write`.

    Two lists: the second one stores them, best when the scales of a product have been read that
    runs beside: the compiler does not see that those are others.

    Args:
      rows_of: which rows there are, one of the functions above.
      scales: ref [2, t, 128] for the operand a, [2, 1, t] for b.
      inverse: ref [2, 1, t].
    """
    side = source.side

    def piece(load, row, count, tops):
        x = _top(c, side, load, row, count)
        tops[:] = [jnp.maximum(tops[0], x) if tops else x]

    def finish(part, column, tops):
        absmax = jnp.max(tops[0].astype(jnp.float32), axis=0, keepdims=True)
        value = numerics.block_scale(absmax, side.qdtype)
        columns = pl.ds(column, side.strip)
        inverse[part, :, columns] = numerics.block_inverse(absmax, side.qdtype)
        if side.is_a:
            for lane in range(0, side.strip, LANES):
                at = pl.ds(column + _I32(lane), LANES)
                scales[part, at, :] = layout.as_column(value[:, lane : lane + LANES])
        else:
            scales[part, :, columns] = value

    def tasks(i):
        column, other = _columns(source, i)
        pieces, last = [], []
        for part, load, rows in rows_of(c, source, other):
            tops = []
            for row, count in rows:
                pieces.append(functools.partial(piece, load, row, count, tops))
            last.append(functools.partial(finish, part, column, tops))
        return pieces, last

    return tasks


def write(c: Config, source: Source, rows_of, slab, inverse):
    """tasks(i): what quantizes strip i of a window into a slab [rows, t], or [t, rows].

    Two lists as of `measure`, the second one empty.
    """
    side = source.side
    as_it_is = side.qdtype is None and not side.rowscale
    as_it_is = as_it_is and side.slab in (side.dtype, dots.E4M3B11)

    def quantized(x, part, columns):
        if side.scaled:
            x = x * inverse[part, :, columns]
        elif side.qdtype is not None:
            fixed = numerics.fixed_scale(side.bound, side.qdtype)
            x = x * (np.float32(1.0) / fixed)
        if side.qdtype is not None:
            return dots.quantized(x, side.qdtype, side.slab, side.scaled)
        return x.astype(side.slab)

    def piece(column, part, load, row, count):
        rows, columns = pl.ds(row, count), pl.ds(column, side.strip)
        if as_it_is:
            x = dots.widen(load(row, count, True), side.slab)
        else:
            few = [(r, min(_ROWS, count)) for r in range(row, row + count, _ROWS)]
            x = [quantized(load(*r, False), part, columns) for r in few]
            x = jnp.concatenate(x, axis=0) if len(x) > 1 else x[0]
        if side.turned:
            slab[columns, rows] = x.T
        else:
            slab[rows, columns] = x

    def tasks(i):
        column, other = _columns(source, i)
        pieces = [
            functools.partial(piece, column, part, load, row, count)
            for part, load, rows in rows_of(c, source, other)
            for row, count in rows
        ]
        return pieces, []

    return tasks
