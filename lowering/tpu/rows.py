"""Rows that a copy can fetch one by one: how the gathers see arrays [rows, d] in HBM.

A tile of an array in HBM is 8 rows (32 of float8) by 128 columns, and the rows of a narrow type
are interleaved in 32-bit words: a row is neither contiguous nor made of whole words, and a copy can
not cut a tile along its rows. Two ways to fetch a row all the same:

Direct. The view [rows / 8, d / 128, 8, 1, 128] of a float32 array has the bytes of the array, so it
costs nothing, and its tiles are single rows: one strided copy brings a row, d / 128 pieces of 512
bytes. Of a 16-bit array the view [rows / 8, d / 128, 4, 2, 128] does the same for the two rows that
share their words; the reader picks one by a shift. Bytes read: 4 d, whatever the type, and nothing
is written. Needs whole tiles: rows a multiple of 8, d of 128.

Row words, for everything else. An array is made first,

    [rows, height, 128] int32,   height = chunks + (1 if there is a scale)

With ``per`` values in a word (4, 2, 1) and the columns cut into blocks of 128, chunk k holds in
byte (or half) q of its word l the column l of block q * chunks + k; a last chunk holds the float32
bits of the row's scale in every word. One row is contiguous, so one copy brings it. `pack` makes
them, in a kernel that reads and writes each row of the wanted range once, and no other. So a row
that is fetched r times costs (r + 2) d bytes per byte of its type; the four rows that share words
in a float8 array would cost 4 r d.

Back in VMEM, ``per`` registers of eight rows each, 4 s + b (b = 0..3) say, are exchanged by
`exchange` with ``per`` registers of the standard layout, one per column block: a transposition of
the bytes of every word, 6 vector operations a register. Both directions use it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, as_column

_I32 = np.int32
ONE_BITS = _I32(0x3F800000)  # float32 1.0


@dataclasses.dataclass(frozen=True)
class Words:
    """How a row lies in what is fetched of it.

    Attributes:
      dtype: of the values.
      d: columns.
      scaled: whether a scale travels with the row.
      direct: whether the array itself is read, else its row words.
      lines: whether a buffer is [height, slots, 128], the first 128 words of all its rows, then the
        second, and so on; else [slots * pitch, ...], row after row.
    """

    dtype: np.dtype
    d: int
    scaled: bool
    direct: bool = False
    lines: bool = False

    @property
    def per(self) -> int:
        """Values in a word."""
        return 4 // self.dtype.itemsize

    @property
    def blocks(self) -> int:
        """Column blocks of 128."""
        return -(-self.d // LANES)

    @property
    def chunks(self) -> int:
        """Groups of 128 words that hold values: of a direct row one per column block."""
        return self.blocks if self.direct else -(-self.blocks // self.per)

    @property
    def height(self) -> int:
        """Groups of 128 words in a row."""
        return self.chunks + int(self.scaled)

    @property
    def pitch(self) -> int:
        """Height of a slot in a buffer: odd, as loads at multiples of 8 take twice as long."""
        return self.height | 1

    @property
    def width(self) -> int:
        """Columns with the padding of the last block."""
        return self.blocks * LANES

    @property
    def group(self) -> int:
        """Rows that fill a register of the standard layout."""
        return 8 * self.per

    @property
    def row_bytes(self) -> int:
        """Bytes fetched for a row."""
        return self.height * LANES * 4

    @property
    def paired(self) -> bool:
        """Whether a row comes with the other one of its words."""
        return self.direct and self.per == 2


def _halves(a, b):
    low, high = _I32(0xFFFF), _I32(-0x10000)
    return (a & low) | (b << _I32(16)), lax.shift_right_logical(a, _I32(16)) | (b & high)


def _bytes(a, b):
    even, odd = _I32(0x00FF00FF), _I32(-0x00FF0100)
    first = (a & even) | ((b & even) << _I32(8))
    return first, (lax.shift_right_logical(a, _I32(8)) & even) | (b & odd)


def exchange(words):
    """Part b of result q is part q of words[b]; parts are bytes of 4 arrays, halves of 2."""
    if len(words) == 1:
        return list(words)
    if len(words) == 2:
        return list(_halves(*words))
    a, c = _halves(words[0], words[2])
    b, d = _halves(words[1], words[3])
    return [*_bytes(a, b), *_bytes(c, d)]


def tile_of(rows: int, bytes_per_row: int, chip: Chip, most: int, least: int = 32) -> int | None:
    """Rows of a tile: a power of two from ``least`` to ``most`` within two thirds of VMEM.

    None where even the least does not fit.
    """
    fits = lambda tile: tile * bytes_per_row <= chip.vmem_bytes * 2 // 3
    tile = least
    while 2 * tile <= most and tile < rows and fits(2 * tile):
        tile *= 2
    return tile if fits(tile) else None


def too_wide(op: str, d: int, chip: Chip) -> Exception:
    return NotImplementedError(f"{op}: rows of {d} columns do not fit the VMEM of {chip.name}.")


def lanes_of(x, tile: int):
    """[B, m] -> [B * tiles, 1, max(tile, 128)], zero-padded: one row of lanes per tile."""
    batches, m = x.shape
    tiles = -(-m // tile)
    x = jnp.pad(x, ((0, 0), (0, tiles * tile - m))).reshape(batches * tiles, 1, tile)
    return jnp.pad(x, ((0, 0), (0, 0), (0, max(LANES - tile, 0))))


def tiles_of(start, end, tile: int):
    """First tile and number of tiles that hold rows [start, end): int32, like start."""
    size = jnp.full_like(start, tile)
    first = lax.div(start, size)
    count = jnp.where(end > start, lax.div(end - _I32(1), size) - first + _I32(1), _I32(0))
    return first, count


# ----------------------------------------------------------------------------------------- pack
def _pack_kernel(w: Words, tile, first, count, x, *rest):
    """One tile of rows into words: see the module docstring."""
    b, i = pl.program_id(0), pl.program_id(1)
    *scale, out = rest[:2] if w.scaled else rest[:1]
    height, per = w.height, w.per

    @pl.when(i < count[b])
    def _pack():
        if w.scaled:
            scales = rest[2]
            for part in range(scales.shape[0] // LANES):
                lanes = pl.ds(part * LANES, LANES)
                scales[lanes, :] = as_column(scale[0][0, :, lanes])

        def group(g, carry):
            base = g * _I32(w.group)
            row = pl.multiple_of(base, w.group)

            def store(chunk, words):
                for part in range(per):
                    at = (base + _I32(part)) * _I32(height) + _I32(chunk)
                    out[pl.ds(at, 8, stride=per * height), :] = words[part]

            for chunk in range(w.chunks):
                words = []
                for q in range(per):
                    block = q * w.chunks + chunk
                    if block < w.blocks:
                        values = x[pl.ds(row, w.group), pl.ds(block * LANES, LANES)]
                        words.append(pltpu.bitcast(values, jnp.int32))
                    else:
                        words.append(jnp.zeros((8, LANES), jnp.int32))
                store(chunk, exchange(words))
            if w.scaled:
                scales = rest[2]
                store(
                    w.chunks,
                    [
                        pltpu.bitcast(scales[pl.ds(base + _I32(part), 8, stride=per), :], jnp.int32)
                        for part in range(per)
                    ],
                )
            return carry

        lax.fori_loop(_I32(0), _I32(tile // w.group), group, _I32(0))


def pack(w: Words, x, scale, start, end, expected, chip: Chip, interpret):
    """Row words of the rows [start, end) of x; the others hold anything.

    Args:
      w: the layout.
      x: [b, t, d].
      scale: None or float32 [b, t].
      start, end: int32 [b], within [0, t].
      expected: rows for the cost estimate.
      chip, interpret: as everywhere.

    Returns:
      (words int32 [b * rows * height, 1, 128], rows), rows >= t the padded rows of a batch.
    """
    batches, t, d = x.shape
    tile = tile_of(t, 4 * w.row_bytes + (1024 if w.scaled else 0), chip, 256)
    if tile is None:
        raise too_wide("row words", d, chip)
    tiles = -(-t // tile)
    rows = tiles * tile
    first, count = tiles_of(start, end, tile)

    def at(b, i, first, count):
        last = jnp.maximum(count[b] - _I32(1), _I32(0))
        return jnp.minimum(first[b] + jnp.minimum(i, last), _I32(tiles - 1))

    in_specs = [pl.BlockSpec((None, tile, w.width), lambda b, i, *s: (b, at(b, i, *s), _I32(0)))]
    operands = [x]
    scratch = []
    if w.scaled:
        operands.append(lanes_of(scale, tile))
        in_specs.append(
            pl.BlockSpec(
                (1, 1, max(tile, LANES)),
                lambda b, i, *s: (b * _I32(tiles) + at(b, i, *s), _I32(0), _I32(0)),
            )
        )
        scratch.append(pltpu.VMEM((max(tile, LANES), LANES), jnp.float32))

    def body(first, count, *refs):
        _pack_kernel(w, tile, first, count, *refs)

    steps = jnp.maximum(jnp.max(count), _I32(1))
    words = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((batches, rows * w.height, LANES), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batches, steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (None, tile * w.height, LANES), lambda b, i, *s: (b, at(b, i, *s), _I32(0))
            ),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=expected * (d * w.dtype.itemsize + w.row_bytes),
            transcendentals=0,
        ),
        name="fp8moe_pack_rows",
        interpret=interpret,
    )(first, count, *operands)
    return words.reshape(batches * rows * w.height, 1, LANES), rows


# ---------------------------------------------------------------------------------------- fetch
def can_be_direct(dtype, shape, scaled: bool) -> bool:
    """Whether rows of an array [*, rows, d] can be fetched from it as it is."""
    whole = shape[-2] % 8 == 0 and shape[-1] % LANES == 0
    return whole and np.dtype(dtype).itemsize >= 2 and not scaled


def direct_view(x):
    """The bytes of x [b, rows, d] in tiles of one row, or of the two that share words."""
    batches, n, d = x.shape
    x = x.reshape(batches * n // 8, 8, d // LANES, LANES).transpose(0, 2, 1, 3)
    together = 4 // x.dtype.itemsize
    return x.reshape(batches * n // 8, d // LANES, 8 // together, together, LANES)


def buffer_shape(w: Words, slots: int):
    """The scratch that rows are fetched into."""
    if w.direct:
        return pltpu.VMEM((slots * w.pitch, w.per, LANES), w.dtype)
    return pltpu.VMEM((slots * w.pitch, 1, LANES), jnp.int32)


def start_row(w: Words, source, row, buffer, slot, semaphore):
    """Starts the copy of one row to a slot of a buffer."""
    if w.direct:
        within = row & _I32(7) if w.per == 1 else (row >> _I32(1)) & _I32(3)
        part = source.at[row >> _I32(3), :, within]
    else:
        part = source.at[pl.ds(row * _I32(w.height), w.height)]
    pltpu.make_async_copy(part, buffer.at[pl.ds(slot * _I32(w.pitch), w.height)], semaphore).start()


def wait_rows(w: Words, count, most: int, buffer, semaphore):
    """Waits for ``count`` <= most rows that were started on this semaphore.

    A semaphore counts bytes: one wait for each power of two in count.
    """
    for bit in range(most.bit_length()):

        @pl.when((count & _I32(1 << bit)) != _I32(0))
        def _wait(rows=1 << bit):
            part = buffer.at[pl.ds(0, rows * w.height)]
            pltpu.make_async_copy(part, part, semaphore).wait()


def readable(w: Words, buffer, interpret):
    """A buffer as 32-bit [slots * pitch, 128], whose loads can stride over rows at no cost.

    The interpreter has no such view; there `load_words` takes the buffer as it is.
    """
    if interpret:
        return buffer
    if w.paired:
        buffer = buffer.bitcast(jnp.int32)
    return buffer.reshape(buffer.shape[0], LANES)


def load_words(w: Words, buffer, slot, chunk, step: int = 1):
    """int32 [8, 128]: a chunk of the rows in slots slot, slot + step, ... of a readable buffer."""
    if w.lines:
        return buffer[chunk, pl.ds(slot, 8, stride=step), :]
    at = pl.ds(slot * w.pitch + chunk, 8, stride=step * w.pitch)
    if len(buffer.shape) == 2:
        words = buffer[at, :]
    elif w.paired:
        words = pltpu.bitcast(buffer[at], jnp.int32)[:, 0, :]
    else:
        words = buffer[at, 0, :]
    return words if words.dtype == np.int32 else pltpu.bitcast(words, jnp.int32)
