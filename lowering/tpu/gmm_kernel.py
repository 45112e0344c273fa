"""The gmm kernel: what one grid step does.

Grid: (n tiles, visits, k tiles). A visit (visits.py) is a tile of tm rows and one group with rows
in it; the number of visits is a run-time value. Usually the whole contraction is one k tile: then
the weights [k, tn] of a group stay in VMEM while its visits last, and are read from HBM once. The
rows of a visit are handled sub (256) at a time, by a loop over those that the group has: a tile may
be large, for few grid steps, and a boundary between groups still costs at most sub rows.

Buffers in VMEM, the pipelined blocks twice:
  lhs     [tm, tk]       rows of the visit
  rhs     [tk, tn]       (or [tn, tk]) weights of the visit's group
  out     [tm, tn]       stays while consecutive visits have the same rows, each adding its own
  ready   [sub, tk]      the lhs as the MXU takes it: quantized, scaled, converted; if it differs
  steps   [blocks, sub, 128]  the scales of the quantized lhs, by block of k and row, in each lane
  weights [tk, tn]       the rhs as the MXU takes it, made once per group, where it differs
  kept    [sub, tn]      out rows as earlier visits left them
  acc     [sub, 2048] f32  the sum over blocks of k (or [tm, tn], over k tiles)
SMEM holds one int32 table: the visits, and per group its rows and which operand blocks it reads.

Cycles per 256 rows, k = 7168, n = 2048, v7x (compiler's schedule; MXU floor 7168): 8700 with a bf16
lhs quantized per 512 elements of k, of which the MXU works 82%.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.dots import dot, widen
from fp8moe_prims.lowering.tpu.gmm_tiles import (
    PIECE_F32,
    ROWS,
    Problem,
    Tiles,
    acc_columns,
)
from fp8moe_prims.lowering.tpu.layout import LANES, loop_from, round_up, tree_max

_I = np.int32


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one call of the kernel."""

    q: Problem
    t: Tiles
    chip: Chip
    tail: str
    bound: float | None
    row_scale: bool  # an lhs scale per row
    flat_scale: bool  # an lhs scale per batch
    visits: int  # V

    @property
    def tiles(self) -> int:
        return -(-self.q.m // self.t.tm)

    @property
    def units(self) -> int:
        return self.q.batches * self.tiles

    @property
    def groups(self) -> int:
        return 1 + self.q.batches * self.q.g

    @property
    def k_tiles(self) -> int:
        return -(-self.q.k // self.t.tk)

    @property
    def masked(self) -> bool:
        return self.q.k % self.t.tk != 0

    @property
    def rhs_tile(self):
        """Shape of an rhs tile as it lies in HBM."""
        t = self.t
        return (t.tn, t.tk) if self.q.transpose_rhs else (t.tk, t.tn)

    @property
    def dtypes(self):
        """(lhs, rhs) dtypes that the MXU is given."""
        return self.q.dtypes(self.chip, self.t.tk)

    @property
    def makes_lhs(self) -> bool:
        q = self.q
        changed = q.qdtype is not None or q.scale_form == "fold" or q.lhs_dtype != self.dtypes[0]
        return changed or self.masked

    @property
    def makes_rhs(self) -> bool:
        q = self.q
        return q.scale_form == "full" or q.rhs_dtype != self.dtypes[1] or self.masked

    @property
    def ahead(self) -> bool:
        """Whether the lhs is quantized block by block between the products."""
        return self.block_k is not None and self.block_k < self.t.tk

    @property
    def acc_columns(self) -> int:
        """The first output columns, whose partial sums wait in ``acc``."""
        return acc_columns(self.q, self.t.tn, self.t.tk, self.t.step)

    @property
    def block_k(self) -> int | None:
        """Contraction elements of one in-kernel scale, within a k tile."""
        return None if self.q.block_k is None else min(self.q.block_k, self.t.tk)


# The per-group columns of the table, after its V entries of visits.
SHIFT, STOP, BATCH, START, END, LHS, RHS, SCALE = range(8)


class Table:
    """Reads of the SMEM table, by scalar code in index maps and in the kernel."""

    def __init__(self, spec: Spec, ref):
        self.spec, self.ref = spec, ref

    def group(self, v):
        return self.ref[v]

    def get(self, field: int, p):
        return self.ref[p + _I(self.spec.visits + field * self.spec.groups)]

    def unit(self, v, p):
        """The unit of visit v."""
        return jnp.clip(v + self.get(SHIFT, p), _I(0), _I(self.spec.units - 1))

    def own(self, v, p):
        """Whether visit v handles rows of its group, and not a unit without rows."""
        return v < self.get(STOP, p)

    def lhs_tile(self, v, p):
        """The row tile that is in VMEM at visit v: a gap keeps the one before it."""
        v = jnp.minimum(v, self.get(STOP, p) - _I(1))
        tile = v + self.get(SHIFT, p) - self.get(BATCH, p) * _I(self.spec.tiles)
        return jnp.clip(tile, _I(0), _I(self.spec.tiles - 1))

    def split(self, unit):
        """(batch, tile) of a unit."""
        tiles = self.spec.tiles
        if self.spec.q.batches == 1:
            return _I(0), unit
        if tiles == 1:
            return unit, _I(0)
        batch = jax.lax.div(unit, _I(tiles))
        return batch, unit - batch * _I(tiles)

    def k_tile(self, kt, v, p):
        if self.spec.k_tiles == 1:
            return _I(0)
        return jnp.where(self.own(v, p), kt, _I(self.spec.k_tiles - 1))


def _ranges(size: int, step: int):
    """[(start, stop)] that cover [0, size) in steps."""
    return [(at, min(at + step, size)) for at in range(0, size, step)]


def _pieces(spec: Spec):
    """The products of one k tile: (start, stop, quantization block, scale block) each."""
    q, t, tk = spec.q, spec.t, spec.t.tk
    cuts = {0, tk}
    if spec.block_k is not None:
        cuts.update(range(0, tk, spec.block_k))
    if q.scale_form == "blocks":
        cuts.update(range(0, tk, q.scale_block))
    if spec.dtypes[0] == np.float32 or t.tn == 1:
        cuts.update(range(0, tk, PIECE_F32))
    if spec.dtypes[0] == np.int8:
        cuts.update(range(0, tk, dots.EXACT_INT8))
    cuts = sorted(cuts)
    return [
        (a, b, a // spec.block_k if spec.block_k else 0, a // q.scale_block if q.scale_block else 0)
        for a, b in itertools.pairwise(cuts)
    ]


def _absmax(values):
    """float32 [rows, 1], the largest magnitude of each row; NaN where a row has one."""
    columns = values.shape[1]
    # First over whole registers, as far as it goes: a register holds 128 columns of float32 or 256
    # of bf16 (of half the rows), and only the last one needs the slow reduction across lanes.
    width = LANES * 4 // values.dtype.itemsize
    parts = [values[:, c0:c1] for c0, c1 in _ranges(columns, width)]
    odd = parts.pop() if columns % width else None
    tops = []
    if parts:
        top = tree_max([jnp.abs(x) for x in parts]).astype(jnp.float32)
        tops.append(tree_max([top[:, c0:c1] for c0, c1 in _ranges(width, LANES)]))
    if odd is not None:
        tops.append(jnp.abs(odd.astype(jnp.float32)))
    return tree_max([jnp.max(x, axis=1, keepdims=True) for x in tops])


def _make_lhs(spec: Spec, kt, refs, rows, block: int, columns):
    """Fills ``ready`` (and ``steps``) from some rows and columns of the lhs block."""
    q, t = spec.q, spec.t
    (r0, r1), (c0, c1) = rows, columns
    values = refs["lhs"][r0:r1, c0:c1]
    absmax = None
    if q.scale_form == "fold" or spec.masked:
        values = values.astype(jnp.float32)
    elif spec.block_k is not None and (values.dtype == np.float32 or spec.chip.bf16_vector):
        absmax = _absmax(values)
    if q.qdtype is not None:
        values = values.astype(jnp.float32)
    if q.scale_form == "fold":
        values = values * refs["rhs_scale"][0:1, c0:c1]
    if spec.masked:
        column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        left = _I(q.k - c0) - kt * _I(t.tk)
        values = jnp.where(column < left, values, np.float32(0))
    if spec.block_k is not None:
        absmax = _absmax(values) if absmax is None else absmax
        scale = numerics.block_scale(absmax, q.qdtype)
        step = scale * np.float32(dots.unit(spec.dtypes))
        refs["steps"][block, r0:r1, :] = jnp.broadcast_to(step, (r1 - r0, LANES))
    elif q.qdtype is not None:
        scale = numerics.fixed_scale(spec.bound, q.qdtype)
    if q.qdtype is not None:
        # Not block_inverse, which is 0 where the scale was replaced by 1: such values round to 0.
        values = values * (np.float32(1) / scale)
        scaled = spec.block_k is not None
        values = dots.quantized(values, q.qdtype, spec.dtypes[0], scaled)
    refs["ready"][r0:r1, c0:c1] = widen(values, spec.dtypes[0])


def _loop(size: int, step: int, body):
    """body(start, length) over [0, size): a loop, so that the code stays small, and the rest."""
    count = size // step
    if count == 1:
        body(0, step)
    elif count > 1:
        loop_from(_I(0), _I(count), lambda i: body(pl.multiple_of(i * _I(step), step), step))
    if size % step:
        body(count * step, size % step)


def _make_rhs(spec: Spec, kt, refs):
    """Fills ``weights`` from the rhs block."""
    q, t = spec.q, spec.t
    full = q.scale_form == "full"
    rows, columns = spec.rhs_tile

    def block(r0, height, c0, width):
        at = (pl.ds(r0, height), pl.ds(c0, width))
        values = refs["rhs"][at]
        if full or spec.masked:
            values = values.astype(jnp.float32)
        if full:
            values = values * refs["rhs_scale"][at]
        if spec.masked:
            axis, first = (1, c0) if q.transpose_rhs else (0, r0)
            deep = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
            left = _I(q.k) - first - kt * _I(t.tk)
            values = jnp.where(deep < left, values, np.float32(0))
        refs["weights"][at] = widen(values, spec.dtypes[1])

    _loop(rows, 256, lambda r, h: _loop(columns, 512, lambda c, w: block(r, h, c, w)))


def _dot(spec: Spec, kt, refs, piece, columns):
    """float32 [tm, columns]: the product of one piece of the contraction, its scales applied."""
    q, t = spec.q, spec.t
    lhs = refs["ready"] if spec.makes_lhs else refs["lhs"]
    rhs = refs["weights"] if spec.makes_rhs else refs["rhs"]
    (a, b, block, scale_block), (c0, c1) = piece, columns
    if q.transpose_rhs:
        part = dot(lhs[:, a:b], rhs[c0:c1, a:b], (((1,), (1,)), ((), ())), spec.chip)
    else:
        part = dot(lhs[:, a:b], rhs[a:b, c0:c1], (((1,), (0,)), ((), ())), spec.chip)
    if spec.block_k is not None:
        part = part * _across(refs["steps"][block], c1 - c0)
    if q.scale_form == "blocks":
        row = scale_block
        if spec.k_tiles > 1:  # the last k tile may have pieces past k, all zero
            row = kt * _I(t.tk // q.scale_block) + _I(scale_block)
            row = jnp.minimum(row, _I(q.k // q.scale_block - 1))
        part = part * refs["rhs_scale"][pl.ds(row, 1), c0:c1]
    return part


def _across(column, width: int):
    """[rows, width] of a column that stands in each of the 128 lanes of ``column``."""
    if width % LANES:
        return jnp.broadcast_to(column[:, 0:1], (column.shape[0], width))
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _multiply(spec: Spec, kt, refs, batch, last):
    """The products of some rows of a visit and one k tile, and their end in ``out``.

    A lhs that is quantized is made ready one block of the contraction ahead of the products that
    use it, a few rows before each product: so both stand side by side in the program, one for the
    vector unit and one for the MXU. ``acc`` takes the sums that live longer than one product.
    """
    t = spec.t
    pieces = _pieces(spec)
    columns = _ranges(t.tn, t.step)
    blocks = _ranges(t.tk, spec.block_k or t.tk)
    lead = [c for c in columns if c[1] <= spec.acc_columns]
    if spec.makes_lhs and not spec.ahead:
        for block, cut in enumerate(_ranges(t.tk, spec.block_k or min(t.tk, 1024))):
            for rows in _ranges(t.sub, ROWS):
                _make_lhs(spec, kt, refs, rows, block, cut)
    if spec.ahead:
        slices = _ranges(t.sub, max(32, round_up(-(-t.sub // max(len(lead), 1)), 32)))
        for rows in slices:
            _make_lhs(spec, kt, refs, rows, 0, blocks[0])
    if spec.k_tiles > 1:

        @pl.when(kt == _I(0))
        def _clear():
            refs["acc"][...] = jnp.zeros_like(refs["acc"])

    for block, (a, b) in enumerate(blocks if lead else []):
        todo = list(slices) if spec.ahead and block + 1 < len(blocks) else []
        for c0, c1 in lead:
            if todo:
                _make_lhs(spec, kt, refs, todo.pop(0), block + 1, blocks[block + 1])
            inside = [piece for piece in pieces if a <= piece[0] < b]
            parts = [_dot(spec, kt, refs, piece, (c0, c1)) for piece in inside]
            if block or spec.k_tiles > 1:
                parts.insert(0, refs["acc"][:, c0:c1])
            total = functools.reduce(jnp.add, parts)
            if spec.k_tiles == 1 and block + 1 == len(blocks):
                _finish(spec, batch, refs, total, (c0, c1))
            else:
                refs["acc"][:, c0:c1] = total
        for rows in todo:
            _make_lhs(spec, kt, refs, rows, block + 1, blocks[block + 1])
    for cut in columns[len(lead) :]:
        parts = [_dot(spec, kt, refs, piece, cut) for piece in pieces]
        _finish(spec, batch, refs, functools.reduce(jnp.add, parts), cut)
    if spec.k_tiles > 1:

        @pl.when(last)
        def _end():
            for c0, c1 in columns:
                _finish(spec, batch, refs, refs["acc"][:, c0:c1], (c0, c1))


def _finish(spec: Spec, batch, refs, total, columns):
    """The out columns of a complete float32 sum."""
    c0, c1 = columns
    unit = np.float32(1)
    if spec.block_k is None:
        unit = np.float32(dots.unit(spec.dtypes))
        if spec.q.qdtype is not None:
            total = total * numerics.fixed_scale(spec.bound, spec.q.qdtype)
    if spec.q.scale_form == "column":
        total = total * (refs["rhs_scale"][0:1, c0:c1] * unit)
    elif unit != 1:
        total = total * unit
    if spec.row_scale:
        total = total * refs["row_column"][...]
    if spec.flat_scale:
        total = total * refs["flat_scale"][batch]
    refs["out"][:, c0:c1] = total.astype(spec.q.out_dtype)


def kernel(spec: Spec, names, *refs):
    refs = dict(zip(names, refs, strict=True))
    q, t = spec.q, spec.t
    table = Table(spec, refs["table"])
    v, kt = pl.program_id(1), pl.program_id(2)
    p = table.group(v)
    before = jnp.maximum(v - _I(1), _I(0))
    p_before = table.group(before)
    unit = table.unit(v, p)
    own = table.own(v, p)
    fresh = jnp.logical_or(v == _I(0), unit != table.unit(before, p_before))
    tile = unit - table.get(BATCH, p) * _I(spec.tiles)
    low = table.get(START, p) - tile * _I(t.tm)
    high = table.get(END, p) - tile * _I(t.tm)
    # Rows of the tile that exist; those past m are never stored.
    there = jnp.minimum(_I(q.m) - tile * _I(t.tm), _I(t.tm))
    whole = jnp.logical_and(low <= _I(0), high >= there)
    last = kt == _I(spec.k_tiles - 1)

    if spec.tail == "zero":

        @pl.when(jnp.logical_and(fresh, jnp.logical_and(jnp.logical_not(own & whole), last)))
        def _zero():
            refs["out"][...] = jnp.zeros((t.tm, t.tn), q.out_dtype)

    if spec.makes_rhs:
        changed = jnp.logical_or(v == _I(0), table.get(RHS, p) != table.get(RHS, p_before))
        if q.scale_form == "full":
            other = table.get(SCALE, p) != table.get(SCALE, p_before)
            changed = jnp.logical_or(changed, other)
        if spec.k_tiles > 1:
            changed = True

        @pl.when(jnp.logical_and(own, changed))
        def _weights():
            _make_rhs(spec, kt, refs)

    batch = table.get(BATCH, p)

    def some_rows(start, count):
        """Rows [start, start + count) of the tile."""
        here, first = pl.ds(start, count), pl.ds(0, count)
        views = {name: refs[name].at[here, :] for name in ("lhs", "out")}
        if spec.row_scale:
            # The scales lie along the lanes; products have their rows along the sublanes.
            views["row_column"] = refs["row_column"].at[here, :]
        if count < t.sub:
            views |= {n: refs[n].at[first, :] for n in ("kept", "ready", "acc") if n in refs}
            if "steps" in refs:
                views["steps"] = refs["steps"].at[:, first, :]
        some = refs | views
        # Where other groups have rows, or tail="zero" put zeros, these come back afterwards.
        cut = jnp.logical_or(start < low, start + _I(count) > jnp.minimum(high, there))
        if spec.tail != "zero":
            cut = jnp.logical_and(cut, jnp.logical_not(fresh))
        cut = jnp.logical_and(jnp.logical_and(cut, jnp.logical_not(whole)), last)

        @pl.when(cut)
        def _keep():
            some["kept"][...] = some["out"][...]

        sized = dataclasses.replace(spec, t=dataclasses.replace(t, sub=count))
        _multiply(sized, kt, some, batch, last)

        @pl.when(cut)
        def _restore():
            row = jax.lax.broadcasted_iota(jnp.int32, (count, t.tn), 0) + start
            mine = jnp.logical_and(row >= low, row < high)
            some["out"][...] = _select(mine, some["out"][...], some["kept"][...])

    @pl.when(own)
    def _visit():
        if spec.row_scale:
            refs["row_column"][...] = jnp.swapaxes(refs["row_scale"][...], 0, 1)
        if t.sub == t.tm:
            some_rows(0, t.sub)
        else:
            # From a row that float8 packing allows; the last run is moved back into the tile, and
            # short where half of its rows are enough.
            begin = jnp.bitwise_and(jnp.maximum(low, _I(0)), _I(-32))
            short = t.sub // 2
            left = jnp.minimum(high, there) - begin
            runs = jax.lax.div(left + _I(short - 1), _I(t.sub))

            def run(i, count):
                start = jnp.minimum(begin + i * _I(t.sub), _I(t.tm - count))
                some_rows(pl.multiple_of(start, 32), count)

            loop_from(_I(0), runs, lambda i: run(i, t.sub))
            pl.when(left > runs * _I(t.sub))(lambda: run(runs, short))


def _select(mask, a, b):
    """where(mask, a, b) by 32-bit selects, which every chip has."""
    dtype = a.dtype
    return jnp.where(mask, a.astype(jnp.float32), b.astype(jnp.float32)).astype(dtype)
