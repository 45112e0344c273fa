"""Combine on TPU: out[b, t] = sum over j of weights[b, t, j] * y[b, indices[b, t, j]].

    y [*by, m, d], y_scale None | float32 [*by, m | 1, 1], indices int32 [*bi, t, top_k],
    start, end int32 [*bs]  ->  out [*B, t, d]

over the j with start <= indices < end, in float32, in the order of j. `ragged_gather_dot` shares
the kernel; its result is the dot product of each of these rows with a row of a [*ba, t, d].

Slots. The valid j of a token are moved to its first slots, in order, by XLA operations on
[t, top_k] numbers; so a token costs what it has valid rows, and the order of the sum stays. The
grid is (B, tiles of ``tile`` tokens). A step starts the copies of the next tile's rows, one per
slot in use, waits for its own, and goes through groups of 8, 16 or 32 tokens (what fills a register
of the types involved); a group takes the body for the most slots that any of its tokens uses:

    for each chunk of 128 words:    for each slot:   sum += where(used, value, 0) * weight

    table      SMEM int32 [1, 1, top_k * tile + groups + 1]   of this tile and of the next one:
               source row of slot s of token i at s * tile + i, or -1; the most slots that a token
               of each group uses; the copies of the tile
    columns    float32 [1, 1 + top_k (to 8), 128]   tokens along lanes: how many slots each uses,
               and at bit 8 + s whether slot s is the odd row of its pair; the slots' weights.
               Transposed in scratch for the kernel, as the dot products are on the way out
    buffer     [2 * top_k * tile slots, ...]      rows as fetched, by the step's parity

y is the big buffer and must not be relaid out: float32 and bfloat16 rows are fetched from it as it
is, 4 d bytes a row (see rows.py). 1-byte rows, and where d is not a multiple of 128 or m of 8 or
each row has a scale, go through row words of the rows in [start, end): 3 d bytes a row of float8.
float16 is widened to float32 first, by XLA, all of it: Mosaic has no such type.

On v7x with d = 7168, bfloat16 and top_k 8 in full use, a row takes 8 cycles of scalar work to start
its copy and 10 of vector work; HBM takes 18, the output's share included.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import rows
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, flat_map, round_up

_I32 = np.int32


@dataclasses.dataclass(frozen=True)
class _Config:
    """The static part of a call.

    Attributes:
      w: the layout of a row of y.
      top_k: indices of a token.
      tile: tokens of a grid step.
      group: tokens that are handled together.
      dot: whether rows of a are multiplied, instead of weights.
      weighted: whether there are weights.
      tensor_scale: whether one scale holds for all of y.
      interpret: passed to pallas_call.
    """

    w: rows.Words
    top_k: int
    tile: int
    group: int
    dot: bool
    weighted: bool
    tensor_scale: bool
    interpret: object

    @property
    def classes(self) -> tuple[int, ...]:
        """Slots that a body may handle."""
        return tuple(s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s < self.top_k) + (self.top_k,)

    @property
    def parts(self) -> int:
        """Column blocks in a chunk."""
        return 1 if self.w.direct else self.w.per

    @property
    def table_width(self) -> int:
        return self.top_k * self.tile + self.tile // self.group + 1

    @property
    def columns_height(self) -> int:
        return round_up(1 + self.top_k, 8)


def _start_tile(c: _Config, table, source, buffer, slot, semaphore):
    """Starts the copies of one tile's rows to the slots from ``slot``."""

    def group(g, carry):
        def one(s, carry):
            first = s * _I32(c.tile) + g * _I32(c.group)
            for u in range(c.group):
                at = first + _I32(u)
                row = table[0, 0, at]

                @pl.when(row >= _I32(0))
                def _copy(at=at, row=row):
                    rows.start_row(c.w, source, row, buffer, slot + at, semaphore)

            return carry

        return lax.fori_loop(_I32(0), table[0, 0, _I32(c.top_k * c.tile) + g], one, carry)

    lax.fori_loop(_I32(0), _I32(c.tile // c.group), group, _I32(0))


def _values(c: _Config, buffer, slot, chunk, mask, shift):
    """float32 [group, 128] per column block of a chunk, of the rows in consecutive slots.

    Bits outside ``mask``, int32 [group, 128] of all bits or none, are zeroed: a buffer holds
    anything where no row was fetched.
    """
    w = c.w
    as_float = lambda bits: pltpu.bitcast(bits & mask, jnp.float32)
    if w.per == 4:
        parts = [[] for _ in range(4)]
        for first in range(0, c.group, w.group):
            words = [rows.load_words(w, buffer, slot + _I32(first + b), chunk, 4) for b in range(4)]
            for q, bits in enumerate(rows.exchange(words)):
                parts[q].append(pltpu.bitcast(bits, w.dtype).astype(jnp.float32))
        return [as_float(pltpu.bitcast(_joined(p), jnp.int32)) for p in parts]
    words = _joined(
        [rows.load_words(w, buffer, slot + _I32(first), chunk) for first in range(0, c.group, 8)]
    )
    if w.per == 1:
        return [as_float(words)]
    if w.paired:  # the mask is that of the high half
        return [as_float(words << shift)]
    return [as_float(words << _I32(16)), as_float(words)]


def _unrolled(count: int, body, carry):
    """A loop over range(count), several turns at a time: one alone waits for its chain of sums."""
    times = next(u for u in (4, 3, 2, 1) if count % u == 0)

    def turns(i, carry):
        for u in range(times):
            carry = body(i * _I32(times) + _I32(u), carry)
        return carry

    return lax.fori_loop(_I32(0), _I32(count // times), turns, carry)


def _joined(parts):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _row_scale(c: _Config, buffer, slot):
    """float32 [group, 128], equal in all lanes."""
    parts = [
        rows.load_words(c.w, buffer, slot + _I32(first), c.w.chunks)
        for first in range(0, c.group, 8)
    ]
    return pltpu.bitcast(_joined(parts), jnp.float32)


def _body(c: _Config, slots: int, buffer, slot, row, columns, a, scale, out):
    """The tokens [row, row + group) of a tile, of which none uses more than ``slots`` slots."""
    w, tokens = c.w, pl.ds(row, c.group)
    lanes = lambda v: jnp.broadcast_to(v, (c.group, LANES))
    table = columns[tokens, :]
    column = lambda i: lanes(table[:, i : i + 1])
    word = column(0).astype(jnp.int32)
    count = word & _I32(255)
    used = [count > _I32(s) for s in range(slots)]
    at = [slot + _I32(s * c.tile) + row for s in range(slots)]
    factors = [column(1 + s) for s in range(slots)] if c.weighted else None
    scales, shifts = None, [None] * slots
    if w.scaled:
        scales = [_row_scale(c, buffer, s) for s in at]
        scales = [jnp.where(u, s, jnp.zeros_like(s)) for u, s in zip(used, scales, strict=True)]
    elif c.tensor_scale:
        scales = [jnp.full((c.group, LANES), scale, jnp.float32)] * slots
    if w.paired:
        # 16 brings the even row of a pair to the high half of its word.
        shifts = [(~word >> _I32(4 + s)) & _I32(16) for s in range(slots)]
    bits = _I32(-0x10000 if w.per == 2 else -1)
    masks = [jnp.where(u, bits, _I32(0)) for u in used]

    def values(s, chunk):
        for q, v in enumerate(_values(c, buffer, at[s], chunk, masks[s], shifts[s])):
            yield q, v if scales is None else v * scales[s]

    def block(q, chunk):
        return pl.ds(pl.multiple_of((chunk + _I32(q * w.chunks)) * _I32(LANES), LANES), LANES)

    def each_block(chunk, do):
        """Calls do(q) for the blocks of a chunk that exist."""
        for q in range(c.parts):
            if (q + 1) * w.chunks <= w.blocks:
                do(q)
            elif q * w.chunks < w.blocks:
                pl.when(chunk < _I32(w.blocks - q * w.chunks))(lambda q=q: do(q))

    def reduce(chunk, carry):
        total = [jnp.zeros((c.group, LANES), jnp.float32)] * c.parts
        for s in range(slots):
            for q, v in values(s, chunk):
                total[q] = total[q] + (v if factors is None else v * factors[s])

        def store(q):
            x = total[q]
            one_byte = np.dtype(out.dtype).itemsize == 1
            x = numerics.round_to(x, out.dtype) if one_byte else x.astype(out.dtype)
            out[tokens, block(q, chunk)] = x

        each_block(chunk, store)
        return carry

    def dot(chunk, sums):
        sums = list(sums)
        own = []
        for q in range(c.parts):
            block = jnp.minimum(chunk + _I32(q * w.chunks), _I32(w.blocks - 1))
            at = pl.ds(pl.multiple_of(block * _I32(LANES), LANES), LANES)
            x = a[tokens, at].astype(jnp.float32)
            if w.d % (c.parts * w.chunks * LANES):
                lane = lax.broadcasted_iota(jnp.int32, (c.group, LANES), 1)
                left = _I32(w.d) - (chunk + _I32(q * w.chunks)) * _I32(LANES)
                own.append((x, lane < left))
            else:
                own.append((x, None))
        for s in range(slots):
            for q, v in values(s, chunk):
                x, mask = own[q]
                product = x * v
                if mask is not None:
                    product = jnp.where(mask, product, jnp.zeros_like(product))
                sums[s] = sums[s] + product
        return tuple(sums)

    if c.dot:
        zero = (jnp.zeros((c.group, LANES), jnp.float32),) * slots
        sums = _unrolled(w.chunks, dot, zero)
        width = out.shape[1]
        place = lax.broadcasted_iota(jnp.int32, (c.group, width), 1)
        result = jnp.zeros((c.group, width), jnp.float32)
        for s in range(slots):
            total = jnp.broadcast_to(jnp.sum(sums[s], axis=1, keepdims=True), result.shape)
            # A NaN of a is none of a slot that is not used.
            here = (place == _I32(s)) & (count[:, :width] > _I32(s))
            result = jnp.where(here, total, result)
        out[tokens, :] = result
    else:
        _unrolled(w.chunks, reduce, _I32(0))


def _kernel(
    c: _Config,
    size,
    tiles,
    scale_of,
    scale,
    here,
    following,
    columns,
    a,
    source,
    out,
    buffer,
    semaphores,
    turned,
    dots=None,
):
    b, i = pl.program_id(0), pl.program_id(1)
    step = b * _I32(tiles) + i
    half = step & _I32(1)
    per_half = c.top_k * c.tile

    def start_tile(table, half):
        _start_tile(c, table, source, buffer, half * _I32(per_half), semaphores.at[half])

    @pl.when(step == _I32(0))
    def _first():
        start_tile(here, half)

    @pl.when(step + _I32(1) < _I32(size * tiles))
    def _ahead():
        start_tile(following, _I32(1) - half)

    rows.wait_rows(c.w, here[0, 0, c.table_width - 1], per_half, buffer, semaphores.at[half])
    readable = rows.readable(c.w, buffer, c.interpret)
    tensor_scale = scale[scale_of[b]] if c.tensor_scale else None
    turned[...] = jnp.transpose(columns[0])
    result = dots if c.dot else out

    def group(g, carry):
        row = pl.multiple_of(g * _I32(c.group), c.group)
        most = here[0, 0, _I32(c.top_k * c.tile) + g]

        @pl.when(most == _I32(0))
        def _zero():
            part = result.at[pl.ds(row, c.group), :]
            part[...] = jnp.zeros_like(part)

        low = 0
        for slots in c.classes:

            @pl.when((most > _I32(low)) & (most <= _I32(slots)))
            def _some(slots=slots):
                _body(
                    c, slots, readable, half * _I32(per_half), row, turned, a, tensor_scale, result
                )

            low = slots
        return carry

    lax.fori_loop(_I32(0), _I32(c.tile // c.group), group, _I32(0))
    if c.dot:
        out[0] = jnp.transpose(dots[...])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which rows each tile of tokens reads; the layout is [B, tiles, top_k, tile] throughout.

    Attributes:
      table: int32 [B * tiles, 1, width], see the module docstring.
      columns: float32 [B * tiles, height, 128], see the module docstring.
      place: int32 [B, tiles, top_k, tile], the slot of each j, -1 where it has none.
    """

    table: jax.Array
    columns: jax.Array
    place: jax.Array


def _by_tile(v, tile: int, fill):
    """[B, t, top_k] -> [B, tiles, top_k, tile]."""
    batches, t, top_k = v.shape
    tiles = -(-t // tile)
    v = jnp.pad(v, ((0, 0), (0, tiles * tile - t), (0, 0)), constant_values=fill)
    return jnp.swapaxes(v.reshape(batches, tiles, tile, top_k), 2, 3)


def _plan(c, index, weights, start, end, base) -> _Plan:
    """The valid j of each token moved to its first slots, in order."""
    index = _by_tile(index, c.tile, _I32(-1))
    size, tiles, top_k, tile = index.shape
    outer = lambda v: v[:, None, None, None]
    valid = (index >= outer(start)) & (index < outer(end))
    before = lax.broadcasted_iota(jnp.int32, (1, 1, top_k, top_k, 1), 2) > (
        lax.broadcasted_iota(jnp.int32, (1, 1, top_k, top_k, 1), 3)
    )
    ones = valid.astype(jnp.int32)
    rank = jnp.sum(jnp.where(before, ones[:, :, None], _I32(0)), axis=3, dtype=jnp.int32)
    place = jnp.where(valid, rank, _I32(-1))  # [B, tiles, j, tile]
    slot = lax.broadcasted_iota(jnp.int32, (1, 1, top_k, 1, 1), 2)
    chosen = place[:, :, None] == slot  # [B, tiles, slot, j, tile]

    def pick(v):
        return jnp.sum(
            jnp.where(chosen, v[:, :, None], jnp.zeros((), v.dtype)), axis=3, dtype=v.dtype
        )

    row = pick(index + outer(base) + _I32(1)) - _I32(1)  # -1 where the slot is not used
    counts = jnp.sum(ones, axis=2, dtype=jnp.int32)  # [B, tiles, tile]
    by_group = counts.reshape(size, tiles, tile // c.group, c.group)
    table = jnp.concatenate(
        [
            row.reshape(size, tiles, top_k * tile),
            jnp.max(by_group, axis=3),
            jnp.sum(by_group, axis=(2, 3), dtype=jnp.int32)[..., None],
        ],
        axis=2,
    ).reshape(size * tiles, 1, c.table_width)

    word = counts[:, :, None]
    if c.w.paired:
        odd = (row & _I32(1)) << (lax.broadcasted_iota(jnp.int32, (1, 1, top_k, 1), 2) + _I32(8))
        odd = jnp.where(row >= _I32(0), odd, _I32(0))
        word = word + jnp.sum(odd, axis=2, keepdims=True, dtype=jnp.int32)
    columns = [word.astype(jnp.float32)]
    if weights is not None:
        columns.append(pick(_by_tile(weights, tile, np.float32(0))))
    columns = jnp.concatenate(columns, axis=2)
    pad = ((0, 0), (0, 0), (0, c.columns_height - columns.shape[2]), (0, LANES - tile))
    columns = jnp.pad(columns, pad).reshape(size * tiles, c.columns_height, LANES)
    return _Plan(table, columns, place)


def over_tokens(x, weights, a, out_dtype, expected_rows, chip: Chip, interpret):
    """[*B, t, d], or the dot products with a, float32 [*B, t, top_k].

    Args:
      x: has y, y_scale, indices, start and end.
      weights: None or [*bw, t, top_k].
      a: None, or [*ba, t, d] for the dot products.
      out_dtype: of the sums.
      expected_rows: rows of y for the cost estimate, None: all that are named.
      chip, interpret: as everywhere.
    """
    *y_lead, m, d = x.y.shape
    *index_lead, t, top_k = x.indices.shape
    leads = [y_lead, index_lead, x.start.shape, x.end.shape]
    leads += [] if weights is None else [weights.shape[:-2]]
    leads += [] if a is None else [a.shape[:-2]]
    leads += [] if x.y_scale is None else [x.y_scale.shape[:-2]]
    batch = np.broadcast_shapes(*leads)
    size = math.prod(batch)
    dot = a is not None
    out_shape = (*batch, t, top_k if dot else d)
    if 0 in (size, m, t, d, top_k):
        return jnp.zeros(out_shape, out_dtype)

    full = lambda v, *tail: jnp.broadcast_to(v, (*batch, *tail)).reshape(size, *tail)
    start, end = (full(v.astype(jnp.int32)) for v in (x.start, x.end))
    index = full(x.indices.astype(jnp.int32), t, top_k)
    if weights is not None:
        weights = full(weights.astype(jnp.float32), t, top_k)

    y, scale, row_scaled = x.y, x.y_scale, False
    if scale is not None:
        row_scaled = scale.shape[-2] != 1
        lead = np.broadcast_shapes(y_lead, scale.shape[:-2])
        if row_scaled:
            scale = jnp.broadcast_to(scale, (*lead, m, 1)).reshape(-1, m)
            y, y_lead = jnp.broadcast_to(y, (*lead, m, d)), lead
    if y.dtype == np.float16:
        y = y.astype(jnp.float32)  # Mosaic has no float16
    y = y.reshape(-1, m, d)
    w = rows.Words(
        np.dtype(y.dtype), d, row_scaled, rows.can_be_direct(y.dtype, y.shape, row_scaled)
    )
    named = min(size * t * top_k, size * m) if expected_rows is None else int(expected_rows)
    if w.direct:
        source, padded = rows.direct_view(y), m
    else:
        low, high = _covered(start, end, batch, tuple(y_lead), m)
        source, padded = rows.pack(
            w, y, scale if row_scaled else None, low, high, named, chip, interpret
        )
    base = flat_map(tuple(y_lead), batch) * _I32(padded)
    tensor = jnp.zeros((1,), jnp.float32)
    scale_of = jnp.zeros((size,), jnp.int32)
    if scale is not None and not row_scaled:
        tensor = scale.reshape(-1).astype(jnp.float32)
        scale_of = jnp.asarray(flat_map(scale.shape[:-2], batch))

    a_map = None
    if dot:
        a_map = jnp.asarray(flat_map(a.shape[:-2], batch))
        a = a.astype(jnp.float32) if a.dtype == np.float16 else a
        a = a.reshape(-1, t, d)
    narrow = np.dtype(np.float32) if dot else np.dtype(out_dtype)
    narrow = np.dtype(np.float32) if narrow == np.float16 else narrow
    types = [w.dtype, narrow] + ([np.dtype(a.dtype)] if dot else [])
    full_group = max(32 // v.itemsize for v in types)
    own = d * np.dtype(a.dtype).itemsize if dot else d * narrow.itemsize
    token_bytes = 8 * top_k * w.pitch * LANES + 2 * own + 4096
    # A group may be half a register of 16-bit values, if need be.
    tries = [(full_group, 32), (full_group, full_group)] + [(8, 8)] * (full_group == 16)
    for choice in tries:
        group, least = choice
        tile = rows.tile_of(t, token_bytes, chip, 128, least)
        if tile is not None:
            break
    else:
        raise rows.too_wide(f"ragged_gather_reduce, {top_k} a token", d, chip)
    tiles = -(-t // tile)
    c = _Config(
        w,
        top_k,
        tile,
        group,
        dot,
        weights is not None,
        scale is not None and not row_scaled,
        interpret,
    )

    plan = _plan(c, index, weights, start, end, jnp.asarray(base))
    out = _call(c, size, tiles, t, scale_of, tensor, plan, a, a_map, source, narrow, named, chip)
    if dot:
        # Slot s back to the j that it came from.
        out = out[:, :top_k, :tile].reshape(size, tiles, top_k, tile)
        slot = lax.broadcasted_iota(jnp.int32, (1, 1, 1, top_k, 1), 3)
        chosen = plan.place[:, :, :, None] == slot  # [B, tiles, j, slot, tile]
        out = jnp.sum(jnp.where(chosen, out[:, :, None], np.float32(0)), axis=3)
        out = jnp.swapaxes(out, 2, 3).reshape(size, tiles * tile, top_k)[:, :t]
    return out.reshape(out_shape).astype(out_dtype)


def _covered(start, end, batch, y_lead, m):
    """The rows of each y that some batch element's range covers: start, end int32 [By]."""
    y_lead = (1,) * (len(batch) - len(y_lead)) + y_lead
    axes = tuple(i for i, n in enumerate(y_lead) if n == 1)
    some = end > start
    low = jnp.min(jnp.where(some, start, _I32(m)).reshape(batch), axis=axes).reshape(-1)
    high = jnp.max(jnp.where(some, end, _I32(0)).reshape(batch), axis=axes).reshape(-1)
    return jnp.minimum(low, high), high


def _call(
    c: _Config,
    size,
    tiles,
    t,
    scale_of,
    scale,
    plan: _Plan,
    a,
    a_map,
    source,
    out_dtype,
    expected,
    chip,
):
    """The kernel over flat batches: [B, t, d], or the dot products like ``plan.columns``."""
    w = c.w
    if a_map is None:
        a_map = jnp.zeros((size,), jnp.int32)

    def block(b, i, *_):
        return b * _I32(tiles) + i, _I32(0), _I32(0)

    def next_block(b, i, *_):
        return jnp.minimum(b * _I32(tiles) + i + _I32(1), _I32(size * tiles - 1)), _I32(0), _I32(0)

    tokens = lambda b, i, *_: (b, i, _I32(0))
    in_specs = [
        pl.BlockSpec((1, 1, c.table_width), block, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, c.table_width), next_block, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, c.columns_height, LANES), block),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [plan.table, plan.table, plan.columns, source]
    if c.dot:
        in_specs.append(
            pl.BlockSpec((None, c.tile, w.width), lambda b, i, *s: (s[1][b], i, _I32(0)))
        )
        operands.append(a)
    scratch = [
        rows.buffer_shape(w, 2 * c.top_k * c.tile),
        pltpu.SemaphoreType.DMA((2,)),
    ] + [pltpu.VMEM((LANES, c.columns_height), jnp.float32)] * (1 + c.dot)
    if c.dot:
        out_shape = jax.ShapeDtypeStruct(plan.columns.shape, jnp.float32)
        out_spec = pl.BlockSpec((1, c.columns_height, LANES), block)
    else:
        out_shape = jax.ShapeDtypeStruct((size, t, w.d), out_dtype)
        out_spec = pl.BlockSpec((None, c.tile, w.width), tokens)

    def body(scale_of, a_map, scale, here, following, columns, source, *refs):
        refs = list(refs)
        own = refs.pop(0) if c.dot else None
        _kernel(c, size, tiles, scale_of, scale, here, following, columns, own, source, *refs)

    item = np.dtype(out_dtype).itemsize
    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(size, tiles),
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes,
            disable_bounds_checks=True,  # of each row's copy; the rows are within by construction
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * expected * w.d,
            bytes_accessed=expected * w.row_bytes
            + size * t * w.d * (a.dtype.itemsize if c.dot else item),
            transcendentals=0,
        ),
        name="fp8moe_ragged_gather_dot" if c.dot else "fp8moe_ragged_gather_reduce",
        interpret=c.interpret,
    )(scale_of, a_map, scale, *operands)


def ragged_gather_reduce(x, p, *, chip: Chip, interpret=False) -> jax.Array:
    """The weighted sum of each token's rows: [*B, t, d].

    Args:
      x: operands: y [*by, m, d], y_scale None | float32 [*by, m | 1, 1], indices int32
        [*bi, t, top_k], weights None | [*bw, t, top_k], start, end int32 [*bs].
      p: parameters: out_dtype, expected_rows.
      chip: the target chip.
      interpret: passed to pallas_call.
    """
    return over_tokens(x, x.weights, None, p.out_dtype, p.expected_rows, chip, interpret)
