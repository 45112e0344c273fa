"""ring_reduce_scatter on TPU: partial sums around the ring, added in VMEM, in float32.

    x [n, pieces, rows, columns]  ->  out [pieces, rows, columns]

What ends on device i comes to it from both sides, along the streams of ring.py run backwards: the
partial sum for i starts at its farthest device, is added to by each device on the way, and device i
adds its own part to what the two streams bring. Lanes are pieces; where there are more pieces than
lanes, these go around in *rounds*, ``lanes`` pieces each.

A round has steps t = 0 .. H, H = n // 2. A stream of h hops starts at t = H - h, so that all end at
t = H. In step t < H a device sends on, for the device H - t further in the stream's direction:

    t = H - h       its own part, from x in HBM
    t > H - h       its own part, loaded to VMEM, plus the partial sum that came in step t - 1

and in step H it adds up what came last and stores it. A partial sum is of x's dtype on the wire.

Sends of a stream are counted over all rounds, g = round * h + (t - (H - h)); g uses slot g % 2 of

    received  VMEM [streams, 2, rows, columns]   the neighbour writes here
    sent      VMEM [streams, 2, rows, columns]   sums on their way out
    part      VMEM [streams, 2, rows, columns]   own parts, of step t in slot t % 2, one step ahead
    mine      VMEM [lanes, rows, columns]        own part of the own result
    result    VMEM [lanes, rows, columns]        on its way to out

Flow control: a slot of ``received`` is used again by send g + 2, so the sender waits for a
*credit*, a signal which the neighbour gives when it has added up send g, unless no send g + 2 will
come. So at most two copies of a stream are in flight to a device, in different slots, and each slot
has its receive semaphore. Send g + 2 waits for what the neighbour does in an earlier step than that
of the send, so no circle of waiting can close.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import ring as rings
from fp8moe_prims.lowering.xla import ring_reduce_scatter as xla

DTYPES = (jnp.float32, jnp.bfloat16)
MAX_LANES = 2
MAX_PIECE_BYTES = 512 << 10
FLAT_COLUMNS = 512  # of a block that is cut into pieces without regard to its rows
REGISTERS = 1 << 14  # float32 values that are added at once


def ring_reduce_scatter(x, p, *, chip, interpret, mesh, forced):
    """RingReduceScatterOperands, RingParams -> out."""
    fits = x.x.size and x.x.dtype in DTYPES
    if not fits or not rings.fits("reduce_scatter", p, mesh, chip, forced):
        return xla.ring_reduce_scatter(x, p, platform="tpu")
    blocks = _blocks(x.x, p)
    shape = blocks.shape[1:]
    pieces, unpad = _pieces(blocks, chip)
    out = unpad(_scatter(pieces, p, chip, mesh, interpret)).reshape(shape)
    return jnp.moveaxis(out, 0, p.dim) if p.tiled else out


def _blocks(x, p):
    """x as [n, *block]; of a tiled one the part of the dimension comes first in the block."""
    x = jnp.moveaxis(x, p.dim, 0)
    return x.reshape(p.size, x.shape[0] // p.size, *x.shape[1:]) if p.tiled else x


def _pieces(blocks, chip):
    """([n, pieces, rows, columns], what makes the flat block of a result).

    The pieces are a free view where the rows are whole tiles, or where one piece has all.
    """
    n, shape, dtype = blocks.shape[0], blocks.shape[1:], blocks.dtype
    rows, columns = rings.rows_of(shape)
    tile = rings.tile_rows(dtype)
    limit = min(MAX_PIECE_BYTES, chip.vmem_bytes // 32)
    padded = lambda r: -(-r // tile) * tile * -(-columns // 128) * 128 * dtype.itemsize
    counts = [k for k in range(1, rows // tile + 1) if rows % (k * tile) == 0]
    counts = [k for k in counts or [1] if padded(rows // k) <= limit]
    if counts:  # one that fills all lanes, if there is
        pieces = next((k for k in counts if k % MAX_LANES == 0), counts[0])
        return blocks.reshape(n, pieces, rows // pieces, columns), lambda out: out
    size = rows * columns
    piece = limit // (FLAT_COLUMNS * dtype.itemsize) // tile * tile
    pieces = -(-size // (piece * FLAT_COLUMNS * MAX_LANES)) * MAX_LANES
    flat = blocks.reshape(n, size)
    flat = jnp.pad(flat, ((0, 0), (0, pieces * piece * FLAT_COLUMNS - size)))
    return flat.reshape(n, pieces, piece, FLAT_COLUMNS), lambda out: out.reshape(-1)[:size]


def _add(target, *parts):
    """target = the sum of the parts, in float32; refs [rows, columns]."""
    rows, columns = target.shape
    tile = rings.tile_rows(target.dtype)
    at_once = rows
    if rows % tile == 0:
        most = max(tile, REGISTERS // columns)
        at_once = max(r for r in range(tile, rows + 1, tile) if rows % r == 0 and r <= most)

    def add(at):
        total = parts[0][at].astype(jnp.float32)
        for part in parts[1:]:
            total += part[at].astype(jnp.float32)
        target[at] = total.astype(target.dtype)

    if at_once == rows:
        add(pl.ds(0, rows))
        return

    def some(i, carry):
        add(pl.ds(pl.multiple_of(i * np.int32(at_once), tile), at_once))
        return carry

    lax.fori_loop(np.int32(0), np.int32(rows // at_once), some, np.int32(0))


def _if(condition, do):
    """Calls do, where the condition holds; it is a bool where it is known."""
    if isinstance(condition, (bool, np.bool_)):
        if condition:
            do()
    else:
        pl.when(condition)(do)


def _kernel(ring, streams, lanes, rounds, x, out, *scratch):
    received, sent, part, mine, result = scratch[:5]
    receive, send, load, load_mine, store, credit = scratch[5:]
    half = ring.size // 2
    two = lambda g: g % 2 if isinstance(g, int) else lax.rem(g, np.int32(2))
    piece = lambda k, lane: k * lanes + lane
    first = lambda s: half - s.hops

    def part_of(s, k, t):
        """In x: what this device adds in step t, for the device half - t further."""
        return x.at[ring.at(np.int32(s.direction) * (half - t)), piece(k, s.lane)]

    def load_part(i, k, t):
        s = streams[i]
        slot = two(t)
        return pltpu.make_async_copy(part_of(s, k, t), part.at[i, slot], load.at[i, slot])

    def load_own(k, lane):
        own = x.at[ring.at(np.int32(0)), piece(k, lane)]
        return pltpu.make_async_copy(own, mine.at[lane], load_mine.at[lane])

    def store_result(k, lane):
        return pltpu.make_async_copy(result.at[lane], out.at[piece(k, lane)], store.at[lane])

    def hop(i, g, source=None):
        slot = two(g)
        return ring.copy(
            sent.at[i, slot] if source is None else source,
            received.at[i, slot],
            send.at[i, slot],
            receive.at[i, slot],
            streams[i].direction,
        )

    def release(i, g):
        """Send g is added up: its slot is free for send g + 2."""
        s = streams[i]
        sender = ring.neighbour(-s.direction)
        _if(g + 2 < rounds * s.hops, lambda: pl.semaphore_signal(credit.at[i], 1, device_id=sender))

    def advance(i, k, t):
        """Step t < half of a stream."""
        s = streams[i]
        g = k * s.hops + (t - first(s))
        _if(g >= 2, lambda: hop(i, g - 2).wait_send())
        source = None
        if isinstance(t, int) and t == first(s):
            source = part_of(s, k, t)
        else:
            hop(i, g - 1).wait_recv()
            load_part(i, k, t).wait()
            _add(sent.at[i, two(g)], received.at[i, two(g - 1)], part.at[i, two(t)])
            release(i, g - 1)
        _if(g >= 2, lambda: pl.semaphore_wait(credit.at[i], 1))
        hop(i, g, source).start()

    def step(k, t):
        for i, s in enumerate(streams):  # the loads of the next step
            if not isinstance(t, int) or first(s) < t + 1 < half:
                load_part(i, k, t + 1).start()
        if isinstance(t, int) and t + 1 == half:
            for lane in range(lanes):
                load_own(k, lane).start()
        for i, s in enumerate(streams):
            if not isinstance(t, int) or t >= first(s):
                advance(i, k, t)

    def finish(k):
        """Step half."""
        for lane in range(lanes):
            last = [(i, k * s.hops + s.hops - 1) for i, s in enumerate(streams) if s.lane == lane]
            for i, g in last:
                hop(i, g).wait_recv()
            load_own(k, lane).wait()
            _if(k >= 1, lambda lane=lane: store_result(k - 1, lane).wait())
            _add(result.at[lane], mine.at[lane], *(received.at[i, two(g)] for i, g in last))
            for i, g in last:
                release(i, g)
            store_result(k, lane).start()

    def go_around(k):
        for t in range(min(2, half)):
            step(k, t)
        if half > 3:  # steps that are alike for all streams
            lax.fori_loop(np.int32(2), np.int32(half - 1), lambda t, _: step(k, t), None)
        if half > 2:
            step(k, half - 1)
        finish(k)

    ring.enter()
    if rounds == 1:
        go_around(0)
    else:
        lax.fori_loop(np.int32(0), np.int32(rounds), lambda k, _: go_around(k), None)
    for lane in range(lanes):
        store_result(rounds - 1, lane).wait()
    for i, s in enumerate(streams):
        total = rounds * s.hops
        for g in range(max(0, total - 2), total):
            hop(i, g).wait_send()


def _scatter(x, p, chip, mesh, interpret):
    """x [n, pieces, rows, columns] -> out [pieces, rows, columns]."""
    n, pieces, *shape = x.shape
    lanes = MAX_LANES if pieces % MAX_LANES == 0 else 1
    streams = rings.streams(n, lanes)
    count = len(streams)
    buffer = lambda *lead: pltpu.VMEM((*lead, *shape), x.dtype)
    semaphores = pltpu.SemaphoreType.DMA
    size = x.size // n
    bytes_ = size * x.dtype.itemsize
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, rings.Ring(p.axis, n), streams, lanes, pieces // lanes),
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            *[buffer(count, 2)] * 3,
            *[buffer(lanes)] * 2,
            *[semaphores((count, 2))] * 3,
            *[semaphores((lanes,))] * 2,
            pltpu.SemaphoreType.REGULAR((count,)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=rings.collective_id(mesh, p.axis, rings.SCATTER),
            vmem_limit_bytes=chip.vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=(n - 1) * size,
            bytes_accessed=(n + 1) * bytes_,
            transcendentals=0,
            remote_bytes_transferred=(n - 1) * bytes_,
        ),
        name="fp8moe_ring_reduce_scatter",
        interpret=interpret,
    )(x)
