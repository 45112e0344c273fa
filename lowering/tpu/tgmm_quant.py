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
per output tile, which writes zeros and fetches nothing.

Rows. A row block starts at any row, a copy from HBM at a multiple of 32: the window of a visit is
the block plus 32 rows. Window row w goes to slab row w mod block_m, so that a full block fills its
slab exactly: the first 32 slab rows are a select between the window's first and last 32 rows, no
other row needs a mask, and the product contracts over block_m rows however the group is aligned.
A shorter block takes the smallest of a few slab lengths that holds it, masked by selects.

Visit v quantizes its windows into the slabs and multiplies the slabs of visit v - 1:

    S slab     [2, block_m, ts]        by the visit's parity
    R slab     [slots, block_m, tr]    a group of at most ``slots`` row blocks is quantized in its
                                       first S tile only and read from here in the others
    scales     of a: [2 | slots, tp, 128], a column, equal in all lanes; of b: [2 | slots, 1, tq]
    acc        [tp, tq] float32        sum over the row blocks (absent where one block is all)
    out        [tp, tq]                written back when the output tile changes
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import dots
from fp8moe_prims.lowering.tpu.chip import Chip

_LANES = 128
_ALIGN = 32  # rows of the widest packing (four float8 rows in each 32-bit word, eight sublanes)
_MAX_VISITS = 40000  # of one call: its five int32 tables must fit SMEM, 1 MiB on a v7x
_I32 = np.int32
_CHUNK = 512  # rows and columns of the output that one product makes, at most


