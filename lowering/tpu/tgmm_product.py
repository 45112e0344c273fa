"""The products of the tgmm_quant kernel: from slabs to an output tile.

`scheduled` leaves a product to the compiler. `Pipeline` has the MXUs in hand: the output tile is
made in *blocks* of `Tiles.product`, a program each, and a block in *chunks* of rows. While the MXUs
work on a chunk, the results of the one before are taken, scaled and stored; what the last chunk of
a block leaves is taken in the next block. So the MXUs never wait for the vector unit to finish.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots, mxu
from fp8moe_prims.lowering.tpu.layout import LANES, loop_from
from fp8moe_prims.lowering.tpu.tgmm_blocks import Config

_I32 = np.int32
_PIECE = 32  # rows of results that are taken at a time


@dataclasses.dataclass(frozen=True)
class Operand:
    """A slab and its scales (or None), refs.

    The slab is [rows, t], but [t, rows] where the kernel has the MXUs in hand and it is of a.
    """

    slab: object
    scales: object


@dataclasses.dataclass(frozen=True)
class Product:
    """out = a^T b, and acc unless ``begins``: refs, and what the compiler knows of them.

    Attributes:
      a, b: the slabs of a visit.
      out: ref [tp, tq].
      acc: ref [tp, tq] float32, where sums over several visits are kept.
      begins: whether the visit begins such a sum; None where it is the only one.
    """

    c: Config
    a: Operand
    b: Operand
    out: object
    acc: object
    begins: object

    def scaled(self, x, part, rows, columns):
        """Results x of the output's ``rows`` and ``columns`` (pl.ds) times a part's scales."""
        fixed = np.float32(1.0)
        for side in (self.c.a, self.c.b):
            if side.bound is not None and side.qdtype is not None:
                fixed = np.float32(fixed * numerics.fixed_scale(side.bound, side.qdtype))
        if fixed != 1.0:
            x = x * fixed
        unit = np.float32(dots.unit((self.c.a.slab, self.c.b.slab)))
        if self.b.scales is not None:
            x = x * (self.b.scales[part, :, columns] * unit)
        elif unit != 1.0:
            x = x * unit
        if self.a.scales is not None:
            lanes = x.shape[1] // LANES
            x = x * jnp.concatenate([self.a.scales[part, rows, :]] * lanes, axis=1)
        return x

    def store(self, total, rows, columns):
        """Into the output, with what the visits before have summed up."""
        if self.begins is not None:
            total = total + jnp.where(self.begins, np.float32(0), self.acc[rows, columns])
            self.acc[rows, columns] = total
        if self.acc is not self.out or self.begins is None:
            self.out[rows, columns] = total.astype(self.out.dtype)


def _place(c: Config, shape, i):
    """(first row, first column) of block i of the output tile: blocks of a column come first."""
    cp, cq = shape
    per_column = _I32(c.tiles.tp // cp)
    row = pl.multiple_of(lax.rem(i, per_column) * _I32(cp), math.gcd(cp, 1024))
    return row, pl.multiple_of(lax.div(i, per_column) * _I32(cq), math.gcd(cq, 1024))


def strips_of_turn(works, t, turns):
    """[(tasks, strip)] for turn t of ``turns``: an equal share of each of works, (strips, tasks).

    Past its end a work repeats its last strip.
    """
    for strips, tasks in works:
        share = -(-strips // turns)
        for j in range(share):
            at = t * _I32(share) + _I32(j)
            yield tasks, jnp.minimum(at, _I32(strips - 1)) if strips % turns else at


# ------------------------------------------------------------------------ by the compiler


def scheduled(product: Product, lengths):
    """(blocks of the output tile, body).

    Args:
      lengths: [(first slab row, rows, index of the scales)] of the parts, one or two.
    """
    c, a, b = product.c, product.a, product.b
    cp, cq = c.tiles.product

    def block(i):
        row, column = _place(c, c.tiles.product, i)
        rows, columns = pl.ds(row, cp), pl.ds(column, cq)

        def multiply(first, length, part):
            depth = pl.ds(first, length)
            dims = (((0,), (0,)), ((), ()))
            x = dots.dot(a.slab[depth, rows], b.slab[depth, columns], dims, c.chip)
            return product.scaled(x, part, rows, columns)

        whole, *short = lengths
        if short:
            # In registers it would be spilled until the other product is there.
            product.acc[rows, columns] = multiply(*short[0])
        total = multiply(*whole)
        if short:
            total = total + product.acc[rows, columns]
        product.store(total, rows, columns)

    return c.tiles.products, block


# --------------------------------------------------------------------------- in our hands


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Results that the MXUs hold: [rows, 512] of the output, 256 columns in each.

    Attributes:
      row, column: where they belong in the output tile.
      first: their first row in the MXUs' results; those of the short block follow them.
    """

    row: object
    column: object
    first: int


