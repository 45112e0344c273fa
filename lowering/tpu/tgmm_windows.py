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
    x = load(row, count, c.chip.bf16_vector and not side.rowscale)
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


def _loader(source: Source, column, mask=None):
    """load(row, count, narrow) of a strip, see `_strip`; ``mask(row, count)`` says what to keep."""
    side, window = source.side, source.window

    def load(row, count, narrow):
        if not isinstance(row, int):
            row = pl.multiple_of(row, ALIGN)
        x = window[pl.ds(row, count), pl.ds(column, source.side.strip)]
        if narrow and mask is None and x.dtype == jnp.bfloat16:
            return x
        x = x.astype(jnp.float32)
        if side.rowscale:
            ref, start = source.rowscale
            at = start + (_I32(row) if isinstance(row, int) else row)
            factor = ref[pl.ds(pl.multiple_of(at, ALIGN), count), :]
            x = x * jnp.concatenate([factor] * (source.side.strip // LANES), axis=1)
        return x if mask is None else jnp.where(mask(row, count), x, np.float32(0))

    return load


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
    low = block.low - offset

    def mask(row, count):
        index = lax.broadcasted_iota(jnp.int32, (count, source.side.strip), 0) + (row - offset)
        return (index >= low) & (index < low + block.count)

    inner = _loader(source, other, mask)
    load = lambda row, count, narrow: inner(offset + _I32(row), count, narrow)
    return [(0, load, [(0, SHORT // 2), (SHORT // 2, SHORT // 2)])]


def masked_rows(c: Config, source: Source, other):
    """The same of a full block in a window that is not clean."""
    block, size = source.block, c.tiles.block
    fold, high = c.tiles.window - size, block.low + block.count
    load = _loader(source, other)

    def masked(row, count, low, high):
        index = lax.broadcasted_iota(jnp.int32, (count, source.side.strip), 0) + _I32(row)
        keep = (index >= low) & (index < high)
        return jnp.where(keep, load(row, count, False), np.float32(0))

    def main(row, count, narrow):
        x = masked(row, count, block.low, high)
        return x + masked(row + size, count, block.low, high) if row < fold else x

    tail = lambda row, count, narrow: masked(row, count, high, high + block.tail)
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
    as_is = side.qdtype is None and not side.rowscale and source.window.dtype == side.slab
    as_is = as_is and rows_of in (full_rows, tail_rows)

    def quantized(x, part, columns):
        if side.scaled:
            x = x * inverse[part, :, columns]
        elif side.qdtype is not None:
            fixed = numerics.fixed_scale(side.bound, side.qdtype)
            x = x * (np.float32(1.0) / fixed)
        if side.scaled and side.qdtype != np.int8:
            x = dots.widen(dots.to_float8(x, side.qdtype), side.slab)
        elif side.qdtype is not None:
            x = dots.widen(numerics.round_to(x, side.qdtype), side.slab)
        return x.astype(side.slab)

    def piece(column, other, part, load, row, count):
        rows, columns = pl.ds(row, count), pl.ds(column, side.strip)
        if as_is:
            x = source.window[rows, pl.ds(other, side.strip)]
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
            functools.partial(piece, column, other, part, load, row, count)
            for part, load, rows in rows_of(c, source, other)
            for row, count in rows
        ]
        return pieces, []

    return tasks
