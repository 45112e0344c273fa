"""Visits of the tgmm_quant kernel: tables that say which rows and tiles each has, made by XLA.

A visit is one row block of one output tile; visits follow each other as

    unit u = (batch, group)  >  R tile  >  S tile  >  row block j
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, round_up
from fp8moe_prims.lowering.tpu.tgmm_tiles import ALIGN, SHORT, TAIL, Tiles

_I32 = np.int32
TOGETHER = 4  # strips that are quantized in one turn of a loop
# Kinds of row blocks: no rows; 256 slab rows hold it; full; full in a window that others may share.
EMPTY, SHORT_BLOCK, FULL, SHARED = range(4)
# Words of the tables: `at` has a window's 32-row tile below its first strip of 128 columns, the
# others have two halves.
_STRIP, _HALF = 20, 16
_SINGLE, _BEGINS, _DIRECT = 18, 19, 8


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand of the product, statically.

    Attributes:
      dtype: dtype in HBM.
      qdtype: dtype that the kernel quantizes to, or None.
      bound: half the fixed range, or None (absmax).
      slab: dtype of the slab, which the product reads.
      rowscale: whether the rows are multiplied by lhs_scale first.
      is_a: whether it is the operand a.
      resident: whether its role is R.
      width: columns, of S those of one core.
      tile: columns of a tile.
      turned: whether its slabs are [tile, rows], else [rows, tile].
    """

    dtype: object
    qdtype: object
    bound: float | None
    slab: object
    rowscale: bool
    is_a: bool
    resident: bool
    width: int
    tile: int
    turned: bool = False

    @property
    def scaled(self) -> bool:
        return self.qdtype is not None and self.bound is None

    @property
    def tiles(self) -> int:
        return -(-self.width // self.tile)

    @property
    def strip(self) -> int:
        """Columns of a strip: of bf16, 256 fill a register with eight rows, as they lie in HBM."""
        pairs = np.dtype(self.dtype).itemsize == 2 and self.tile % (2 * LANES) == 0
        return 2 * LANES if pairs else LANES

    @property
    def strips(self) -> int:
        """Strips of a tile."""
        return self.tile // self.strip

    def window(self, tile):
        """The first 128 columns in the window of a tile: the last window ends with the array."""
        last = -(-self.width // LANES) - self.tile // LANES
        return jnp.minimum(tile * _I32(self.tile // LANES), _I32(last))


@dataclasses.dataclass(frozen=True)
class Config:
    """What the kernel knows statically."""

    m: int
    tiles: Tiles
    a: Side
    b: Side
    out_dtype: object
    chip: Chip

    def side(self, resident: bool) -> Side:
        return self.a if self.a.resident == resident else self.b

    @property
    def n_s(self) -> int:
        """Tiles of S."""
        return self.side(False).tiles

    @property
    def max_base(self) -> int:
        return round_up(self.m, ALIGN) // ALIGN - self.tiles.window // ALIGN

    @property
    def several(self) -> bool:
        """Whether a group may have several row blocks."""
        return self.m > self.tiles.block

    @property
    def fuses(self) -> bool:
        """Whether a tile has several products, under which full blocks are quantized."""
        return self.max_base > 0 and self.tiles.products > 1

    @property
    def share(self) -> int:
        """Strips of R in one part: each S tile but the first quantizes one of the next pass."""
        strips = self.side(True).strips
        return min(-(-strips // (self.n_s - 1)) if self.n_s > 1 else TOGETHER, strips)

    @property
    def parts(self) -> int:
        """Parts of R, all together."""
        return -(-self.side(True).strips // self.share)


class Tables(NamedTuple):
    """int32 [limit] each, by visit.

    unit: the unit.
    tile: the S tile, and the R tile in the high half.
    s_at, r_at: where the windows in VMEM begin, see `place`.
    r_visit: the visit whose rows R's window holds.
    rows, count: its row block, see `block`.
    slot: where in the ring its rows of R are, and whether it quantizes them itself.
    """

    unit: object
    tile: object
    s_at: object
    r_at: object
    r_visit: object
    rows: object
    count: object
    slot: object

    def tiles_of(self, v):
        """The S and the R tile of visit v."""
        tile = self.tile[v]
        return tile & _I32((1 << _HALF) - 1), tile >> _I32(_HALF)

    def slot_of(self, v):
        return self.slot[v] & _I32((1 << _DIRECT) - 1)

    def is_direct(self, v):
        """Whether visit v quantizes R's window before its product; else it is in the ring."""
        return self.slot[v] >= _I32(1 << _DIRECT)

    def place(self, resident: bool, v):
        """(32-row tile, 128-column strip) that a role's window begins with at visit v."""
        at = (self.r_at if resident else self.s_at)[v]
        return at & _I32((1 << _STRIP) - 1), at >> _I32(_STRIP)

    def block(self, v):
        """The row block of visit v."""
        rows, count = self.rows[v], self.count[v]
        half = _I32((1 << _HALF) - 1)
        return Block(
            low=rows & half,
            tail=rows >> _I32(_HALF),
            count=count & half,
            kind=(count >> _I32(_HALF)) & _I32(3),
            single=(count & _I32(1 << _SINGLE)) != _I32(0),
            begins=(count & _I32(1 << _BEGINS)) != _I32(0),
        )


@dataclasses.dataclass(frozen=True)
class Block:
    """The row block of a visit, traced scalars.

    Attributes:
      low: its first row in the window.
      count: its rows, 0 if there is none.
      tail: rows of the short block after it that goes with it.
      kind: EMPTY, SHORT_BLOCK, FULL or SHARED.
      single: whether the group has this visit only, per output tile.
      begins: whether it is the first of its group.
    """

    low: object
    count: object
    tail: object
    kind: object
    single: object
    begins: object

    def is_kind(self, *kinds):
        return functools.reduce(operator.or_, [self.kind == _I32(k) for k in kinds])


def _merged(tiles: Tiles, rows):
    """Whether a group of so many rows is one block with a short one after it, in one visit."""
    if not tiles.tail:
        return jnp.zeros_like(rows, bool)
    return (rows > _I32(tiles.block)) & (rows <= _I32(tiles.block + TAIL - ALIGN))


def _base(c: Config, first):
    """The 32-row tile that the window of a row block begins with."""
    return jnp.clip(first >> _I32(5), _I32(0), _I32(c.max_base))


def _meeting(c: Config, starts, ends, blocks, merge, elements):
    """bool [units]: those that would clean a window in which another one still finds its rows.

    The pipeline does not fetch again what the next unit needs too: of batch elements that share an
    operand, say. Where cores share S, the first unit follows the last one if they take turns.
    """
    index = lax.iota(np.int32, starts.shape[0])
    filled = lax.cummax(jnp.where(blocks > _I32(0), index, _I32(-1)))
    before = jnp.concatenate([filled[-1:] if c.tiles.cores > 1 else _I32([-1]), filled[:-1]])
    before = jnp.where(before < _I32(0), before[0], before)
    take = lambda x: jnp.take(x, before, axis=0, mode="clip")
    last = starts + (blocks - _I32(1)) * _I32(c.tiles.block)  # first row of the last row block
    count = jnp.where(merge, _I32(c.tiles.block), ends - last)
    same = jnp.zeros(starts.shape, bool)
    for element in (elements[r] for r in (False, True) if c.side(r).tiles == 1):
        same = same | (True if element is None else take(element) == element)
    meets = same & (blocks > _I32(0)) & (before >= _I32(0)) & (take(count) >= _I32(ALIGN))
    meets = meets & (take(_base(c, last)) == _base(c, starts))
    nowhere = _I32(starts.shape[0])
    return meets.at[jnp.where(meets, before, nowhere)].set(True, mode="drop")


def make_tables(c: Config, starts, ends, limit: int, elements=None):
    """The visits of units with rows [starts, ends), int32 [units] each.

    ``elements``: None, or where the units belong to several batch elements or are visited by
    several cores, those of S and R for each unit, by role, int32 [units] or None for all the same.

    Returns (how many there are, fewer than limit; Tables; the last visit up to each one that
    fetches an S window, where the pipeline stays while nothing new is needed).
    """
    tiles, s, r = c.tiles, c.side(False), c.side(True)
    n_s, n_r = s.tiles, r.tiles
    rows = jnp.maximum(ends - starts, _I32(0))
    merge = _merged(tiles, rows)
    blocks = (rows + _I32(tiles.block - 1)) // _I32(tiles.block)  # [units]
    blocks = jnp.where(merge, _I32(1), blocks)
    steps = jnp.maximum(blocks, _I32(1))
    last = jnp.cumsum(steps * _I32(n_s * n_r), dtype=np.int32)
    cached = blocks <= _I32(tiles.slots)
    writes = blocks * jnp.where(cached, _I32(n_r), _I32(n_r * n_s))
    used = jnp.cumsum(writes, dtype=np.int32) - writes
    v = lax.iota(np.int32, limit)
    unit = jnp.searchsorted(last, v, side="right", method="scan_unrolled").astype(np.int32)
    unit = jnp.minimum(unit, _I32(starts.shape[0] - 1))
    take = lambda x, at=unit: jnp.take(x, at, axis=0, mode="clip")
    local = v - take(last - steps * _I32(n_s * n_r))
    step = take(steps)
    tile, j = local // step, local % step
    s_tile, r_tile = tile % _I32(n_s), tile // _I32(n_s)
    total = jnp.minimum(last[-1], _I32(limit - 1))
    real = (take(blocks) > _I32(0)) & (v < total)
    hold_s = lax.cummax(jnp.where(real, v, _I32(0)))

    # A pass (unit, R tile) quantizes the first row block of the next one, which begins at
    # ``after``, into the ring beside its own.
    fresh = real & ((s_tile == _I32(0)) | ~take(cached))
    slot = jnp.where(take(cached), r_tile * step + j, local) + take(used)
    begins = real & (s_tile == _I32(0)) & (j == _I32(0))
    far = _I32(limit)
    after = lax.cummin(jnp.where(begins, v, far), reverse=True)
    after = jnp.concatenate([after[1:], jnp.full((1,), far)])
    room = take(blocks) < _I32(tiles.slots)
    ahead = real & room & (after < far) & (s_tile > _I32(0))
    direct = fresh & ~(begins & (lax.cummax(jnp.where(ahead, after, _I32(-1))) == v))
    r_visit = lax.cummax(jnp.where(direct, v, jnp.where(ahead, after, _I32(0))))

    # The last window may serve several row blocks, those that begin in it.
    first_late = (_I32(c.max_base * ALIGN) - starts + _I32(tiles.block - 1)) // _I32(tiles.block)
    late = jnp.sum(jnp.maximum(blocks - jnp.maximum(first_late, _I32(0)), _I32(0)))
    shared = late > _I32(1 if c.max_base else 0)
    meets = False
    if elements is not None:
        meets = take(_meeting(c, starts, ends, blocks, merge, elements))
    base, rows, count = _row_blocks(
        c, take(starts), take(ends), take(merge), j, real, shared, meets
    )
    direct = direct.astype(np.int32) << _I32(_DIRECT)
    return (
        total,
        Tables(
            unit=unit,
            tile=s_tile | (r_tile << _I32(_HALF)),
            s_at=take(base | (s.window(s_tile) << _I32(_STRIP)), hold_s),
            r_at=take(base | (r.window(r_tile) << _I32(_STRIP)), r_visit),
            r_visit=r_visit,
            rows=rows,
            count=count,
            slot=(slot % _I32(tiles.slots)) | direct,
        ),
        hold_s,
    )


def _row_blocks(c: Config, start, end, merge, j, real, last_shared, meets):
    """Row block j of groups with rows [start, end), int32 [limit] all: (base, rows, count).

    base: the 32-row tile that its window begins with; rows, count: words of the tables. ``merge``:
    whether a short block goes with it; ``real``: whether there is one; ``last_shared``: whether the
    array's last window serves several row blocks; ``meets``: see `_meeting`.
    """
    block = _I32(c.tiles.block)
    first = start + j * block
    count = jnp.where(real, jnp.clip(end - first, _I32(0), block), _I32(0))
    base = _base(c, first)
    tail = jnp.where(merge, end - start - block, _I32(0))
    single = (end - start <= block) | merge
    # Other row blocks may find their rows in the same window: it must stay as it is.
    shared = ((base >= _I32(c.max_base)) & last_shared) | (count < _I32(ALIGN)) | meets
    kind = jnp.where(shared, _I32(SHARED), _I32(FULL))
    if c.tiles.block > SHORT:
        kind = jnp.where(count <= _I32(SHORT - ALIGN), _I32(SHORT_BLOCK), kind)
    kind = jnp.where(count > _I32(0), kind, _I32(EMPTY))
    flags = single.astype(np.int32) << _I32(_SINGLE) | (j == _I32(0)).astype(np.int32) << _BEGINS
    rows = (first - base * _I32(ALIGN)) | (tail << _I32(_HALF))
    return base, rows, count | (kind << _I32(_HALF)) | flags
