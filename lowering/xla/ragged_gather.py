"""ragged_gather as an XLA loop over tiles of the valid rows."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering.xla import loops


def ragged_gather(x, p, *, platform):
    """RaggedGatherOperands, RowsParams -> [out] or [out, scale]."""
    del platform
    # Rows are moved as they are, unless they are multiplied.
    dtype = np.dtype(p.out_dtype)
    *x_lead, t, d = x.x.shape
    *index_lead, m = x.indices.shape
    weights_lead = () if x.weights is None else x.weights.shape[:-1]
    batch = loops.batch_shape(x_lead, index_lead, x.start.shape, weights_lead or x.start.shape)
    size = int(np.prod(batch))
    scaled = x.x_scale is not None
    shapes = [((*batch, m, d), dtype)] + [((*batch, m, 1), np.dtype(np.float32))] * scaled
    if m == 0 or t == 0 or size == 0:
        return [jnp.zeros(*s) for s in shapes]

    table = x.x.reshape(-1, d)
    scale = x.x_scale.reshape(-1, 1) if scaled else None
    indices = x.indices.reshape(-1)
    weights = None if x.weights is None else x.weights.reshape(-1).astype(jnp.float32)
    index_of = lambda lead: jnp.asarray(loops.batch_index(tuple(lead), batch))
    x_batch, i_batch = index_of(x_lead), index_of(index_lead)
    w_batch = None if weights is None else index_of(weights_lead)
    todo = loops.entries(x.start[..., None], x.end[..., None], batch)
    rows = loops.tile_rows(m)

    def part(i, outs):
        b = todo.batch[i]

        def tile(first, mask, outs):
            at = lax.dynamic_slice(indices, (i_batch[b] * np.int32(m) + first,), (rows,))
            valid = mask[:, 0] & (at >= 0) & (at < np.int32(t))
            source = x_batch[b] * np.int32(t) + jnp.clip(at, 0, np.int32(t - 1))
            got = loops.gather_bits(table, source)
            values = [jnp.where(valid[:, None], got, jnp.zeros((), got.dtype))]
            if scaled:
                values.append(jnp.where(valid[:, None], scale[source], np.float32(1)))
            if weights is not None:
                w = lax.dynamic_slice(weights, (w_batch[b] * np.int32(m) + first,), (rows,))
                values[-1] = _times(
                    values[-1], w[:, None], valid[:, None], None if scaled else x.x.dtype, dtype
                )
            target = b * np.int32(m) + first
            return [loops.put_rows(o, target, v, mask) for o, v in zip(outs, values, strict=True)]

        return loops.for_tiles(todo.start[i], todo.end[i], m, rows, tile, outs)

    outs = [jnp.zeros((size * m, shapes[0][0][-1]), loops.bits_dtype(dtype))]
    outs += [jnp.ones((size * m, 1), jnp.float32) for _ in shapes[1:]]
    outs = lax.fori_loop(np.int32(0), todo.count, part, outs)
    return [loops.view(o, t).reshape(s) for o, (s, t) in zip(outs, shapes, strict=True)]


def _times(value, weight, valid, own, dtype):
    """The row scale, or the bits of rows whose ``own`` dtype is given, times the weights."""
    if own is None:
        return jnp.where(valid, value * weight, np.float32(1))
    wide = loops.view(value, own).astype(jnp.float32) * weight
    return loops.to_bits(jnp.where(valid, wide, np.float32(0)), dtype)
