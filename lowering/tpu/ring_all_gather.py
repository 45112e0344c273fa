"""ring_all_gather on TPU: every array's pieces around the ring, HBM to HBM.

    x [pieces, rows, columns]  ->  out [n, pieces, rows, columns], for each array (values, scale)

Every piece of every array is a lane (see ring.py). In step t a device passes on, to the right, the
piece of the block of t devices to the left, which it got in step t - 1, and likewise to the left:
from its place in ``out`` here to the same place there. In step 0 that is its own, from ``x``; a
local copy brings it to ``out`` meanwhile.

Every copy has a place of its own to land in, so nothing is used again and no flow control is
needed: a neighbour may be any number of steps ahead. For the same reason each step of a stream has
a receive semaphore of its own.

    receive   DMA [streams, steps]   a piece of the neighbour's has landed in out
    send      DMA [streams]          pieces have left; counted when the kernel ends
    local     DMA [arrays]           the own block is in out

The cost estimate has the bytes read and written in HBM, and those sent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import ring as rings
from fp8moe_prims.lowering.xla import ring_all_gather as xla

MAX_PIECES = 4
PIECE_BYTES = 128 << 10  # what is worth a copy of its own, beyond one piece for each direction
UNROLLED = 4  # steps that are not made a loop


def ring_all_gather(x, p, *, chip, interpret, mesh, forced):
    """RingAllGatherOperands, RingParams -> [out] or [out, scale]."""
    arrays = [a for a in x if a is not None]
    empty = any(a.size == 0 for a in arrays)
    if empty or not rings.fits("all_gather", p, mesh, chip, forced):
        return xla.ring_all_gather(x, p, platform="tpu")
    outs = _gather([_pieces(a) for a in arrays], p, mesh, interpret)
    return [_placed(out, a, p) for out, a in zip(outs, arrays, strict=True)]


def _pieces(x):
    """x as [pieces, rows, columns]; free where pieces are whole tiles."""
    if x.dtype == jnp.float16:  # which Mosaic does not know
        x = lax.bitcast_convert_type(x, jnp.int16)
    rows, columns = rings.rows_of(x.shape)
    pieces = 1
    while (
        2 * pieces <= MAX_PIECES
        and rows % (2 * pieces * rings.tile_rows(x.dtype)) == 0
        and (pieces == 1 or rows * columns * x.dtype.itemsize >= 2 * pieces * PIECE_BYTES)
    ):
        pieces *= 2
    return x.reshape(pieces, rows // pieces, columns)


def _placed(out, x, p):
    """out [n, pieces, rows, columns] as the result for x: blocks at dimension dim."""
    out = out.reshape(p.size, *x.shape)
    if out.dtype != x.dtype:
        out = lax.bitcast_convert_type(out, x.dtype)
    axis = p.dim + x.ndim + (0 if p.tiled else 1)
    out = jnp.moveaxis(out, 0, axis)
    if p.tiled:
        out = out.reshape(*x.shape[:axis], p.size * x.shape[axis], *x.shape[axis + 1 :])
    return out


def receive_slot(step):
    """The receive semaphore of a step; a test shares one between steps, to see the race found."""
    return step


def _kernel(ring, streams, places, *refs):
    """places: (array, piece) of each lane."""
    arrays = len(refs[:-3]) // 2
    xs, outs, (receive, send, local) = refs[:arrays], refs[arrays:-3], refs[-3:]

    def hop(i, step):
        """The copy of stream i in a step."""
        array, piece = places[streams[i].lane]
        direction = streams[i].direction
        block = ring.at(-np.int32(direction) * step)
        target = outs[array].at[block, piece]
        own = isinstance(step, int) and step == 0
        source = xs[array].at[piece] if own else target
        return ring.copy(source, target, send.at[i], receive.at[i, receive_slot(step)], direction)

    def step(t):
        for i, stream in enumerate(streams):
            if not isinstance(t, int) or 0 < t <= stream.hops:
                hop(i, t - 1).wait_recv()
            if not isinstance(t, int) or t < stream.hops:
                hop(i, t).start()

    copies = [
        pltpu.make_async_copy(x, out.at[ring.at(np.int32(0))], local.at[i])
        for i, (x, out) in enumerate(zip(xs, outs, strict=True))
    ]
    for copy in copies:
        copy.start()
    ring.enter()
    longest, shortest = (f(s.hops for s in streams) for f in (max, min))
    step(0)
    steady = range(1, shortest)  # steps that are alike for all streams
    if len(steady) <= UNROLLED:
        for t in steady:
            step(t)
    else:
        lax.fori_loop(np.int32(1), np.int32(shortest), lambda t, _: step(t), None)
    for t in range(shortest, longest + 1):
        step(t)
    for i, stream in enumerate(streams):
        lax.fori_loop(0, stream.hops, lambda _, c, i=i: hop(i, 0).wait_send(), None)
    for copy in copies:
        copy.wait()


def _gather(xs, p, mesh, interpret):
    """xs [pieces, rows, columns] -> [[n, pieces, rows, columns]]."""
    places = [(i, piece) for i, x in enumerate(xs) for piece in range(x.shape[0])]
    streams = rings.streams(p.size, len(places))
    steps = max(s.hops for s in streams)
    size = sum(x.size * x.dtype.itemsize for x in xs)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, rings.Ring(p.axis, p.size), streams, places),
        out_shape=[jax.ShapeDtypeStruct((p.size, *x.shape), x.dtype) for x in xs],
        in_specs=[anywhere] * len(xs),
        out_specs=[anywhere] * len(xs),
        scratch_shapes=[
            pltpu.SemaphoreType.DMA((len(streams), steps)),
            pltpu.SemaphoreType.DMA((len(streams),)),
            pltpu.SemaphoreType.DMA((len(xs),)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=rings.collective_id(mesh, p.axis, rings.GATHER)
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * p.size * size,
            transcendentals=0,
            remote_bytes_transferred=(p.size - 1) * size,
        ),
        name="fp8moe_ring_all_gather",
        interpret=interpret,
    )(*xs)
