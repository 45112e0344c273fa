"""ragged_glu, and its derivatives, as an XLA loop over tiles of the valid rows."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.xla import loops


def ragged_glu(x, p, *, platform):
    """RaggedGluOperands, RaggedGluParams -> [out] or [out, scale]."""
    del platform
    xs = [v for v in x[2:] if v is not None]
    m = xs[0].shape[-2]
    batch = loops.batch_shape(x.start.shape, *(v.shape[:-2] for v in xs))
    size = int(np.prod(batch))
    dtype = p.out_dtype if p.qdtype is None else numerics.QDTYPES[p.qdtype]
    shapes = [((*batch, m, p.fn.out_width), dtype)]
    shapes += [] if p.qdtype is None else [((*batch, m, 1), np.dtype(np.float32))]
    if m == 0 or size == 0:
        return [jnp.zeros(*s) for s in shapes]

    flat = [v.reshape(-1, v.shape[-1]) for v in xs]
    own = [jnp.asarray(loops.batch_index(v.shape[:-2], batch)) for v in xs]
    todo = loops.entries(x.start[..., None], x.end[..., None], batch)
    rows = loops.tile_rows(m)

    def part(i, outs):
        b = todo.batch[i]

        def tile(first, mask, outs):
            args = [
                loops.read_rows(v, o[b] * np.int32(m) + first, rows)
                for v, o in zip(flat, own, strict=True)
            ]
            values = quantize_result(p.fn(*args), p)
            values[0] = loops.view(values[0], outs[0].dtype)
            target = b * np.int32(m) + first
            return [loops.put_rows(o, target, v, mask) for o, v in zip(outs, values, strict=True)]

        return loops.for_tiles(todo.start[i], todo.end[i], m, rows, tile, outs)

    outs = [jnp.zeros((size * m, shapes[0][0][-1]), loops.bits_dtype(dtype))]
    outs += [jnp.ones((size * m, 1), jnp.float32) for _ in shapes[1:]]
    outs = lax.fori_loop(np.int32(0), todo.count, part, outs)
    return [loops.view(o, t).reshape(s) for o, (s, t) in zip(outs, shapes, strict=True)]


def quantize_result(value, p):
    """[value] in the result's dtype, or [qvalue, scale] with one scale per row."""
    if p.qdtype is None:
        return [value.astype(p.out_dtype)]
    dtype = numerics.QDTYPES[p.qdtype]
    absmax = jnp.max(jnp.abs(value), axis=1, keepdims=True)
    q = numerics.round_to(value * numerics.block_inverse(absmax, dtype), dtype)
    return [q, numerics.block_scale(absmax, dtype)]
