"""Loops over the rows that groups cover, shared by the XLA lowerings.

A batched call is one flat problem: the batch dimensions of an operand collapse into its rows or
groups, and each pair (batch, group) becomes an *entry* with the offset of its rows in each operand
and the index of its matrix. Empty entries are skipped and the others walked tile by tile, so the
work is that of the valid rows (rounded up to a tile per group), whatever the buffer's size.

XLA on CPU has no slice or update of 8- and 16-bit floats: around each it widens the whole buffer,
which would cost the buffer's size in every step. So a buffer that a loop writes holds the bits of
such floats as integers (`bits_dtype`, `to_bits`, `view`); one that it reads is read as integers.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Entries(NamedTuple):
    """One row per (batch, group); the non-empty ones come first."""

    count: object  # int32 [], how many are not empty
    batch: object  # int32 [E], index into the flattened batch
    group: object  # int32 [E]
    start: object  # int32 [E], first row within the batch element
    end: object  # int32 [E]


def batch_shape(*lead) -> tuple[int, ...]:
    return np.broadcast_shapes(*lead)


def entries(starts, ends, batch: tuple[int, ...]) -> Entries:
    """The entries of starts and ends [*b, g], for the full batch shape."""
    g = starts.shape[-1]
    size = int(np.prod(batch))
    start, end = (jnp.broadcast_to(x, (*batch, g)).reshape(-1) for x in (starts, ends))
    order = jnp.argsort(start >= end, stable=True).astype(jnp.int32)  # non-empty first
    index = np.arange(size * g, dtype=np.int32)
    table = [jnp.asarray(index // max(g, 1)), jnp.asarray(index % max(g, 1)), start, end]
    count = jnp.sum(start < end, dtype=jnp.int32)
    return Entries(count, *(jnp.take(t, order, axis=0) for t in table))


def batch_index(lead: tuple[int, ...], batch: tuple[int, ...]) -> np.ndarray:
    """int32: which element of an operand's own batch each element of the full batch reads."""
    own = np.arange(int(np.prod(lead)), dtype=np.int32).reshape(lead)
    return np.broadcast_to(own, batch).reshape(-1)


def tile_rows(m: int) -> int:
    """Rows of a tile: enough to amortize a step of the loop, few enough for small groups."""
    return max(1, min(128, m))


def read_rows(x, first, rows: int):
    """float32 [rows, d] of x [*, d] from row ``first``."""
    bits = take_rows(_bits_in_loop(x, first), first, rows)
    return from_bits(bits, x.dtype)


def read_matrix(x, index):
    """float32 [a, b] of x [*, a, b] at ``index``."""
    bits = lax.dynamic_index_in_dim(_bits_in_loop(x, index), index, keepdims=False)
    return from_bits(bits, x.dtype)


def gather_bits(x, index):
    """[rows, d] of x [*, d] at ``index`` [rows], which lies inside, as `bits_dtype`."""
    return _bits_in_loop(x, index).at[index].get(mode="promise_in_bounds")


def bits_dtype(dtype) -> np.dtype:
    """What holds values of this dtype in a loop: unsigned integers for 8- and 16-bit floats."""
    dtype = np.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
    return np.dtype(f"uint{8 * dtype.itemsize}") if narrow else dtype


def to_bits(x, dtype):
    """float32 values as ``dtype``, held as `bits_dtype`."""
    return view(x.astype(dtype), bits_dtype(dtype))


def zeros_apart(shape, dtype, source):
    """Zeros, as `bits_dtype`, that XLA does not merge with those made from another ``source``.

    It makes one buffer of equal zeros, and where several loops write into it a copy for each.
    """
    bits = view(source.reshape(-1)[:1], f"uint{8 * source.dtype.itemsize}")
    never = jnp.minimum(bits.astype(jnp.int32) & np.int32(0xFF), np.int32(0))  # 0
    return jnp.broadcast_to(never.astype(bits_dtype(dtype)).reshape((1,) * len(shape)), shape)


def view(x, dtype):
    """The same bits as another dtype of the same width."""
    return x if x.dtype == np.dtype(dtype) else lax.bitcast_convert_type(x, dtype)


def _bits_in_loop(x, varying):
    """``view(x, bits_dtype)``, tied to a value of the loop's step.

    Else XLA would hoist the cast out of the loop and make a copy of the buffer; so it becomes part
    of the slice.
    """
    bits = bits_dtype(x.dtype)
    if bits == x.dtype:
        return x
    return view(lax.optimization_barrier((x, varying))[0], bits)


def from_bits(bits, dtype):
    """float32 values of ``dtype`` from its `bits_dtype`.

    Integer arithmetic for float8, which is slow to convert where there is no instruction for it:
    the exponent is rebased, subnormal numbers are multiples of the smallest, and the largest
    exponent (e5m2) or the largest code (e4m3) is no number.
    """
    dtype = np.dtype(dtype)
    if bits.dtype == dtype or dtype.itemsize == 2:
        return view(bits, dtype).astype(jnp.float32)
    info = jnp.finfo(dtype)
    mantissa, bias = int(info.nmant), 1 - int(info.minexp)
    code = bits.astype(jnp.int32)
    magnitude, sign = code & np.int32(0x7F), (code & np.int32(0x80)) << np.int32(24)
    shifted = magnitude << np.int32(23 - mantissa)
    spacing = np.float32(2.0 ** (1 - bias - mantissa))
    subnormal = view(magnitude.astype(jnp.float32) * spacing, jnp.int32)
    value = jnp.where(
        magnitude < np.int32(1 << mantissa), subnormal, shifted + np.int32((127 - bias) << 23)
    )
    if dtype == np.dtype(jnp.float8_e5m2):
        value = jnp.where(magnitude >= np.int32(0x7C), shifted | np.int32(0xFF << 23), value)
    else:
        value = jnp.where(magnitude == np.int32(0x7F), np.int32(0x7FC00000), value)
    return view(value | sign, jnp.float32)


def take_rows(x, first, rows: int):
    """[rows, d] of x [*, d] from row ``first``, in x's dtype."""
    return lax.dynamic_slice(x, (first, np.int32(0)), (rows, x.shape[1]))


def put_rows(x, first, value, mask):
    """x with its rows from ``first`` replaced by ``value`` where mask [rows, 1] holds."""
    old = take_rows(x, first, value.shape[0])
    return lax.dynamic_update_slice(x, jnp.where(mask, value, old), (first, np.int32(0)))


def for_tiles(start, end, m: int, rows: int, body, carry):
    """Runs ``carry = body(first, mask, carry)`` for the tiles of rows [start, end).

    A tile has ``rows`` rows from ``first``, which never leave the m rows of the batch element;
    mask [rows, 1] is true for those that this step is for.
    """

    # Counted one by one: XLA on CPU (jaxlib 0.10) computes for some constant bounds that a loop
    # over ``row`` in steps of ``rows`` has no step at all.
    steps = lax.div(end - start + np.int32(rows - 1), jnp.full_like(start, rows))

    def step(state):
        i, carry = state
        row = start + i * np.int32(rows)
        first = jnp.minimum(row, np.int32(m - rows))
        index = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        mask = (index >= row) & (index < jnp.minimum(row + np.int32(rows), end))
        return i + np.int32(1), body(first, mask, carry)

    return lax.while_loop(lambda state: state[0] < steps, step, (np.int32(0), carry))[1]