# ---------------------------------------------------------------------------------------- tiles
@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one call is cut: see the module docstring.

    Attributes:
      block: rows of a row block, and of a slab (a multiple of 32).
      window: rows fetched for it; ``block`` where that is the whole array.
      resident_b: whether R is the operand b (the output's columns), else a.
      ts, tr: columns of a tile of S and of R.
      slots: row blocks in the R slab.
      vmem: the estimate, in bytes.
    """

    block: int
    window: int
    resident_b: bool
    ts: int
    tr: int
    slots: int
    vmem: int

    @property
    def tp(self) -> int:
        return self.ts if self.resident_b else self.tr

    @property
    def tq(self) -> int:
        return self.tr if self.resident_b else self.ts


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _widths(width: int, limit: int):
    """Tile widths for an operand of ``width`` columns: multiples of 128 that waste little."""
    whole = _round_up(width, _LANES) // _LANES
    seen = set()
    for count in range(1, whole + 1):
        lanes = -(-whole // count)
        if lanes > 2 and lanes % 2:  # pairs of 128 fill an MXU
            lanes += 1
        lanes = min(lanes, whole)
        if lanes not in seen and lanes * _LANES <= limit:
            seen.add(lanes)
            yield lanes * _LANES


def _chunk(width: int, limit: int) -> int:
    """The largest divisor of ``width`` that is a multiple of 128 and at most ``limit``."""
    whole = width // _LANES
    return max(d for d in range(1, whole + 1) if whole % d == 0 and d * _LANES <= limit) * _LANES


def choose_tiles(
    m, p, q, groups, block_m, a_bytes, b_bytes, slab_bytes, out_dtype, rows, scales, chip: Chip
) -> Tiles | None:
    """The cheapest tiles that fit the chip's VMEM by an estimate, or None.

    Args:
      m, p, q, groups: rows, output rows, output columns, groups.
      block_m: rows that share a scale, or None where no scale depends on the rows.
      a_bytes, b_bytes: bytes per element of the operands in HBM.
      slab_bytes: bytes per element in the slabs, of both operands.
      out_dtype: the output's dtype.
      rows: rows expected to be valid.
      scales: whether a and whether b have scales of their own per row block.
      chip: the target.
    """
    out_bytes = np.dtype(out_dtype).itemsize
    blocks = (block_m,) if block_m is not None else (1024, 512, 256, 128)
    blocks = sorted({min(b, _round_up(m, _ALIGN)) for b in blocks}, reverse=True)
    budget = int(chip.vmem_bytes * 0.92)
    best = None
    for block in blocks:
        accumulate = m > block and np.dtype(out_dtype) != np.float32
        per_group = max(1, math.ceil(rows / max(groups, 1) / block))
        for resident_b in (True, False):
            s_width, r_width = (p, q) if resident_b else (q, p)
            s_bytes, r_bytes = (a_bytes, b_bytes) if resident_b else (b_bytes, a_bytes)
            for tr in _widths(r_width, 8192):
                for ts in _widths(s_width, 8192):
                    tp, tq = (ts, tr) if resident_b else (tr, ts)
                    window = min(block + _ALIGN, _round_up(m, _ALIGN))
                    fixed = 2 * window * (ts * s_bytes + tr * r_bytes)
                    fixed += 2 * block * ts * slab_bytes
                    fixed += 2 * tp * tq * out_bytes + (tp * tq * 4 if accumulate else 0)
                    # one product and its operands as Mosaic may spell them out
                    chunk = _chunk(tp, _CHUNK) * _chunk(tq, _CHUNK)
                    part = (_chunk(tp, _CHUNK) + _chunk(tq, _CHUNK)) * block * slab_bytes
                    fixed += 3 * 4 * chunk + (3 if slab_bytes == 4 else 1) * part
                    fixed += (window + 2 * _LANES) * 4 * _LANES + (1 << 20)
                    a_column = tp * _LANES * 4 if scales[0] else 0
                    b_row = tq * 8 * 4 if scales[1] else 0
                    fixed += 2 * (a_column if resident_b else b_row)
                    slot = block * tr * slab_bytes + (b_row if resident_b else a_column)
                    slots = min((budget - fixed) // slot, max(2, _round_up(m, block) // block), 16)
                    if slots < 2:
                        continue
                    n_s, n_r = -(-s_width // ts), -(-r_width // tr)
                    r_reads = 1 if per_group <= slots else n_s
                    # cycles: the vector unit quantizes, the MXU multiplies, HBM carries
                    vector = rows * (s_width * n_r + r_width * r_reads) / 400
                    mxu = 2 * rows * n_s * ts * n_r * tr / chip.mxu_flops_per_cycle
                    hbm = (
                        rows * (s_width * n_r * s_bytes + r_width * r_reads * r_bytes)
                        + groups * p * q * out_bytes
                    ) / chip.hbm_bytes_per_cycle
                    visits = (per_group * groups) * n_s * n_r
                    cost = max(vector, hbm) + mxu + visits * 1000
                    cost += visits * tp * tq / 512  # the accumulator's loads and stores
                    key = (cost, -ts * tr)
                    if best is None or key < best[0]:
                        vmem = fixed + slots * slot
                        best = key, Tiles(block, window, resident_b, ts, tr, int(slots), int(vmem))
    return None if best is None else best[1]


# --------------------------------------------------------------------------------------- tables
def _tables(starts, ends, tiles: Tiles, n_s: int, n_r: int, limit: int):
    """The visits of units with rows [starts, ends), int32 [units] each.

    Returns the number of visits (fewer than limit) and the tables, int32 [limit] each: the unit;
    code = (R tile * n_s + S tile) << 18 | row block; the slot of the R slab; and the last visit up
    to here that fetches an S (an R) window, where the pipeline stays while nothing new is needed.
    """
    rows = jnp.maximum(ends - starts, _I32(0))
    blocks = (rows + _I32(tiles.block - 1)) // _I32(tiles.block)  # [units]
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
    hold_r = lax.cummax(jnp.where(fresh, v, _I32(0)))
    code = (tile << _I32(18)) | j
    return total, (unit, code, slot % _I32(tiles.slots), hold_s, hold_r)


# --------------------------------------------------------------------------------------- kernel
@dataclasses.dataclass(frozen=True)
class _Side:
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
class _Config:
    """What the kernel knows statically."""

    m: int
    tiles: Tiles
    a: _Side
    b: _Side
    out_dtype: object
    chip: Chip

    @property
    def lengths(self) -> tuple[int, ...]:
        """The slab lengths a block may take; the last one is the whole slab."""
        block = self.tiles.block
        return tuple(x for x in (128, 256, 512) if x < block) + (block,)

    @property
    def max_base(self) -> int:
        return _round_up(self.m, _ALIGN) - self.tiles.window


def _block_rows(c: _Config, unit, code, starts, ends):
    """First row, number of rows of the row block, and the 32-row tile its window starts at."""
    first = starts[unit] + (code & _I32((1 << 18) - 1)) * _I32(c.tiles.block)
    count = jnp.minimum(_I32(c.tiles.block), ends[unit] - first)
    base = jnp.minimum(first >> _I32(5), _I32(c.max_base // _ALIGN))
    return first, count, base


def _length_class(c: _Config, first, count):
    """Index into c.lengths of the shortest slab that holds the block; -1 for no rows."""
    used = (first & _I32(_ALIGN - 1)) + count
    kind = _I32(0)
    for length in c.lengths[:-1]:
        kind = kind + jnp.where(used > _I32(length), _I32(1), _I32(0))
    return jnp.where(count <= _I32(0), _I32(-1), kind)


def _index(x):
    """``x`` as int32, of a Python or a traced integer."""
    return _I32(x) if isinstance(x, int) else x


def _column(row):
    """[1, 128] -> [128, 128] with out[i, :] = row[0, i]."""
    return jnp.transpose(jnp.broadcast_to(row, (_LANES, _LANES)))


def _quantize(
    c: _Config, side: _Side, window, slab, scale, rowscale, full, first, count, base, length, shift
):
    """Writes one window, quantized, into a slab: returns (number of strips, loop body).

    Args:
      window: ref [window, t].
      slab: ref [block, t].
      scale: ref [t, 128] for the operand a, [1, t] for b, or None.
      rowscale: ref [window + 128 or more, 128], equal in all lanes, and its row for window row 0;
        or None.
      full: whether the row block is known to have all its rows, so that only the first 32 slab
        rows need a select. Else every row is selected, and the slab rows [0, length) that no
        valid row falls on become zero.
      first, count, base: see _block_rows.
      length: slab rows that the product will read (dynamic; unused where full).
      shift: the first of the window's columns that belongs to the tile.
    """
    block, width = c.tiles.block, window.shape[-1]
    low = first - base * _I32(_ALIGN)
    offset = 0
    if not full:
        # A short slab starts at the 32-row tile of its first valid row, or as far back as it must.
        most = (_I32(c.tiles.window) - length) >> _I32(5)
        offset = jnp.where(length < _I32(block), jnp.minimum(low >> _I32(5), most), _I32(0))
        offset = offset * _I32(_ALIGN)
        low = low - offset
    high = low + count

    def load(at, rows, column):
        """Window rows [at, at + rows) of a 128-column strip, float32, times their row scales."""
        if not isinstance(at, int):
            at = pl.multiple_of(at, _ALIGN)
        x = window[pl.ds(at, rows), pl.ds(column, _LANES)].astype(jnp.float32)
        if side.rowscale:
            ref, start = rowscale
            x = x * ref[pl.ds(pl.multiple_of(start + _index(at), _ALIGN), rows), :]
        return x

    def head(column):
        """Slab rows [0, 32), onto which the window's last 32 rows come round."""
        x = load(offset, _ALIGN, column)
        index = lax.broadcasted_iota(np.int32, (_ALIGN, _LANES), 0)
        keep = (index >= low) & (index < high)
        if c.tiles.window > block:
            x = jnp.where(index >= low, x, load(block, _ALIGN, column))
            keep = keep | (index + _I32(block) < high)
        return x if full else jnp.where(keep, x, jnp.zeros_like(x))

    def rest(row, rows, column):
        """Slab rows [row, row + rows), row >= 32."""
        if full:
            return load(row, rows, column)
        x = load(offset + _index(row), rows, column)
        index = lax.broadcasted_iota(np.int32, (rows, _LANES), 0) + _index(row)
        return jnp.where((index >= low) & (index < high), x, jnp.zeros_like(x))

    # Nothing to compute: rows of a full block go to the slab without a detour through float32.
    as_is = full and side.qdtype is None and not side.rowscale and window.dtype == side.slab
    if full:
        pieces = [(_ALIGN, min(256, block) - _ALIGN)]
        pieces += [(at, min(256, block - at)) for at in range(256, block, 256)]
    else:
        step = max(x for x in (128, 64, 32) if block % x == 0)
        pieces = [(_ALIGN, step - _ALIGN)]
    pieces = [x for x in pieces if x[1] > 0]

    def each(body, carry):
        """carry = body(first slab row, rows, carry) over the slab's rows from 32 on."""
        for row, rows in pieces:
            carry = body(row, rows, carry)
        if not full:

            def one(i, carry):
                return body(pl.multiple_of(i * _I32(step), step), step, carry)

            carry = lax.fori_loop(_I32(1), lax.div(length, _I32(step)), one, carry)
        return carry

    def strip(i):
        column = pl.multiple_of(i * _I32(_LANES), _LANES)
        source = pl.multiple_of(jnp.minimum(column + shift, _I32(width - _LANES)), _LANES)
        inverse = None
        if side.scaled:

            def largest(x, so_far):
                return jnp.maximum(so_far, jnp.max(jnp.abs(x), axis=0, keepdims=True))

            absmax = each(
                lambda row, rows, so_far: largest(rest(row, rows, source), so_far),
                largest(head(source), jnp.zeros((1, _LANES), jnp.float32)),
            )
            value = numerics.block_scale(absmax, side.qdtype)
            inverse = numerics.block_inverse(absmax, side.qdtype)
            if side.is_a:
                scale[pl.ds(column, _LANES), :] = _column(value)
            else:
                scale[:, pl.ds(column, _LANES)] = value
        elif side.qdtype is not None:
            fixed = numerics.fixed_scale(side.bound, side.qdtype)
            inverse = jnp.full((1, _LANES), np.float32(1.0) / fixed, jnp.float32)

        def store(row, rows, x):
            if side.qdtype is not None:
                x = dots.widen(numerics.round_to(x * inverse, side.qdtype), side.slab)
            slab[pl.ds(row, rows), pl.ds(column, _LANES)] = x.astype(side.slab)

        store(0, _ALIGN, head(source))

        def write(row, rows, carry):
            if as_is:
                slab[pl.ds(row, rows), pl.ds(column, _LANES)] = window[
                    pl.ds(row, rows), pl.ds(source, _LANES)
                ]
            else:
                store(row, rows, rest(row, rows, source))
            return carry

        each(write, _I32(0))

    return width // _LANES, strip


def _product(c: _Config, a, b, a_scale, b_scale, acc, out, length, is_first):
    """out = (acc unless is_first) + a[:length]^T b[:length] * scales.

    Returns (number of chunks of the output tile, loop body).
    """
    tp, tq = out.shape
    cp, cq = _chunk(tp, _CHUNK), _chunk(tq, _CHUNK)
    fixed = np.float32(1.0)
    for side in (c.a, c.b):
        if side.bound is not None and side.qdtype is not None:
            fixed = np.float32(fixed * numerics.fixed_scale(side.bound, side.qdtype))

    def chunk(i):
        row = pl.multiple_of((i // _I32(tq // cq)) * _I32(cp), _LANES)
        column = pl.multiple_of((i % _I32(tq // cq)) * _I32(cq), _LANES)
        rows, columns = pl.ds(row, cp), pl.ds(column, cq)
        x = dots.dot(
            a[pl.ds(0, length), rows],
            b[pl.ds(0, length), columns],
            (((0,), (0,)), ((), ())),
            c.chip,
        )
        if fixed != 1.0:
            x = x * fixed
        if b_scale is not None:
            x = x * b_scale[:, columns]
        if a_scale is not None:
            x = x * jnp.concatenate([a_scale[rows, :]] * (cq // _LANES), axis=1)
        if acc is not None:
            x = x + jnp.where(is_first, jnp.zeros_like(x), acc[rows, columns])
            acc[rows, columns] = x
        if acc is not out:
            out[rows, columns] = x.astype(out.dtype)

    return (tp // cp) * (tq // cq), chunk


def _run(*tasks):
    """Runs (count, body) tasks in one loop, in equal shares, so that the scheduler can mix them."""
    trips = math.gcd(*(count for count, _ in tasks))

    def step(_, i):
        for count, body in tasks:
            share = count // trips
            for part in range(share):
                body(i * _I32(share) + _I32(part))
        return i + _I32(1)

    # The loop's own counter is an int64 where x64 is on, which Mosaic cannot cast.
    lax.fori_loop(0, trips, step, _I32(0))


def _kernel(c: _Config, shifts, tables, operands, out, scratch):
    unit, code, slot, _, hold_r, starts, ends = tables[:7]
    v, visits = pl.program_id(0), pl.num_programs(0) - 1
    sides = {side.resident: side for side in (c.a, c.b)}  # by role: R, S

    def buffers(role, v):
        """The slab and the scale of a role for visit v."""
        index = slot[v] if role else v & _I32(1)
        scale = scratch["scale", role]
        return scratch["slab", role].at[index], None if scale is None else scale.at[index]

    # The product of visit v - 1.
    w = jnp.maximum(v - _I32(1), _I32(0))
    first, count, _ = _block_rows(c, unit[w], code[w], starts, ends)
    count = jnp.where(v > _I32(0), count, _I32(0))
    kind = _length_class(c, first, count)
    is_first = (code[w] & _I32((1 << 18) - 1)) == _I32(0)
    (a, a_scale), (b, b_scale) = (buffers(side.resident, w) for side in (c.a, c.b))
    acc = scratch["acc"]
    if acc is None and c.m > c.tiles.block:
        acc = out  # a float32 output block is its own accumulator
    product = functools.partial(_product, c, a, b, a_scale, b_scale, acc, out)

    # The windows of visit v.
    new_first, new_count, base = _block_rows(c, unit[v], code[v], starts, ends)
    new_count = jnp.where(v < visits, new_count, _I32(0))
    new_kind = _length_class(c, new_first, new_count)
    length = _I32(c.lengths[-1])
    for i, value in enumerate(c.lengths[:-1]):
        length = jnp.where(new_kind == _I32(i), _I32(value), length)
    new_full = new_count == _I32(c.tiles.block)
    fresh = (new_count > _I32(0)) & (hold_r[v] == v)
    columns = scratch["rowscale"]

    def quantize(role, full):
        slab, scale = buffers(role, v)
        start = (base & _I32(3)) * _I32(_ALIGN)
        return _quantize(
            c,
            sides[role],
            operands[role],
            slab,
            scale,
            (columns, start),
            full,
            new_first,
            new_count,
            base,
            length,
            shifts[role](code[v]),
        )

    if columns is not None:
        role = c.a.resident if c.a.rowscale else c.b.resident

        @pl.when(fresh if role else new_count > _I32(0))
        def _turn():
            for i in range(columns.shape[0] // _LANES):
                part = pl.ds(i * _LANES, _LANES)
                columns[part, :] = _column(operands["rowscale"][:, part])

    if c.m >= c.tiles.block:
        pl.when(fresh & new_full)(lambda: _run(quantize(True, True)))
    pl.when(fresh & ~new_full)(lambda: _run(quantize(True, False)))

    # Two full row blocks in a row: the vector unit quantizes the new one under the product.
    both = jnp.bool_(False)
    if c.m > c.tiles.block:
        both = new_full & (count == _I32(c.tiles.block))
        pl.when(both)(lambda: _run(product(c.tiles.block, is_first), quantize(False, True)))

    pl.when((v > _I32(0)) & (kind < _I32(0)))(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    for i, value in enumerate(c.lengths):
        pl.when((kind == _I32(i)) & ~both)(lambda value=value: _run(product(value, is_first)))
    if c.m >= c.tiles.block:
        pl.when(new_full & ~both)(lambda: _run(quantize(False, True)))
    pl.when((new_count > _I32(0)) & ~new_full)(lambda: _run(quantize(False, False)))


# ----------------------------------------------------------------------------------------- call
def _flat_map(batch, full):
    """int32 [prod(full)]: which flat batch index of an operand serves each one of the output."""
    index = np.arange(math.prod(batch), dtype=np.int32).reshape(batch)
    return np.broadcast_to(index, full).reshape(-1)


def _call(
    c: _Config, blocks, starts, ends, maps, *, lhs, dout, lhs_scale, transpose, expected, interpret
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
    visits, tables = _tables(starts, ends, tiles, n_s, n_r, limit)
    lhs_map, dout_map, scale_map = maps
    lhs_resident = lhs_is_a != tiles.resident_b
    window = tiles.window

    def columns(role, tile):
        """First window strip of a tile, and how far right of it the tile's columns begin.

        The last window ends with the array, so that it may start before its tile does.
        """
        array, width = (r, tiles.tr) if role else (s, tiles.ts)
        last = -(-array.shape[2] // _LANES) - width // _LANES
        start = tile * _I32(width // _LANES)
        strip = jnp.minimum(start, _I32(last))
        return strip, (start - strip) * _I32(_LANES)

    def tile_of(role, code):
        tile = code >> _I32(18)
        return tile // _I32(n_s) if role else tile % _I32(n_s)

    def fetch(role, v, refs):
        """Unit, tile of the role, and first 32-row tile of the window in VMEM at visit v."""
        unit, code, _, hold_s, hold_r, starts, ends = refs[:7]
        w = (hold_r if role else hold_s)[v]
        _, _, base = _block_rows(c, unit[w], code[w], starts, ends)
        return unit[w], tile_of(role, code[w]), base

    def operand_spec(role, array):
        width = tiles.tr if role else tiles.ts
        table = 7 if role == lhs_resident else 8
        # Within the padding that the layout in HBM has anyway; more would be a copy outside.
        row_pad = -array.shape[1] % _ALIGN
        col_pad = -array.shape[2] % _LANES

        def index(v, *refs):
            unit, tile, base = fetch(role, v, refs)
            return refs[table][unit], base * _I32(_ALIGN), columns(role, tile)[0] * _I32(_LANES)

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
        lanes = _round_up(window, _LANES) + _LANES
        total = _round_up(c.m, _LANES) + 2 * _LANES
        arrays["rowscale"] = jnp.pad(lhs_scale, ((0, 0), (0, 0), (0, total - c.m)))

        def scale_index(v, *refs):
            unit, _, base = fetch(not lhs_resident, v, refs)
            return refs[9][unit], _I32(0), (base >> _I32(2)) * _I32(_LANES)

        specs["rowscale"] = pl.BlockSpec((None, pl.Element(1), pl.Element(lanes)), scale_index)
    keys = list(specs)

    shapes = {}
    for side in (c.a, c.b):
        role = side.resident
        depth, width = (tiles.slots, tiles.tr) if role else (2, tiles.ts)
        shapes["slab", role] = pltpu.VMEM((depth, tiles.block, width), side.slab)
        if side.scaled:
            shape = (depth, width, _LANES) if side.is_a else (depth, 1, width)
            shapes["scale", role] = pltpu.VMEM(shape, jnp.float32)
    if c.m > tiles.block and np.dtype(c.out_dtype) != np.float32:
        shapes["acc"] = pltpu.VMEM((tiles.tp, tiles.tq), jnp.float32)
    if lhs_scale is not None:
        shapes["rowscale"] = pltpu.VMEM((lanes, _LANES), jnp.float32)
    names = list(shapes)

    scalars = (*tables, starts, ends, lhs_map, dout_map, scale_map)

    shifts = {
        role: lambda code, role=role: columns(role, tile_of(role, code))[1]
        for role in (True, False)
    }

    def body(*refs):
        prefetch, refs = refs[: len(scalars)], refs[len(scalars) :]
        operands = dict(zip(keys, refs[: len(keys)], strict=True))
        out = refs[len(keys)]
        scratch = dict.fromkeys([("scale", True), ("scale", False), "acc", "rowscale"]) | dict(
            zip(names, refs[len(keys) + 1 :], strict=True)
        )
        _kernel(c, shifts, prefetch, operands, out, scratch)

    item = np.dtype(c.out_dtype).itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((units, rows_p, cols_q), c.out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(visits + _I32(1),),
            in_specs=[specs[key] for key in keys],
            out_specs=pl.BlockSpec((None, tiles.tp, tiles.tq), out_index),
            scratch_shapes=[shapes[name] for name in names],
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
    lhs_map, dout_map = _flat_map(lhs.shape[:-2], batch), _flat_map(dout.shape[:-2], batch)
    scale, scale_map = None, np.zeros_like(lhs_map)
    if x.lhs_scale is not None:
        scale_map = _flat_map(x.lhs_scale.shape[:-2], batch)
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
    tiles = choose_tiles(
        m,
        arrays[0].shape[-1],
        arrays[1].shape[-1],
        units,
        p.block_m if any(scales) else None,
        arrays[0].dtype.itemsize,
        arrays[1].dtype.itemsize,
        np.dtype(slabs[0]).itemsize,
        out_dtype,
        rows,
        scales,
        chip,
    )
    if tiles is None:
        raise NotImplementedError(
            f"tgmm_quant: block_m={p.block_m} with k={k}, n={n} does not fit the VMEM of "
            f"{chip.name}; use a smaller block_m."
        )
    a, b = (
        _Side(**s, is_a=i == 0, resident=tiles.resident_b == (i == 1)) for i, s in enumerate(sides)
    )
    c = _Config(m, tiles, a, b, out_dtype, chip)

    # All batch elements in one call; one after the other where its tables would be too long.
    blocks = m // tiles.block + g  # row blocks of one batch element, at most
    p_width, q_width = (y.shape[-1] for y in arrays)
    tile_count = -(-p_width // tiles.tp) * -(-q_width // tiles.tq)
    count = math.prod(batch)
    call = functools.partial(
        _call,
        c,
        lhs=lhs,
        dout=dout,
        lhs_scale=scale,
        transpose=p.transpose_out,
        interpret=interpret,
    )
    if count == 1 or count * blocks * tile_count <= _MAX_VISITS:
        out = call(count * blocks, starts, ends, maps, expected=rows)
    else:
        each = [y.reshape(count, g) for y in (starts, ends, *maps)]
        out = lax.map(
            lambda y: call(blocks, y[0], y[1], y[2:], expected=rows // count), tuple(each)
        )
    return out.reshape(out_shape)
