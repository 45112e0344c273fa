"""ragged_gather_reduce as an XLA loop over tiles of tokens; it reads the rows they name only."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering.xla import loops


def ragged_gather_reduce(x, p, *, platform):
    """RaggedGatherReduceOperands, RowsParams -> [*b, t, d]."""
    del platform
    d, top_k = x.y.shape[-1], x.indices.shape[-1]
    weights_lead = () if x.weights is None else x.weights.shape[:-2]

    def tile(named, weights, own):
        del own
        total = jnp.zeros((weights.shape[0], d), jnp.float32)
        for j in range(top_k):
            rows, valid = named(j)
            term = rows if x.weights is None else rows * weights[:, j, None]
            total = total + jnp.where(valid, term, np.float32(0))
        return total

    return over_tokens(x, tile, d, weights_lead, x.weights, None, p.out_dtype)


def over_tokens(x, tile, width, extra_lead, weights, own, out_dtype):
    """[*b, t, width], from tiles of tokens.

    Args:
      x: has y, y_scale, indices, start and end.
      tile: (named, weights [rows, top_k], own [rows, d]) -> float32 [rows, width]; named(j) is
        the dequantized rows that the tokens' j-th index names, and whether it is one.
      extra_lead, weights: batch dimensions of the weights [*b, t, top_k], or of own [*b, t, d].
      own: rows of the tokens themselves, or None.
      out_dtype: of the result.
    """
    *y_lead, m, d = x.y.shape
    *index_lead, t, top_k = x.indices.shape
    batch = loops.batch_shape(y_lead, index_lead, x.start.shape, extra_lead or x.start.shape)
    size = int(np.prod(batch))
    if 0 in (m, t, size, top_k):
        return jnp.zeros((*batch, t, width), out_dtype)

    table = x.y.reshape(-1, d)
    scale = None
    if x.y_scale is not None:
        scale = jnp.broadcast_to(x.y_scale, (*y_lead, m, 1)).reshape(-1, 1)
    indices = x.indices.reshape(-1, top_k)
    weights = None if weights is None else weights.reshape(-1, top_k).astype(jnp.float32)
    own = None if own is None else own.reshape(-1, d)
    index_of = lambda lead: jnp.asarray(loops.batch_index(tuple(lead), batch))
    y_batch, i_batch, e_batch = index_of(y_lead), index_of(index_lead), index_of(extra_lead)
    start, end = (jnp.broadcast_to(v, batch).reshape(-1) for v in (x.start, x.end))
    rows = loops.tile_rows(t)

    def part(b, out):
        def step(first, mask, out):
            at = loops.take_rows(indices, i_batch[b] * np.int32(t) + first, rows)

            def named(j):
                valid = (at[:, j] >= start[b]) & (at[:, j] < end[b])
                source = y_batch[b] * np.int32(m) + jnp.clip(at[:, j], 0, np.int32(m - 1))
                values = loops.from_bits(loops.gather_bits(table, source), x.y.dtype)
                values = values if scale is None else values * scale[source]
                return values, valid[:, None]

            extra = e_batch[b] * np.int32(t) + first
            w = jnp.zeros((rows, top_k), jnp.float32)
            w = w if weights is None else loops.take_rows(weights, extra, rows)
            mine = None if own is None else loops.read_rows(own, extra, rows)
            value = loops.to_bits(tile(named, w, mine), out_dtype)
            return loops.put_rows(out, b * np.int32(t) + first, value, mask)

        return loops.for_tiles(np.int32(0), np.int32(t), t, rows, step, out)

    out = jnp.zeros((size * t, width), loops.bits_dtype(out_dtype))
    out = lax.fori_loop(np.int32(0), np.int32(size), part, out)
    return loops.view(out, out_dtype).reshape(*batch, t, width)
