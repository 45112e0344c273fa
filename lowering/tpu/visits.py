"""Tile tables: which (row tile, group) pairs a ragged kernel steps through, found at run time.

The rows of batch b are cut into T tiles of tm rows; *unit* b * T + t is tile t of batch b. A
*visit* is one grid step: a unit and the group whose rows are handled there. Groups are numbered
p = 1 + b * g + e over all batches, in the order in which they lie, so that visits sorted by group
are sorted by unit too; p = 0 stands for "before the first group that has rows". With ``gaps``, the
units that no group touches get a visit as well, which belongs to the group before it.

Visit v of group p handles unit v + shift[p], and is one of the group's own iff v < stop[p]. So a
whole call is described by one number per visit and a few per group, made by elementwise int32
operations of size (units + groups) * groups that XLA fuses; nothing has the size of the rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_I = np.int32


@dataclasses.dataclass(frozen=True)
class Visits:
    """The tables, to be prefetched into SMEM.

    Attributes:
      group: int32 [V], the p of each visit, V = B * (T + g).
      shift: int32 [1 + B * g], see the module docstring.
      stop: int32 [1 + B * g].
      count: int32 [], the visits of this call, at least 1 and at most V: the grid's bound.
    """

    group: jax.Array
    shift: jax.Array
    stop: jax.Array
    count: jax.Array


def max_visits(batches: int, m: int, g: int, tm: int) -> int:
    """The length V of the visit table."""
    return batches * (-(-m // tm) + g)


def make_visits(starts, ends, *, m: int, tm: int, gaps: bool) -> Visits:
    """The visits of groups with rows [starts, ends).

    Args:
      starts, ends: int32 [B, g], ascending in each batch. Where they are not (bad data), the tables
        still index no unit outside the buffer, after a clip to [0, B * T).
      m: rows of a batch.
      tm: rows of a tile.
      gaps: whether units without any group's row get a visit.
    """
    batches, g = starts.shape
    tiles = -(-m // tm)
    units, total = batches * tiles, max_visits(batches, m, g, tm)
    base = np.repeat(np.arange(batches, dtype=np.int32) * _I(tiles), g)
    starts, ends = starts.reshape(-1), ends.reshape(-1)  # [B * g]
    full = ends > starts
    first = base + jax.lax.div(starts, jnp.full_like(starts, tm))
    last = base + jax.lax.div(ends - _I(1), jnp.full_like(starts, tm))
    own = jnp.where(full, last - first + _I(1), _I(0))
    reach = jax.lax.cummax(jnp.where(full, last, _I(-1)))  # the last unit handled so far
    if gaps:
        before = jnp.concatenate([jnp.full_like(reach[:1], -1), reach[:-1]])
        gap = jnp.where(full, jnp.maximum(first - before - _I(1), _I(0)), _I(0))
    else:
        gap = jnp.zeros_like(own)
    stop = jax.lax.cumsum(gap + own)
    offset = stop - own
    count = stop[-1]
    if gaps:
        count = count + (_I(units - 1) - reach[-1])
    # The group of visit v is the last one with rows whose first visit is not after v.
    index = np.arange(1, batches * g + 1, dtype=np.int32)
    begun = full[None, :] & (offset[None, :] <= np.arange(total, dtype=np.int32)[:, None])
    group = jnp.max(jnp.where(begun, index[None, :], _I(0)), axis=1)  # [V]
    none = jnp.zeros_like(stop[:1])
    return Visits(
        group=group,
        shift=jnp.concatenate([none, first - offset]),
        stop=jnp.concatenate([none, stop]),
        count=jnp.clip(count, _I(1), _I(total)),
    )