class Pipeline:
    """A product in blocks, with work of the vector unit beside each.

    ``lengths`` as for `scheduled`, a part of 128 rows or of a multiple of 256. ``early``, ``late``:
    as for `tgmm_kernel._run_under`. Blocks go in pairs, *turns*: beside the even one strips go
    through the early tasks, beside the odd one the same strips through the late ones.
    """

    def __init__(self, product: Product, lengths, mxus: mxu.Mxus, early=(), late=()):
        self.product, self.lengths, self.mxus = product, lengths, mxus
        tiles = product.c.tiles
        self.rows = tiles.chunk
        # Without work beside it a block is one chunk: less code.
        self.shape = tiles.product if early or late else (tiles.chunk, tiles.product[1])
        self.turns = (tiles.tp // self.shape[0]) * (tiles.tq // self.shape[1]) // 2
        self.works = early, late

    def run(self):
        self._block(_I32(0), 0, begins=True)

        def turn(t):
            self._block(t, 1)
            pl.when(t + _I32(1) < _I32(self.turns))(lambda: self._block(t + _I32(1), 0))

        loop_from(_I32(0), _I32(self.turns), turn)
        last = self._chunks(_I32(2 * self.turns - 1), 1)[-1]
        for take in self._takes(last):
            take()
        self.mxus.check(self.product.out)

    def _chunks(self, i, parity):
        """The chunks of block i."""
        row, column = _place(self.product.c, self.shape, i)
        count = self.shape[0] // self.rows
        held = self.rows * len(self.lengths)
        return [
            _Chunk(
                pl.multiple_of(row + _I32(j * self.rows), 32),
                column,
                (parity * count + j) % 2 * held,
            )
            for j in range(count)
        ]

    def _block(self, t, parity, begins=False):
        """Block 2 t + parity: its MXU work, the results of the chunk before, the vector work."""
        i = t * _I32(2) + _I32(parity)
        chunks = self._chunks(i, parity)
        takes = [] if begins else self._takes(self._chunks(i - _I32(1), 1 - parity)[-1])
        depths = [
            (k, min(mxu.WIDTH, start + length - k), j)
            for j, (start, length, _) in enumerate(self.lengths)
            for k in range(start, start + length, mxu.WIDTH)
        ]
        steps = [(chunk, *depth) for chunk in chunks for depth in depths]
        work, last = self._work(t, parity)
        registers = [(parity * len(steps) + j) % 2 for j in range(len(steps) + 1)]
        self._push(steps[0], registers[0])
        done = 0
        for j, (chunk, k, count, part) in enumerate(steps):
            rows = self._depth(self.product.a.slab, k, count, 1, pl.ds(chunk.row, self.rows))
            first = chunk.first + part * self.rows
            for x in range(mxu.COUNT):
                self.mxus.multiply(rows, x, registers[j], first)
            if j + 1 < len(steps):
                self._push(steps[j + 1], registers[j + 1])
            left = len(depths) - j % len(depths)
            now = -(-len(takes) // max(left - 1, 1))  # so that none is left at the end
            for take in takes[:now]:
                take()
            takes = takes[now:]
            upto = -(-len(work) * (j + 1) // (len(steps) - len(depths) // 2))
            for task in work[done:upto]:
                task()
            done = upto
            if left == 1 and j + 1 < len(steps):
                takes = self._takes(chunk)
        for task in last:
            task()

    def _depth(self, slab, k, count, axis, other):
        """``count`` slab rows from k, filled up to 256 with zeros."""
        at = pl.ds(k, count)
        x = slab[(other, at) if axis else (at, other)]
        copies = mxu.WIDTH // count - 1
        return jnp.concatenate([x] + [jnp.zeros_like(x)] * copies, axis=axis) if copies else x

    def _push(self, step, register):
        chunk, k, count, _ = step
        for x in range(mxu.COUNT):
            columns = pl.ds(chunk.column + _I32(x * mxu.WIDTH), mxu.WIDTH)
            self.mxus.push(self._depth(self.product.b.slab, k, count, 0, columns), x, register)

    def _takes(self, chunk):
        """What takes the results of a chunk, in pieces."""
        piece = math.gcd(self.rows, _PIECE)

        def take(r, x):
            rows = pl.ds(pl.multiple_of(chunk.row + _I32(r), 32), piece)
            columns = pl.ds(chunk.column + _I32(x * mxu.WIDTH), mxu.WIDTH)

            total = None
            for j, (_, _, part) in enumerate(self.lengths):
                y = self.mxus.pop(x, chunk.first + j * self.rows + r, piece)
                y = self.product.scaled(y, part, rows, columns)
                total = y if total is None else total + y
            self.product.store(total, rows, columns)

        pieces = [(r, x) for r in range(0, self.rows, piece) for x in range(mxu.COUNT)]
        return [lambda r=r, x=x: take(r, x) for r, x in pieces]

    def _work(self, t, parity):
        """The vector unit's tasks of a block, and those that should come last."""
        found, last = [], []
        for tasks, strip in strips_of_turn(self.works[parity], t, self.turns):
            more = tasks(strip)
            found += more[0]
            last += more[1]
        return found, last
