"""The tgmm_quant kernel: what one visit does. See tgmm_quant.py for the grid and the roles.

Visit v multiplies the slabs of visit v - 1 while it quantizes its own windows:

    S slab   [2, rows, ts]      by the visit's parity
    R ring   [slots, rows, tr]  a pass (unit, R tile) of at most ``slots`` row blocks is quantized
                                once and read from here for every S tile; the first row block of the
                                next pass joins it, a part at each S tile but the first
    scales   of a: [.., 2, tp, 128], a column, equal in all lanes; of b: [.., 2, 1, tq]; the second
             of the two belongs to the short block in the slab's last rows
    acc      [tp, tq] float32   sum over the row blocks of a group of more than one visit; in a
                                visit with a short block, this one's product until the other is done
    out      [tp, tq]           written back when the output tile changes

Where the kernel has the MXUs in hand (`Tiles.pipelined`), slabs of a have their rows last.

Three kinds of visits have code of their own. *full*: a row block of more than 224 rows, and the
next one with it where that has at most 96 rows and is the group's last: its rows follow in the
window, its slab rows are the last 128. *short*: at most 224 rows, a slab of 256. *empty*: zeros.

A window begins at a multiple of 32 rows. `clean` brings it into shape in place: rows of other
groups become zeros, and window row w >= block, which the block's first rows have pushed out, goes
to row w - block. So a full slab is quantized without a mask however the group is aligned. Only a
window that several row blocks share (the array's last one may be) stays as it is, and its rows are
*masked* as they are read.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from fp8moe_prims.lowering.tpu.layout import LANES, as_column, loop_from
from fp8moe_prims.lowering.tpu.tgmm_blocks import (
    FULL,
    SHARED,
    SHORT_BLOCK,
    TOGETHER,
    Config,
    Tables,
)
from fp8moe_prims.lowering.tpu.tgmm_product import (
    Operand,
    Pipeline,
    Product,
    scheduled,
    strips_of_turn,
)
from fp8moe_prims.lowering.tpu.tgmm_tiles import ALIGN, SHORT, TAIL
from fp8moe_prims.lowering.tpu.tgmm_windows import (
    Source,
    clean,
    full_rows,
    masked_rows,
    measure,
    short_rows,
    tail_rows,
    write,
)

_I32 = np.int32


def _run_under(product, early, late):
    """Runs the blocks of a product, half of them beside ``early``, the others beside ``late``.

    Both are [(strips, tasks of a strip)]. MXU and vector unit share the program of each turn.
    """
    count, chunk = product
    half = count // 2

    def turns(start, stop, works):
        def turn(i):
            chunk(i)
            for tasks, strip in strips_of_turn(works, i - _I32(start), stop - start):
                _at_once(tasks)(strip)

        loop_from(start, _I32(stop), turn)

    turns(0, half, early)
    turns(half, count, late)


def _at_once(tasks):
    """body(i) that runs the tasks of strip i one after the other."""

    def body(i):
        for task in itertools.chain(*tasks(i)):
            task()

    return body


def _run(count, body, together=1):
    """body(i) for i in [0, count), a few in each turn of the loop."""
    together = max(d for d in range(1, together + 1) if count % d == 0)

    def turn(i):
        for part in range(together):
            body(i * _I32(together) + _I32(part))

    loop_from(0, _I32(count // together), turn)


# -------------------------------------------------------------------------------------- kernel


class _Visit:
    """One visit, with its refs at hand."""

    def __init__(self, c: Config, tables: Tables, operands, out, scratch):
        self.c, self.tables = c, tables
        self.operands, self.out, self.scratch = operands, out, scratch
        self.v = v = pl.program_id(1)
        self.old = jnp.maximum(v - _I32(1), _I32(0))
        self.done = tables.block(self.old)  # the visit whose product this is
        self.new = tables.block(v)
        self.r_visit = tables.r_visit[v]
        self.next = tables.block(self.r_visit)  # what R's window holds
        self.s_tile, _ = tables.tiles_of(v)
        self.direct = tables.is_direct(v)

    def source(self, role) -> Source:
        side, v = self.c.side(role), self.v
        block = self.next if role else self.new
        base, strip = self.tables.place(role, v)
        rowscale, shift = None, _I32(0)
        if side.rowscale:
            rowscale = self.scratch["rowscale"], (base & _I32(3)) * _I32(ALIGN)
        if side.width % side.tile:
            tile = self.tables.tiles_of(self.r_visit if role else v)[role]
            shift = tile * _I32(side.tile) - strip * _I32(LANES)
        return Source(side, self.operands[role], rowscale, block, shift)

    def operand(self, role, index) -> Operand:
        """The slab of a role with an index: S by parity, R by slot."""
        scales = self.scratch["scale", role]
        scales = None if scales is None else scales.at[index]
        return Operand(self.scratch["slab", role].at[index], scales)

    def target(self, role) -> Operand:
        """Where a role's window goes."""
        return self.operand(role, self.tables.slot_of(self.r_visit) if role else self.v & _I32(1))

    # -- windows

    def shape_window(self, role):
        """Turns the row scales, and cleans a full block's window."""
        source, c = self.source(role), self.c
        block, scaled = source.block, source.side.rowscale
        columns = self.scratch["rowscale"]
        ready = (block.count == _I32(c.tiles.block)) & (block.low == _I32(0))
        if c.tiles.tail:
            ready = ready & (block.tail == _I32(0))
        unclean = block.is_kind(FULL) & jnp.logical_not(ready)
        # The scales of S serve all tiles of a group that has one row block.
        again = jnp.zeros_like(unclean)
        if scaled and not role:
            again = (self.s_tile > _I32(0)) & block.single

        @pl.when(jnp.logical_not(again))
        def _():
            if scaled:
                for i in range(columns.shape[0] // LANES):
                    part = pl.ds(i * LANES, LANES)
                    columns[part, :] = as_column(self.operands["rowscale"][:, part])
                pl.when(unclean)(lambda: clean(c, columns, block, source.rowscale[1]))

        pl.when(unclean)(lambda: clean(c, source.window, block))

    def quantize_tasks(self, role):
        """(measure, write) of a clean window's strips."""
        c, source, inverse = self.c, self.source(role), self.scratch["inverse", role]
        target = self.target(role)
        return (
            measure(c, source, full_rows, target.scales, inverse),
            write(c, source, full_rows, target.slab, inverse),
        )

    def quantize(self, role, fused, some, loop):
        """Quantizes a role's window into its slab; ``loop(strip)`` runs over the strips.

        Only the short block after a full one where the rest is quantized under the product, and
        nothing at all unless ``some``.
        """
        c, source, inverse = self.c, self.source(role), self.scratch["inverse", role]
        block, target = source.block, self.target(role)
        apart = some & jnp.logical_not(fused)
        ways = [(apart & block.is_kind(SHARED), masked_rows)]
        if c.tiles.block > SHORT:
            ways.append((apart & block.is_kind(SHORT_BLOCK), short_rows))
        if c.max_base:
            full = block.is_kind(FULL)
            ways.append((apart & full, full_rows))
            if c.tiles.tail:
                ways.append((some & full & (block.tail > _I32(0)), tail_rows))
        for which, rows_of in ways:

            @pl.when(which)
            def _(rows_of=rows_of):
                # Two loops: in one, the compiler would keep what it has read in registers.
                if source.side.scaled:
                    loop(_at_once(measure(c, source, rows_of, target.scales, inverse)))
                loop(_at_once(write(c, source, rows_of, target.slab, inverse)))

    def part_range(self):
        """The parts [lower, upper) of R that this visit quantizes."""
        c = self.c
        lower = _I32(0)
        upper = jnp.where(self.direct, _I32(c.parts), _I32(0))
        if c.n_s > 1:
            part = self.s_tile - _I32(1)
            ahead = (part >= _I32(0)) & (part < _I32(c.parts)) & (self.r_visit > self.v)
            ahead = ahead & (self.new.count > _I32(0)) & self.new.begins
            lower = jnp.where(ahead, part, lower)
            upper = jnp.where(ahead, part + _I32(1), upper)
        return lower, upper

    def product(self, with_acc) -> Product:
        """The slabs of the visit before, to be multiplied."""
        c = self.c
        slabs = {
            False: self.operand(False, self.old & _I32(1)),
            True: self.operand(True, self.tables.slot_of(self.old)),
        }
        a, b = slabs[c.a.resident], slabs[c.b.resident]
        # A float32 output block is its own accumulator.
        acc = self.out if self.scratch["acc"] is None else self.scratch["acc"]
        begins = self.done.begins if with_acc else None
        return Product(c, a, b, self.out, acc, begins)

    def ways_to_multiply(self, product, lengths):
        """(a product by itself, the same beside the tasks that it takes as arguments)."""
        if self.c.tiles.pipelined:
            pipeline = functools.partial(Pipeline, product, lengths, self.scratch["mxus"])
            return lambda: pipeline().run(), lambda *tasks: pipeline(*tasks).run()
        blocks = scheduled(product, lengths)
        return lambda: _run(*blocks), functools.partial(_run_under, blocks)

    def products(self):
        """[(which products, lengths, with the accumulator or not, fusable or not)]"""
        c, done = self.c, self.done
        started = self.v > _I32(0)
        long = started & done.is_kind(FULL, SHARED)
        whole = [(0, c.tiles.block, 0)]
        kinds, plain = [], long & done.single
        if c.tiles.tail:
            tail = done.tail > _I32(0)
            kinds.append((plain & tail, [*whole, (c.tiles.block, TAIL, 1)], False, True))
            plain = plain & jnp.logical_not(tail)
        kinds.append((plain, whole, False, True))
        if c.several:
            kinds.append((long & jnp.logical_not(done.single), whole, True, c.tiles.pipelined))
        if c.tiles.block > SHORT:
            kinds.append((started & done.is_kind(SHORT_BLOCK), [(0, SHORT, 0)], c.several, False))
        return kinds

    def run(self):
        c, v, new, done = self.c, self.v, self.new, self.done
        pl.when(v == _I32(0))(self.scratch["mxus"].reset)
        pl.when(new.count > _I32(0))(lambda: self.shape_window(False))
        changed = (v == _I32(0)) | (self.r_visit != self.tables.r_visit[self.old])
        pl.when(changed & (self.next.count > _I32(0)))(lambda: self.shape_window(True))

        fused = self.can_fuse()
        lower, upper = self.part_range()
        share, last = c.share, c.side(True).strips - 1

        def parts(strip):
            def part(i):
                for j in range(share):  # several at once, for the scheduler
                    strip(jnp.minimum(i * _I32(share) + _I32(j), _I32(last)))

            loop_from(lower, upper, part)

        self.quantize(True, fused & jnp.logical_not(self.direct), upper > lower, parts)

        for which, lengths, with_acc, fusable in self.products():
            alone, beside = self.ways_to_multiply(self.product(with_acc), lengths)
            if fusable and c.fuses:
                pl.when(which & fused)(lambda f=beside: f(*self.vector_tasks(lower)))
                which = which & jnp.logical_not(fused)
            pl.when(which)(alone)
        empty = (v > _I32(0)) & (done.count <= _I32(0))
        pl.when(empty)(lambda: self.out.__setitem__(..., jnp.zeros_like(self.out)))
        strips = lambda strip: _run(c.side(False).strips, strip, TOGETHER)
        self.quantize(False, fused, new.count > _I32(0), strips)

    def can_fuse(self):
        """Whether the windows are quantized under the product: a group's only, full block."""
        c, done = self.c, self.done
        full = self.new.is_kind(FULL)
        if not c.fuses:
            return jnp.zeros_like(full)
        fused = full & (self.v > _I32(0)) & done.is_kind(FULL, SHARED)
        if not c.tiles.pipelined:
            fused = fused & done.single
        return fused & self.next.is_kind(FULL) if c.n_s > 1 else fused

    def vector_tasks(self, lower):
        """(early, late) for `_run_under`: S's window, and R's from part ``lower``.

        A window is measured early and written late; early too where it has no scales to wait for.
        """
        c = self.c
        early, late = [], []
        tasks = [(False, c.side(False).strips, _I32(0))]
        if c.n_s > 1:
            tasks.append((True, c.share, lower * _I32(c.share)))
        for role, strips, first in tasks:
            last = _I32(c.side(role).strips - 1)
            measured, written = (
                (strips, lambda i, f=f, x=first, last=last: f(jnp.minimum(x + i, last)))
                for f in self.quantize_tasks(role)
            )
            if c.side(role).scaled:
                early.append(measured)
                late.append(written)
            else:
                early.append(written)
        return early, late


def kernel(c: Config, tables, operands, out, scratch):
    _Visit(c, tables, operands, out, scratch).run()
