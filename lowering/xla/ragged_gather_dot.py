"""ragged_gather_dot as an XLA loop over tiles of tokens."""

import jax.numpy as jnp
import numpy as np

from fp8moe_prims.lowering.xla.ragged_gather_reduce import over_tokens


def ragged_gather_dot(x, p, *, platform):
    """RaggedGatherDotOperands, RowsParams -> [*b, t, top_k]."""
    del platform
    top_k = x.indices.shape[-1]

    def tile(named, weights, own):
        del weights
        columns = []
        for j in range(top_k):
            rows, valid = named(j)
            dot = jnp.sum(rows * own, axis=1, keepdims=True)
            columns.append(jnp.where(valid, dot, np.float32(0)))
        return jnp.concatenate(columns, axis=1)

    return over_tokens(x, tile, top_k, x.a.shape[:-2], None, x.a, p.out_dtype)
