"""From ``group_sizes`` to the rows of each local group: where all data mistakes are clamped."""

import jax
import jax.numpy as jnp
import numpy as np


def group_ranges(
    group_sizes, group_starts, group_offset, num_groups: int, m: int, allow_fewer: bool = False
):
    """Starts and ends of the local groups: int32[num_groups] each, 0 <= start <= end <= m.

    Local group e is global group e + group_offset. Sizes below 0 count as 0, groups that overrun
    are cut at m, groups outside group_sizes are empty.

    Args:
      group_sizes: integers [G].
      group_starts: integers [G], or None: the groups follow each other from row 0.
      group_offset: an integer, an integer array of shape () or (1,), or None for 0.
      num_groups: local groups.
      m: rows of the buffer.
      allow_fewer: whether G may be less than num_groups.
    """
    sizes = integers("group_sizes", group_sizes)
    if sizes.ndim != 1:
        raise ValueError(f"group_sizes: takes rank 1, [G], got shape {sizes.shape}")
    total = sizes.shape[0]
    if total < num_groups and not allow_fewer:
        raise ValueError(f"group_sizes: takes at least the {num_groups} groups of rhs, got {total}")
    if group_starts is None:
        ends = _bounded_cumsum(clip_integers(sizes, 0, m), m)
        starts = jnp.concatenate([jnp.zeros(min(1, total), jnp.int32), ends[:-1]])
    else:
        first = integers("group_starts", group_starts)
        if first.shape != sizes.shape:
            raise ValueError(
                f"group_starts: takes the shape of group_sizes, {sizes.shape}, got {first.shape}"
            )
        first = clip_integers(first, -m, m)
        starts = jnp.clip(first, 0, m)
        ends = jnp.clip(first + clip_integers(sizes, 0, 2 * m), starts, m)
    if group_offset is None and total >= num_groups:
        return starts[:num_groups], ends[:num_groups]
    offset = integers("group_offset", 0 if group_offset is None else group_offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset: takes shape () or (1,), got {offset.shape}")
    index = clip_integers(offset, -num_groups, total).reshape(()) + jnp.arange(
        num_groups, dtype=jnp.int32
    )
    local = (index >= 0) & (index < total)
    if total == 0:
        return (jnp.zeros(num_groups, jnp.int32),) * 2
    index = jnp.clip(index, 0, total - 1)
    return tuple(jnp.where(local, x[index], 0) for x in (starts, ends))


def integers(name, x):
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: takes integers, got {x.dtype}")
    return jnp.asarray(x)


def clip_integers(x, low: int, high: int):
    """Clips in the array's own integer type, where the bounds may not fit, then casts to int32."""
    info = jnp.iinfo(x.dtype)
    low, high = max(low, int(info.min)), min(high, int(info.max))
    low, high = (np.asarray(b, x.dtype) for b in (low, high))
    return jnp.clip(x, low, high).astype(jnp.int32)


def _bounded_cumsum(sizes, m: int):
    """min(cumsum(sizes), m) of sizes in [0, m], without overflow."""
    if sizes.size * m < 2**31:
        return jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), np.int32(m))
    return jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, np.int32(m)), sizes)
