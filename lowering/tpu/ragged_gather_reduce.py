"""Combine on TPU: out[b, t] = sum over j of weights[b, t, j] * y[b, indices[b, t, j]].

    y [*by, m, d], y_scale None | float32 [*by, m | 1, 1], indices int32 [*bi, t, top_k],
    start, end int32 [*bs]  ->  out [*B, t, d]

over the j with start <= indices < end, in float32, in the order of j. `ragged_gather_dot` shares the
kernel; its result is the dot product of each of these rows with a row of a [*ba, t, d].

Slots. The valid j of a token are moved to its first slots, in order, by XLA operations on [t, top_k]
numbers; so a token costs what it has valid rows, and the order of the sum stays. The grid is
(B, tiles of ``tile`` tokens). A step starts the copies of the next tile's rows, one per slot in use,
waits for its own, and goes through groups of 8, 16 or 32 tokens (what fills a register of the types
involved); a group takes the body for the most slots that any of its tokens uses:

    for each chunk of 128 words:    for each slot:   sum += where(used, value, 0) * weight

    table      SMEM int32 [1, 1, top_k * tile + groups + 1]   of this tile and of the next one:
               source row of slot s of token i at s * tile + i, or -1; the most slots that a token
               of each group uses; the copies of the tile
    weights    [tile, top_k + 1 (+ top_k)]        of the slots, the token's count, and the shifts
               that pick the row from a pair
    buffer     [2 * top_k * tile slots, ...]      rows as fetched, by the step's parity

y is the big buffer and must not be relaid out: float32 and 16-bit rows are fetched from it as it is,
4 d bytes a row (see rows.py); 1-byte rows, and where d is not a multiple of 128 or m of 8 or each
row has a scale, go through row words of the rows in [start, end).
"""

