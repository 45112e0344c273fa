"""Rows in VMEM, as they were fetched, into the standard layout: the second half of the gathers."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu import rows
from fp8moe_prims.lowering.tpu.layout import LANES

_I32 = np.int32


def _rounded(x, dtype):
    """float32 to the output's dtype, once."""
    dtype = np.dtype(dtype)
    return numerics.round_to(x, dtype) if dtype.itemsize == 1 else x.astype(dtype)


def _blocks(w, buffer, slot, shift, keep):
    """(block, int32 [8, 128]): ``w.group`` consecutive rows in the standard layout."""
    for chunk in range(w.chunks):
        words = [
            rows.load_words(w, buffer, slot + _I32(part), chunk, w.per) for part in range(w.per)
        ]
        if keep is not None:
            words = [word & mask for word, mask in zip(words, keep, strict=True)]
        if w.paired:  # the row of each word, shifted to its high half
            high = _I32(-0x10000)
            even, odd = (word << part for word, part in zip(words, shift, strict=True))
            yield chunk, lax.shift_right_logical(even, _I32(16)) | (odd & high)
        elif w.direct:
            yield chunk, words[0]
        else:
            for q, bits in enumerate(rows.exchange(words)):
                if q * w.chunks + chunk < w.blocks:
                    yield q * w.chunks + chunk, bits


def unpack_tile(w, tile, dtype, buffer, slot, out, weight=None, shift=None, keep=None):
    """The rows in slots slot, slot + 1, ... of a buffer into the standard layout.

    Args:
      w: the layout of the buffer.
      tile: rows.
      dtype: of the products with the weights.
      buffer: as from `rows.readable`.
      slot: the first.
      out: [tile, width].
      weight: None or float32 [tile, 128], columns that the rows are multiplied by.
      shift: int32 [tile, 128], what brings the row to the top of its words; of paired rows.
      keep: None or int32 [tile, 128], -1 for the rows to keep and 0 for those to be zero.
    """

    def group(g, carry):
        base = g * _I32(w.group)
        row = pl.multiple_of(base, w.group)
        at = pl.ds(row, w.group)
        factor = None if weight is None else weight[at, :]
        parts = lambda column: [
            column[pl.ds(base + _I32(part), 8, stride=w.per), :] for part in range(w.per)
        ]
        shifts = parts(shift) if w.paired else None
        keeps = None if keep is None else parts(keep)
        for block, bits in _blocks(w, buffer, slot + base, shifts, keeps):
            values = pltpu.bitcast(bits, w.dtype)
            if factor is not None:
                values = _rounded(values.astype(jnp.float32) * factor, dtype)
            out[at, pl.ds(block * LANES, LANES)] = values
        return carry

    lax.fori_loop(_I32(0), _I32(tile // w.group), group, _I32(0))


def zero_tile(out, out_scale=None):
    """A tile without any row of the range: zeros, of scale 1."""
    out[...] = jnp.zeros_like(out)
    if out_scale is not None:
        out_scale[...] = jnp.ones_like(out_scale)


def unpack_scale(w, tile, buffer, slot, out, weight=None, keep=None):
    """The scales of the buffer's rows, along lanes: out [1, 1, lanes].

    Args:
      w, tile, buffer, slot: as in `unpack_tile`.
      out: [1, 1, lanes].
      weight: None or [1, 1, lanes], what they are multiplied by.
      keep: None or float32 [1, 1, lanes], 0 for the rows whose scale is 1.
    """
    for part in range(out.shape[-1] // LANES):
        columns = []
        for g in range(LANES // 8):
            row = part * LANES + 8 * g
            if row < tile:
                columns.append(rows.load_words(w, buffer, slot + row, w.chunks))
            else:
                columns.append(jnp.zeros((8, LANES), jnp.int32))
        bits = jnp.concatenate(columns, axis=0)
        scale = jnp.transpose(pltpu.bitcast(bits, jnp.float32))[:1, :]
        lanes = pl.ds(part * LANES, LANES)
        if keep is not None:
            scale = jnp.where(keep[0, :, lanes] != np.float32(0.0), scale, np.float32(1.0))
        out[0, :, lanes] = scale if weight is None else scale * weight[0, :, lanes]
