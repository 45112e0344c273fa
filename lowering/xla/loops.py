"""Loops over the rows that groups cover, shared by the XLA lowerings.

A batched call is one flat problem: the batch dimensions of an operand collapse into its rows or
groups, and each pair (batch, group) becomes an *entry* with the offset of its rows in each operand
and the index of its matrix. Empty entries are skipped and the others walked tile by tile, so the
work is that of the valid rows (rounded up to a tile per group), whatever the buffer's size.
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


def take_rows(x, first, rows: int):
    """[rows, d] of x [*, d] from row ``first``."""
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

    def step(state):
        row, carry = state
        first = jnp.minimum(row, np.int32(m - rows))
        index = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        mask = (index >= row) & (index < jnp.minimum(row + np.int32(rows), end))
        return row + np.int32(rows), body(first, mask, carry)

    return lax.while_loop(lambda state: state[0] < end, step, (start, carry))[1]