import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import numpy as np

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import rows
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.rows import LANES

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
            words = [
                rows.load_words(w, buffer, slot + _I32(first + b), chunk, 4) for b in range(4)
            ]
            for q, bits in enumerate(rows.exchange(words)):
                parts[q].append(pltpu.bitcast(bits, w.dtype).astype(jnp.float32))
        return [as_float(pltpu.bitcast(_joined(p), jnp.int32)) for p in parts]
    words = _joined(
        [
            rows.load_words(w, buffer, slot + _I32(first), chunk)
            for first in range(0, c.group, 8)
        ]
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


def _body(c: _Config, slots: int, buffer, slot, row, weights, a, scale, out):
    """The tokens [row, row + group) of a tile, of which none uses more than ``slots`` slots."""
    w, tokens = c.w, pl.ds(row, c.group)
    lanes = lambda v: jnp.broadcast_to(v, (c.group, LANES))
    table = weights[tokens, :]
    column = lambda i: lanes(table[:, i : i + 1])
    count = column(c.top_k)
    used = [count > np.float32(s) for s in range(slots)]
    at = [slot + _I32(s * c.tile) + row for s in range(slots)]
    factors = [column(s) for s in range(slots)] if c.weighted else None
    scales, shifts = None, [None] * slots
    if w.scaled:
        scales = [_row_scale(c, buffer, s) for s in at]
        scales = [jnp.where(u, s, jnp.zeros_like(s)) for u, s in zip(used, scales)]
    elif c.tensor_scale:
        scales = [jnp.full((c.group, LANES), scale, jnp.float32)] * slots
    if w.paired:
        shifts = [column(c.top_k + 1 + s).astype(jnp.int32) for s in range(slots)]
    bits = _I32(-0x10000 if w.per == 2 else -1)
    masks = [jnp.where(u, bits, _I32(0)) for u in used]

    def values(s, chunk):
        for q, v in enumerate(_values(c, buffer, at[s], chunk, masks[s], shifts[s])):
            yield q, v if scales is None else v * scales[s]

    def columns(q, chunk):
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
            out[tokens, columns(q, chunk)] = x

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
        place = lax.broadcasted_iota(jnp.int32, (c.group, c.top_k), 1)
        result = jnp.zeros((c.group, c.top_k), jnp.float32)
        for s in range(slots):
            total = jnp.broadcast_to(jnp.sum(sums[s], axis=1, keepdims=True), result.shape)
            # A NaN of a is none of a slot that is not used.
            here = (place == _I32(s)) & (used[s][:, : c.top_k])
            result = jnp.where(here, total, result)
        out[tokens, :] = result
    else:
        _unrolled(w.chunks, reduce, _I32(0))


def _kernel(c: _Config, size, tiles, scale_of, scale, here, following, weights, a, source, out,
            buffer, semaphores):
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

    def group(g, carry):
        row = pl.multiple_of(g * _I32(c.group), c.group)
        most = here[0, 0, _I32(c.top_k * c.tile) + g]

        @pl.when(most == _I32(0))
        def _zero():
            part = out.at[pl.ds(row, c.group), :]
            part[...] = jnp.zeros_like(part)

        low = 0
        for slots in c.classes:

            @pl.when((most > _I32(low)) & (most <= _I32(slots)))
            def _some(slots=slots):
                _body(c, slots, readable, half * _I32(per_half), row, weights, a, tensor_scale, out)

            low = slots
        return carry

    lax.fori_loop(_I32(0), _I32(c.tile // c.group), group, _I32(0))


def _slots(index, valid, weights):
    """The valid j of each token moved to the front, over [B, top_k, t].

    Returns (source rows int32 [B, top_k, t], weights or None, counts int32 [B, t], and for each j
    its slot, int32 [B, top_k, t]).
    """
    top_k = index.shape[1]
    rank = jnp.cumsum(valid.astype(jnp.int32), axis=1, dtype=jnp.int32)
    place = rank - _I32(1)  # [B, j, t]
    slot = lax.broadcasted_iota(jnp.int32, (1, top_k, 1, 1), 1)
    chosen = valid[:, None] & (place[:, None] == slot)  # [B, slot, j, t]
    pick = lambda v: jnp.sum(jnp.where(chosen, v[:, None], jnp.zeros((), v.dtype)), axis=2,
                             dtype=v.dtype)
    return pick(index), None if weights is None else pick(weights), rank[:, -1], place


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
    index = jnp.swapaxes(full(x.indices.astype(jnp.int32), t, top_k), 1, 2)  # [B, top_k, t]
    valid = (index >= start[:, None, None]) & (index < end[:, None, None])
    if weights is not None:
        weights = jnp.swapaxes(full(weights.astype(jnp.float32), t, top_k), 1, 2)
    index, weights, counts, place = _slots(index, valid, weights)

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
    base = rows.flat_map(tuple(y_lead), batch) * _I32(padded)
    used = counts[:, None, :] > lax.broadcasted_iota(jnp.int32, (1, top_k, 1), 1)
    parity = _I32(16) - (index & _I32(1)) * _I32(16)  # the shift that brings a half to the top
    index = jnp.where(used, index + jnp.asarray(base)[:, None, None], _I32(-1))
    tensor = jnp.zeros((1,), jnp.float32)
    scale_of = jnp.zeros((size,), jnp.int32)
    if scale is not None and not row_scaled:
        tensor = scale.reshape(-1).astype(jnp.float32)
        scale_of = jnp.asarray(rows.flat_map(scale.shape[:-2], batch))

    a_map = None
    if dot:
        a_map = jnp.asarray(rows.flat_map(a.shape[:-2], batch))
        a = a.astype(jnp.float32) if a.dtype == np.float16 else a
        a = a.reshape(-1, t, d)
    narrow = np.dtype(np.float32) if dot else np.dtype(out_dtype)
    narrow = np.dtype(np.float32) if narrow == np.float16 else narrow
    types = [w.dtype, narrow] + ([np.dtype(a.dtype)] if dot else [])
    group = max(32 // v.itemsize for v in types)
    own = d * np.dtype(a.dtype).itemsize if dot else d * narrow.itemsize
    token_bytes = 8 * top_k * w.pitch * LANES + 2 * own + 4096
    # A group may be half a register of 16-bit values, if need be.
    for group, least in [(group, 32), (group, group)] + [(8, 8)] * (group == 16):
        tile = rows.tile_of(t, token_bytes, chip, 128, least)
        if tile is not None:
            break
    else:
        raise rows.too_wide(f"ragged_gather_reduce, {top_k} a token", d, chip)
    tiles = -(-t // tile)
    c = _Config(
        w, top_k, tile, group, dot, weights is not None, scale is not None and not row_scaled,
        interpret,
    )

    pad = lambda v, with_: jnp.pad(
        v, ((0, 0),) * (v.ndim - 1) + ((0, tiles * tile - t),), constant_values=_I32(with_)
    )
    by_tile = pad(index, -1).reshape(size, top_k, tiles, tile)
    by_group = pad(counts, 0).reshape(size, tiles, tile // group, group)
    table = jnp.concatenate(
        [
            jnp.swapaxes(by_tile, 1, 2).reshape(size, tiles, -1),
            jnp.max(by_group, axis=3),
            jnp.sum(by_group, axis=(2, 3), dtype=jnp.int32)[..., None],
        ],
        axis=2,
    ).reshape(size * tiles, 1, c.table_width)
    columns = [jnp.zeros((size, top_k, t), jnp.float32) if weights is None else weights]
    columns.append(counts[:, None].astype(jnp.float32))
    if w.paired:
        columns.append(parity.astype(jnp.float32))
    columns = jnp.swapaxes(jnp.concatenate(columns, axis=1), 1, 2)  # [B, t, top_k + 1 ...]

    out = _call(c, size, tiles, t, scale_of, tensor, table, columns, a, a_map, source, narrow,
                named, chip)
    if dot:
        # Slot s back to the j that it came from.
        slot = lax.broadcasted_iota(jnp.int32, (1, 1, 1, top_k), 3)
        place = jnp.where(valid, place, _I32(-1))
        chosen = jnp.swapaxes(place, 1, 2)[..., None] == slot  # [B, t, j, slot]
        out = jnp.sum(jnp.where(chosen, out[:, :, None, :], np.float32(0)), axis=3)
    return out.reshape(out_shape).astype(out_dtype)


def _covered(start, end, batch, y_lead, m):
    """The rows of each y that some batch element's range covers: start, end int32 [By]."""
    y_lead = (1,) * (len(batch) - len(y_lead)) + y_lead
    axes = tuple(i for i, n in enumerate(y_lead) if n == 1)
    some = end > start
    low = jnp.min(jnp.where(some, start, _I32(m)).reshape(batch), axis=axes).reshape(-1)
    high = jnp.max(jnp.where(some, end, _I32(0)).reshape(batch), axis=axes).reshape(-1)
    return jnp.minimum(low, high), high


def _call(c: _Config, size, tiles, t, scale_of, scale, table, columns, a, a_map, source,
          out_dtype, expected, chip):
    """The kernel over flat batches: [B, t, d] or [B, t, top_k]."""
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
        pl.BlockSpec((None, c.tile, columns.shape[-1]), tokens),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [table, table, columns, source]
    if c.dot:
        in_specs.append(
            pl.BlockSpec((None, c.tile, w.width), lambda b, i, *s: (s[1][b], i, _I32(0)))
        )
        operands.append(a)
    width = c.top_k if c.dot else w.d
    out_width = c.top_k if c.dot else w.width

    def body(scale_of, a_map, scale, here, following, weights, source, *refs):
        refs = list(refs)
        own = refs.pop(0) if c.dot else None
        _kernel(c, size, tiles, scale_of, scale, here, following, weights, own, source, *refs)

    item = np.dtype(out_dtype).itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((size, t, width), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(size, tiles),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, c.tile, out_width), tokens),
            scratch_shapes=[
                rows.buffer_shape(w, 2 * c.top_k * c.tile),
                pltpu.SemaphoreType.DMA((2,)),
            ],
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
