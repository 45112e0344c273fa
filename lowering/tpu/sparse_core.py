"""The rows of a gather fetched by the SparseCores. NO HARDWARE HAS RUN THIS: it is an option, and
what can be tested without a SparseCore (the addresses, and all that the TensorCore does) is.

Three steps, of which only the rows of tiles of 128 that the range touches are moved:

1. TensorCore: row words (rows.py), [rows * height, 128] int32, so that a row is ``height``
   consecutive lines of 512 bytes, its scale one of them. An array of float32 in whole tiles needs
   none: its bytes are such lines already, if not consecutive.
2. SparseCores: line c of all rows of a tile, for each tile and c, is one indirect stream of 128
   lines into a subcore's memory and one copy out of it, to

       words [height, tiles * 128, 128] int32        line c of row r at [c, r]

3. TensorCore: words into the standard layout, as after the default gather; rows without a source
   become zeros by a mask, and weights and scales are applied.

Step 2 is cut into (tile, line) items, and every vector subcore of every SparseCore takes an equal
share of them, known only at run time; a subcore reads one item while it writes the one before.

Bytes moved per column, for n rows out of a table of t rows, of ``item`` bytes a value:

    default             item * (2 t + 2 n)      pack, fetch, write
    here                item * (2 t + 4 n)      the fetched words are written and read once more
    float32, default    8 n                     no pack
    float32, here       16 n

With d = 7168, float8, row scales and t = n a row costs 29.7 KB by default and 45.1 KB here (14.8 in
step 1, 15.4 in step 2, 14.8 in step 3). So this can win only where the TensorCore has something
else to do meanwhile: XLA starts step 2, does what else is ready, and waits for it. The TensorCore's
scalar unit, which starts a copy per row in the default kernel, starts none here.

Layouts weighed for float8, whose rows lie four to a 32-bit word in tiles of 32 x 128:

    row words        4 n more bytes than n, as above; vector work on the TensorCore only
    the tiles as they are   each row brings the three others of its words, 4 n, to be sifted on the
                     subcores by 5 operations a word, some 50 cycles a row where HBM takes 9
    [t, d / 128, 128]       XLA relays out the table and, before the next matmul, the buffer, whose
                     static size counts then; d / 128 is padded to 32, up to 4 times the bytes
    bfloat16         twice the bytes of everything
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import rows
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, as_column
from fp8moe_prims.lowering.tpu.unpack import unpack_scale, unpack_tile, zero_tile

_I32 = np.int32
TILE = 128  # rows of a tile: an indirect stream takes at most 128 indices
_CORE, _SUBCORE = "fp8moe_core", "fp8moe_subcore"


# ------------------------------------------------------------------------------------- addresses
def line_of(w: rows.Words, row, chunk):
    """The line of the table that holds words [128 * chunk, 128 * chunk + 128) of a row."""
    if w.direct:  # tiles of 8 rows by 128 columns, one after the other
        return ((row >> _I32(3)) * _I32(w.blocks) + chunk) * _I32(8) + (row & _I32(7))
    return row * _I32(w.height) + chunk


def worker_of(chip: Chip, core, subcore):
    """The number of a subcore: neighbours are on different SparseCores, so few items busy all."""
    return subcore * _I32(chip.sparse_cores) + core


def share(worker, workers: int, items):
    """(first, last) of the items [first, last) of a worker: equal shares, to within one."""
    each = lax.div(items, _I32(workers))
    more = items - each * _I32(workers)
    first = worker * each + jnp.minimum(worker, more)
    return first, first + each + (worker < more).astype(jnp.int32)


def tile_order(first, count, tiles: int):
    """The tiles that the ranges touch, batch after batch.

    Args:
      first, count: int32 [b], first tile and number of tiles of each batch.
      tiles: of a batch.

    Returns:
      (tile int32 [b * tiles], begin int32 [b], total int32 [1]): the flat index of the tile at each
      place, of which ``total`` count, and the place of the first one of a batch.
    """
    batches = first.shape[0]
    ends = jnp.cumsum(count, dtype=jnp.int32)
    begin = ends - count
    place = jnp.arange(batches * tiles, dtype=jnp.int32)
    batch = jnp.searchsorted(ends, place, side="right").astype(jnp.int32)
    batch = jnp.minimum(batch, _I32(batches - 1))
    tile = jnp.clip(first[batch] + place - begin[batch], _I32(0), _I32(tiles - 1))
    return batch * _I32(tiles) + tile, begin, ends[-1:]


# ----------------------------------------------------------------------------------- SparseCores
def usable(w: rows.Words, dtype, chip: Chip, interpret) -> bool:
    """Whether the rows can be fetched so: on a chip, with SparseCores, if a tile fits VMEM."""
    row_bytes = 2 * w.row_bytes + 2 * w.width * np.dtype(dtype).itemsize + 2 * LANES * 4
    return not interpret and chip.sparse_cores > 0 and TILE * row_bytes <= chip.vmem_bytes * 2 // 3


def direct_lines(x):
    """The bytes of x [b, rows, d], float32 in whole tiles, as lines [b * rows * d / 128, 128]."""
    batches, n, d = x.shape
    x = x.reshape(batches * n // 8, 8, d // LANES, LANES).transpose(0, 2, 1, 3)
    return lax.bitcast_convert_type(x.reshape(-1, LANES), jnp.int32)


def _fetch_kernel(w, chip, words, index, total, out, lines, buffer, here, amount, reads, written):
    """A subcore's share of the (tile, line) items: see the module docstring.

    Item k goes through half k of ``lines`` (what to read) and ``buffer`` (what was read); ``here``
    holds the source rows of the current tile. One half is read into while the other is written out.
    """
    worker = worker_of(chip, lax.axis_index(_CORE), lax.axis_index(_SUBCORE))
    pltpu.sync_copy(total, amount)
    items = amount[pl.ds(0, chip.sparse_lanes)][0] * _I32(w.height)
    first, last = share(worker, chip.sparse_cores * chip.subcores, items)

    def place(item):
        tile = lax.div(item, _I32(w.height))
        return tile, item - tile * _I32(w.height), (item - first) & _I32(1)

    def read(half):
        return pltpu.make_async_copy(words.at[lines.at[half]], buffer.at[half], reads.at[half])

    def start(item):
        tile, chunk, half = place(item)

        @pl.when((item == first) | (chunk == _I32(0)))
        def _new_tile():
            pltpu.sync_copy(index.at[tile], here)

        for part in range(TILE // chip.sparse_lanes):
            at = pl.ds(part * chip.sparse_lanes, chip.sparse_lanes)
            lines[half, at] = line_of(w, here[at], chunk)
        read(half).start()

    def step(item, carry):
        tile, chunk, half = place(item)
        read(half).wait()

        @pl.when(item + _I32(1) < last)
        def _ahead():
            start(item + _I32(1))

        at = pl.ds(pl.multiple_of(tile * _I32(TILE), TILE), TILE)
        copy = pltpu.make_async_copy(buffer.at[half], out.at[chunk, at], written)
        copy.start()
        copy.wait()
        return carry

    @pl.when(last > first)
    def _first():
        start(first)

    lax.fori_loop(first, last, step, _I32(0))


def fetch(w: rows.Words, words, index, total, expected, chip: Chip):
    """Rows fetched by all subcores of all SparseCores.

    Args:
      w: the layout.
      words: int32 [lines, 128], the table.
      index: int32 [tiles, 128], source rows.
      total: int32 [1], how many of the tiles count.
      expected: rows for the cost estimate.
      chip: the target chip.

    Returns:
      int32 [height, tiles * 128, 128]; rows of tiles from ``total`` on hold anything.
    """
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(
        core_axis_name=_CORE,
        subcore_axis_name=_SUBCORE,
        num_cores=chip.sparse_cores,
        num_subcores=chip.subcores,
    )

    # Newer versions of Pallas count no copy out of a subcore: their wait is for all of its streams.
    counted = not hasattr(plsc, "SparseCorePushStreamWarning")

    def body(*refs):
        *refs, written = refs
        _fetch_kernel(w, chip, *refs, written if counted else None)

    return pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((w.height, index.shape[0] * TILE, LANES), jnp.int32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((2, TILE), jnp.int32),
            pltpu.VMEM((2, TILE, LANES), jnp.int32),
            pltpu.VMEM((TILE,), jnp.int32),
            pltpu.VMEM((LANES,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA(()),
        ],
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * expected * w.row_bytes, transcendentals=0
        ),
        name="fp8moe_sparse_core_gather",
    )(words, index, jnp.broadcast_to(total, (LANES,)))


# ------------------------------------------------------------------------------------ TensorCore
def gather(w, p, dtype, batch, m, source, index, weights, start, end, expected, chip, interpret):
    """Fetches and unpacks over flat batches: [out [B, m, d]] and the scales [*batch, m, 1].

    Args:
      w: the layout, ``lines``.
      p: parameters, as of ragged_gather.
      dtype: of the values.
      batch: the batch dimensions, of B in all.
      m: rows of the output.
      source: the table, 32-bit words in lines of 128.
      index: int32 [B, m], source rows, -1 for none.
      weights: None or float32 [B, m].
      start, end: int32 [B].
      expected: rows for the cost estimates.
      chip, interpret: as everywhere.
    """
    size, tiles = index.shape[0], -(-m // TILE)
    source = source.reshape(-1, LANES)
    first, count = rows.tiles_of(start, end, TILE)
    order, begin, total = tile_order(first, count, tiles)
    index = jnp.pad(index, ((0, 0), (0, tiles * TILE - m)), constant_values=-1)
    keep = rows.lanes_of((index >= _I32(0)).astype(jnp.float32), TILE)
    index = jnp.take(index.reshape(size * tiles, TILE), order, axis=0, mode="clip")
    # Rows without a source read rows all over the table: one row for all would be a hot spot.
    elsewhere = lax.broadcasted_iota(jnp.int32, index.shape, 0) * _I32(TILE)
    elsewhere += lax.broadcasted_iota(jnp.int32, index.shape, 1)
    index = jnp.where(index < _I32(0), elsewhere % _I32(source.shape[0] // w.height), index)
    words = fetch(w, source, index, total, expected, chip)
    if weights is not None:
        weights = rows.lanes_of(weights, TILE)
    scalars = (first, count, begin)
    outs = _unpack(w, p, dtype, m, words, keep, weights, scalars, expected, chip, interpret)
    if w.scaled:
        outs[1] = outs[1].reshape(size, tiles * TILE)[:, :m].reshape(*batch, m, 1)
    return outs


def _unpack_kernel(w, dtype, weighted, all_tiles, first, count, begin, words, keep, *refs):
    """One tile: its words into the standard layout, or zeros where the range has no rows."""
    refs = list(refs)
    weight = refs.pop(0) if weighted else None
    out = refs.pop(0)
    out_scale = refs.pop(0) if w.scaled else None
    b, i = pl.program_id(0), pl.program_id(1)
    at = i - first[b] if all_tiles else i
    active = (at >= _I32(0)) & (at < count[b])

    @pl.when(active)
    def _move():
        columns = dict(keep=refs[0])
        refs[0][...] = -as_column(keep[0, :, :]).astype(jnp.int32)
        if weighted and not w.scaled:
            columns["weight"] = refs[1]
            refs[1][...] = as_column(weight[0, :, :])
        unpack_tile(w, TILE, dtype, words, 0, out, **columns)
        if w.scaled:
            unpack_scale(w, TILE, words, 0, out_scale, weight, keep)

    if all_tiles:
        pl.when(jnp.logical_not(active))(lambda: zero_tile(out, out_scale))


def _unpack(w, p, dtype, m, words, keep, weights, scalars, expected, chip, interpret):
    """Step 3: [out [B, m, d]] and the scales [B * tiles, 1, 128]."""
    size, tiles = scalars[0].shape[0], -(-m // TILE)
    weighted, all_tiles = weights is not None, p.tail == "zero"
    steps = tiles if all_tiles else jnp.maximum(jnp.max(scalars[1]), _I32(1))

    def within(b, i, first, count):
        """Which of its range's tiles step (b, i) is at."""
        last = jnp.maximum(count[b] - _I32(1), _I32(0))
        return jnp.clip(i - first[b] if all_tiles else i, _I32(0), last)

    def out_block(b, i, first, count, begin):
        own = jnp.minimum(first[b] + within(b, i, first, count), _I32(tiles - 1))
        return b, i if all_tiles else own, _I32(0)

    def lanes_block(b, i, *scalars):
        return b * _I32(tiles) + out_block(b, i, *scalars)[1], _I32(0), _I32(0)

    def words_block(b, i, first, count, begin):
        place = jnp.minimum(begin[b] + within(b, i, first, count), _I32(size * tiles - 1))
        return _I32(0), place, _I32(0)

    lanes = pl.BlockSpec((1, 1, LANES), lanes_block)
    out_shape = [jax.ShapeDtypeStruct((size, m, w.d), dtype)]
    out_specs = [pl.BlockSpec((None, TILE, w.width), out_block)]
    if w.scaled:
        out_shape.append(jax.ShapeDtypeStruct((size * tiles, 1, LANES), jnp.float32))
        out_specs.append(lanes)
    columns = [jnp.int32] + [jnp.float32] * (weighted and not w.scaled)
    outs = pl.pallas_call(
        lambda *refs: _unpack_kernel(w, dtype, weighted, all_tiles, *refs),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(size, steps),
            in_specs=[pl.BlockSpec((w.height, TILE, LANES), words_block), lanes]
            + [lanes] * weighted,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((TILE, LANES), kind) for kind in columns],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=expected * w.d if weighted else 0,
            bytes_accessed=expected * (w.row_bytes + w.d * dtype.itemsize),
            transcendentals=0,
        ),
        name="fp8moe_unpack_rows",
        interpret=interpret,
    )(*scalars, words, keep, *([weights] if weighted else []))
    return list(outs)
