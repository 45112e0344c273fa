"""tgmm_quant as an XLA loop: for each row block of each group that has rows, two passes.

The first takes the absmax of every channel over the block's tiles; the second quantizes the tiles
and adds their products, in float32, to the group's accumulator.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims._primitive import dot_general
from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.xla import loops


def tgmm_quant(x, p, *, platform):
    """TgmmOperands, TgmmParams -> [*b, g, k, n] or [*b, g, n, k]."""
    del platform
    *lhs_lead, m, k = x.lhs.shape
    *dout_lead, _, n = x.dout.shape
    g = x.starts.shape[-1]
    batch = loops.batch_shape(lhs_lead, dout_lead, x.starts.shape[:-1])
    matrix = (n, k) if p.transpose_out else (k, n)
    size = int(np.prod(batch))
    if m == 0 or g == 0 or size == 0:
        return jnp.zeros((*batch, g, *matrix), p.out_dtype)

    lhs, dout = x.lhs.reshape(-1, k), x.dout.reshape(-1, n)
    row_scale = None
    if x.lhs_scale is not None:
        row_scale = jnp.broadcast_to(x.lhs_scale, (*lhs_lead, m, 1)).reshape(-1, 1)
    lhs_batch = jnp.asarray(loops.batch_index(lhs_lead, batch))
    dout_batch = jnp.asarray(loops.batch_index(dout_lead, batch))
    todo = loops.entries(x.starts, x.ends, batch)
    rows = loops.tile_rows(m)

    def group(i, out):  # out [prod(batch) * g, *matrix]
        lhs_base = lhs_batch[todo.batch[i]] * np.int32(m)
        dout_base = dout_batch[todo.batch[i]] * np.int32(m)

        def load(first, mask):
            """float32 [rows, k] and [rows, n], zero where masked; the row scale is in dout."""
            left = loops.read_rows(lhs, lhs_base + first, rows)
            right = loops.read_rows(dout, dout_base + first, rows)
            if row_scale is not None:
                right = right * loops.take_rows(row_scale, lhs_base + first, rows)
            return jnp.where(mask, left, 0), jnp.where(mask, right, 0)

        def block(state):
            start, total = state
            end = jnp.minimum(start + np.int32(p.block_m), todo.end[i])
            for_tiles = lambda body, carry: loops.for_tiles(start, end, m, rows, body, carry)
            left, right = _channel_rules(p, load, for_tiles, k, n)

            def product(first, mask, total):
                a, b = load(first, mask)
                a, b = left(a), right(b)
                a, b = (b, a) if p.transpose_out else (a, b)
                return total + dot_general(
                    a,
                    b,
                    (((0,), (0,)), ((), ())),
                    precision=lax.Precision.HIGHEST,
                    preferred_element_type=jnp.float32,
                )

            return end, for_tiles(product, total)

        zero = jnp.zeros(matrix, jnp.float32)
        _, total = lax.while_loop(lambda s: s[0] < todo.end[i], block, (todo.start[i], zero))
        target = todo.batch[i] * np.int32(g) + todo.group[i]
        total = loops.to_bits(total, p.out_dtype)
        return lax.dynamic_update_index_in_dim(out, total, target, 0)

    out = jnp.zeros((size * g, *matrix), loops.bits_dtype(p.out_dtype))
    out = lax.fori_loop(np.int32(0), todo.count, group, out)
    return loops.view(out, p.out_dtype).reshape(*batch, g, *matrix)


def _channel_rules(p, load, for_tiles, k, n):
    """Two functions that round a tile to the grid of its row block and scale it back."""
    need_left = p.lhs_dtype is not None
    need_right = p.dout_dtype is not None and p.dout_bound is None

    def widen(first, mask, carry):
        tops = [jnp.max(jnp.abs(t), axis=0, keepdims=True) for t in load(first, mask)]
        return tuple(jnp.maximum(c, t) for c, t in zip(carry, tops, strict=True))

    carry = (jnp.zeros((1, k), jnp.float32), jnp.zeros((1, n), jnp.float32))
    if need_left or need_right:
        carry = for_tiles(widen, carry)

    def rule(dtype, bound, absmax):
        if dtype is None:
            return lambda tile: tile
        dtype = numerics.QDTYPES[dtype]
        if bound is not None:
            scale = numerics.fixed_scale(bound, dtype)
            inverse = np.float32(1.0) / scale
        else:
            scale = numerics.block_scale(absmax, dtype)
            inverse = numerics.block_inverse(absmax, dtype)
        return lambda tile: numerics.round_trip(tile * inverse, dtype) * scale

    return rule(p.lhs_dtype, None, carry[0]), rule(p.dout_dtype, p.dout_bound, carry[1])
