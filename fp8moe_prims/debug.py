"""Reports of bad data at run time, by name: off by default, and then nothing of it is traced.

The operations clamp bad data (groups that overrun, indices out of range) rather than read or write
outside a buffer. Inside ``debug_checks()`` each call also looks at its data as it was given and, in
a callback on the host, raises `DataError` with the name of the operation and of the argument.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fp8moe_prims._primitive import wait_for_callbacks

_enabled = jax.make_user_context(False)
_found: list[str] = []  # since the outermost debug_checks() began


class DataError(ValueError):
    """Data that an operation had to clamp, or that makes its result meaningless."""


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Context manager inside which the operations report bad data by name.

    Reported are negative group sizes, groups that overrun the buffer, overlap or descend, rows of
    a group that rhs has no matrix for where no group_offset says that this is meant, a group_offset
    that leaves no room for the local groups, a range [start, end) outside the buffer, indices of
    ``ragged_gather`` that are neither a row nor -1, and scales of valid rows or of weights that are
    not finite or not positive.

    It works under jit (the setting is part of jit's cache key: functions traced outside have no
    checks), vmap, grad and shard_map. The report is an exception of the computation: jitted code
    raises it as a runtime error that contains the text, and leaving the context waits for what is
    still running and raises `DataError` if anything was found and no error is on its way already.

    Raises:
      DataError: on leaving, if an operation inside found bad data.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> try:
    ...     with fp8.debug_checks():
    ...         _ = fp8.gmm(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([3, -1]))
    ... except Exception as e:
    ...     print("gmm: group_sizes" in str(e))
    True
    """
    outermost = not _enabled.value
    if outermost:
        _found.clear()
    try:
        with _enabled(True):
            yield
    finally:
        if outermost:
            wait_for_callbacks(ignore_errors=bool(_found))
    if outermost and _found:
        raise DataError("; ".join(dict.fromkeys(_found)))


def enabled() -> bool:
    """Whether the operations are to look at their data."""
    return _enabled.value


def report(op: str, argument: str, bad, why: str, value) -> None:
    """Raises on the host, when the program runs, if any of ``bad`` is true.

    Args:
      op, argument: what is named.
      bad: bool array; of the first true element the value is shown.
      why: what the value takes, as in "must not be negative".
      value: array that broadcasts to bad's shape.
    """

    def text(where, value):
        shown = np.broadcast_to(value, np.shape(bad))[where]
        place = f"[{', '.join(map(str, where))}]" if where else ""
        return f"{argument}{place} {why}, got {shown}"

    report_text(op, bad, text, value)


def report_text(op: str, bad, text_of: Callable, *values) -> None:
    """`report` with a text of one's own: ``text_of(place, *values)`` of the first true element.

    The text is made on the host, and only where there is something to report.
    """

    def on_host(bad, *values):
        bad = np.asarray(bad)
        if bad.any():
            where = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
            text = f"fp8moe {op}: {text_of(where, *map(np.asarray, values))}"
            _found.append(text)
            raise DataError(text)

    jax.debug.callback(on_host, bad, *values)


# ------------------------------------------------------------------------ what is looked at


def check_groups(op, group_sizes, group_starts, group_offset, num_groups: int, m: int) -> None:
    """Sizes, starts and the offset, as `groups.group_ranges` takes them."""
    sizes = jnp.asarray(group_sizes)
    wide = sizes.astype(jnp.float32)  # no overflow, whatever integers they are
    report(op, "group_sizes", sizes < 0, "must not be negative", sizes)
    starts = []
    if group_starts is None:
        ends = jnp.cumsum(jnp.maximum(wide, 0))
    else:
        starts = [jnp.asarray(group_starts)]
        report(op, "group_starts", starts[0] < 0, "must not be negative", starts[0])
        first = starts[0].astype(jnp.float32)
        ends = first + jnp.maximum(wide, 0)
        # A group's rows begin where those before it have ended.
        reach = jax.lax.cummax(jnp.where(wide > 0, ends, np.float32(0)))
        before = jnp.concatenate([jnp.zeros_like(reach[:1]), reach[:-1]])
        overlaps = (wide > 0) & (first < before)
        report(op, "group_starts", overlaps, "must ascend without overlap", starts[0])

    def overrun(where, sizes, starts=None):
        (e,) = where
        size = int(sizes[e])
        start = sum(max(int(s), 0) for s in sizes[:e]) if starts is None else int(starts[e])
        return (
            f"group {e} ends at row {start + size}, beyond the {m} rows"
            f" (group_sizes[{e}] = {size}, start {start})"
        )

    report_text(op, (wide > 0) & (ends > m), overrun, sizes, *starts)
    if group_offset is not None:
        offset = jnp.asarray(group_offset)
        most = sizes.shape[0] - num_groups
        bad = (offset < 0) | (offset > most)
        why = f"must lie in [0, {most}] for {num_groups} of {sizes.shape[0]} groups to be local"
        report(op, "group_offset", bad, why, offset)


def check_surplus(op, group_sizes, num_groups: int, tail: str) -> None:
    """Without a group_offset no group beyond those of rhs has rows."""
    total = np.shape(group_sizes)[0]
    if total > num_groups:
        text = lambda where: (
            f"group_sizes has {total} groups, rhs {num_groups}, and no group_offset: the rows of"
            f" group {num_groups + where[0]} are {tail}"
        )
        report_text(op, jnp.asarray(group_sizes)[num_groups:] > 0, text)


def check_indices(op, indices, start, end, rows: int) -> None:
    """Indices at the places [start, end) name one of so many rows, or -1 for none."""
    indices = jnp.asarray(indices)
    at = jnp.arange(indices.shape[0], dtype=jnp.int32)
    used = (at >= start) & (at < end)
    bad = used & ((indices < -1) | (indices >= rows))
    report(op, "indices", bad, f"must be -1 or lie in [0, {rows})", indices)


def check_scale(op, argument, scale, starts=None, ends=None) -> None:
    """A scale is finite and positive; of one per row only the rows [starts, ends) count.

    Args:
      op, argument: what is named.
      scale: array or None.
      starts, ends: int32 [g], or scalars; None: all rows.
    """
    if scale is None:
        return
    bad = ~(jnp.isfinite(scale) & (scale > 0))
    if starts is not None and scale.shape[0] > 1:
        row = jnp.arange(scale.shape[0], dtype=jnp.int32)[:, None]
        inside = (row >= jnp.reshape(starts, (1, -1))) & (row < jnp.reshape(ends, (1, -1)))
        bad = bad & jnp.any(inside, axis=1).reshape(-1, *(1,) * (scale.ndim - 1))
    report(op, f"{argument}.scale", bad, "must be finite and positive", scale)
