"""Row blocks of the tgmm_quant kernel: which rows a visit has, and where they lie in its window."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, round_up
from fp8moe_prims.lowering.tpu.tgmm_tiles import ALIGN, SHORT, TAIL, Tiles

_I32 = np.int32
TILE_SHIFT = 18  # code = tile << TILE_SHIFT | row block
TOGETHER = 4  # strips that are quantized in one turn of a loop
# What a visit does with R before its product: nothing; quantizes its window; takes the stage.
NOTHING, DIRECT, TAKE = range(3)


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand of the product, statically.

    Attributes:
      qdtype: dtype that the kernel quantizes to, or None.
      bound: half the fixed range, or None (absmax).
      slab: dtype of the slab, which the product reads.
      rowscale: whether the rows are multiplied by lhs_scale first.
      is_a: whether it is the operand a.
      resident: whether its role is R.
    """

    qdtype: object
    bound: float | None
    slab: object
    rowscale: bool
    is_a: bool
    resident: bool

    @property
    def scaled(self) -> bool:
        return self.qdtype is not None and self.bound is None


@dataclasses.dataclass(frozen=True)
class Config:
    """What the kernel knows statically."""

    m: int
    tiles: Tiles
    a: Side
    b: Side
    out_dtype: object
    chip: Chip
    n_s: int  # tiles of S

    @property
    def max_base(self) -> int:
        return round_up(self.m, ALIGN) // ALIGN - self.tiles.window // ALIGN

    @property
    def several(self) -> bool:
        """Whether a group may have several row blocks."""
        return self.m > self.tiles.block

    @property
    def share(self) -> int:
        """Strips of R in one part: each S tile but the first stages one of the next pass."""
        strips = self.tiles.tr // LANES
        return min(-(-strips // (self.n_s - 1)) if self.n_s > 1 else TOGETHER, strips)

    @property
    def parts(self) -> int:
        """Parts of R, all together."""
        return -(-(self.tiles.tr // LANES) // self.share)


@dataclasses.dataclass(frozen=True)
class Block:
    """The row block of a visit, traced int32 scalars.

    Attributes:
      base: the 32-row tile its window starts at.
      low: its first row in the window.
      count: its rows, 0 if there is none.
      tail: rows of the short block after it that goes with it.
      step: which row block of the group it is.
      single: whether the group has this visit only, per output tile.
    """

    base: object
    low: object
    count: object
    tail: object
    step: object
    single: object

    def when(self, condition):
        return dataclasses.replace(self, count=jnp.where(condition, self.count, _I32(0)))


def row_block(c: Config, unit, code, starts, ends) -> Block:
    """The row block that (unit, code) stand for."""
    step = code & _I32((1 << TILE_SHIFT) - 1)
    block = _I32(c.tiles.block)
    first, end = starts[unit] + step * block, ends[unit]
    count = jnp.clip(end - first, _I32(0), block)
    rows = end - starts[unit]
    base = jnp.minimum(first >> _I32(5), _I32(c.max_base))
    low = first - base * _I32(ALIGN)
    tail = jnp.where(merged(c.tiles, rows), rows - block, _I32(0))
    single = (rows <= block) | (tail > _I32(0))
    return Block(base, low, count, tail, step, single)


def merged(tiles: Tiles, rows):
    """Whether a group of so many rows is one block with a short one after it, in one visit."""
    if not tiles.tail:
        return jnp.zeros_like(rows, bool) if hasattr(rows, "shape") else False
    return (rows > _I32(tiles.block)) & (rows <= _I32(tiles.block + TAIL - ALIGN))


def kinds_of(c: Config, block: Block):
    """Whether a row block is short (256 slab rows hold it), full, or full in a shared window."""
    there = block.count > _I32(0)
    short = there & (block.count <= _I32(SHORT - ALIGN))
    if c.tiles.block <= SHORT:
        short = jnp.zeros_like(there)
    # Other row blocks may begin in the same window: it must stay as it is.
    shared = (block.base >= _I32(c.max_base)) | (block.count < _I32(ALIGN))
    long = there & jnp.logical_not(short)
    return short, long & jnp.logical_not(shared), long & shared


def loop_from(lower, upper, body):
    def one(i):
        body(i)
        return i + _I32(1)

    # A while loop with an int32 counter: that of fori_loop is an int64 where x64 is on.
    lax.while_loop(lambda i: i < upper, one, jnp.asarray(lower, jnp.int32))
