"""ragged_scatter_add as an XLA loop of scatters over tiles of the rows in range."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering.xla import loops


def ragged_scatter_add(x, p, *, platform):
    """RaggedScatterAddOperands, ScatterParams -> [*b, t, d]."""
    del platform
    *rows_lead, r, d = x.rows.shape
    *target_lead, _, k = x.targets.shape
    weights_lead = () if x.weights is None else x.weights.shape[:-2]
    batch = loops.batch_shape(rows_lead, target_lead, x.start.shape, weights_lead or x.start.shape)
    size, t = int(np.prod(batch)), p.num_rows
    if 0 in (r, t, size, k):
        return jnp.zeros((*batch, t, d), p.out_dtype)

    source = x.rows.reshape(-1, d)
    targets = x.targets.reshape(-1, k)
    weights = None if x.weights is None else x.weights.reshape(-1, k).astype(jnp.float32)
    index_of = lambda lead: jnp.asarray(loops.batch_index(tuple(lead), batch))
    r_batch, t_batch = index_of(rows_lead), index_of(target_lead)
    w_batch = None if weights is None else index_of(weights_lead)
    todo = loops.entries(x.start[..., None], x.end[..., None], batch)
    rows = loops.tile_rows(r)

    def part(i, out):
        b = todo.batch[i]

        def tile(first, mask, out):
            value = loops.read_rows(source, r_batch[b] * np.int32(r) + first, rows)
            at = loops.take_rows(targets, t_batch[b] * np.int32(r) + first, rows)
            for j in range(k):
                term = value
                if weights is not None:
                    w = loops.take_rows(weights, w_batch[b] * np.int32(r) + first, rows)
                    term = value * w[:, j, None]
                inside = mask[:, 0] & (at[:, j] >= 0) & (at[:, j] < np.int32(t))
                place = jnp.where(inside, b * np.int32(t) + at[:, j], np.int32(size * t))
                term = jnp.where(inside[:, None], term, np.float32(0))
                out = out.at[place].add(term, mode="drop")
            return out

        return loops.for_tiles(todo.start[i], todo.end[i], r, rows, tile, out)

    out = jnp.zeros((size * t, d), jnp.float32)
    out = lax.fori_loop(np.int32(0), todo.count, part, out)
    return out.astype(p.out_dtype).reshape(*batch, t, d)
