"""gmm as an XLA loop: for each group that has rows, for each tile of its rows, one matmul.

Quantized values are multiplied as float32, which holds them and their products' scales exactly
enough: results differ from the TPU kernel's by summation order only.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims._primitive import dot_general
from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.xla import loops


def gmm(x, p, *, platform):
    """GmmOperands, GmmParams -> [*b, m, n]; see fp8moe_prims/gmm.py."""
    del platform  # one loop serves them all
    *lhs_lead, m, k = x.lhs.shape
    *rhs_lead, g, a, b = x.rhs.shape
    n = a if p.transpose_rhs else b
    batch = loops.batch_shape(lhs_lead, rhs_lead, x.starts.shape[:-1])
    out_shape = (*batch, m, n)
    if m == 0 or g == 0 or 0 in batch:
        return jnp.zeros(out_shape, p.out_dtype)

    lhs = x.lhs.reshape(-1, k)
    rhs = x.rhs.reshape(-1, a, b)
    row_scale = _flat_row_scale(x.lhs_scale, (*lhs_lead, m, 1))  # [*, 1] or None
    scale = _RhsScale(x.rhs_scale, x.rhs.shape, p.transpose_rhs)
    lhs_batch = jnp.asarray(loops.batch_index(lhs_lead, batch))
    rhs_batch = jnp.asarray(loops.batch_index(rhs_lead, batch))
    todo = loops.entries(x.starts, x.ends, batch)
    rows = loops.tile_rows(m)

    def group(i, out):  # out [prod(batch) * m, n]
        source = rhs_batch[todo.batch[i]] * np.int32(g) + todo.group[i]
        weight = scale.dequantize(loops.read_matrix(rhs, source), source)
        fold, post = scale.of_contraction(source), scale.of_output(source)
        base = lhs_batch[todo.batch[i]] * np.int32(m)

        def tile(first, mask, out):
            values = loops.read_rows(lhs, base + first, rows)
            values = jnp.where(mask, values, 0) * fold
            values = quantize_rows(values, p)
            y = dot_general(
                values,
                weight,
                (((1,), (1 if p.transpose_rhs else 0,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            if row_scale is not None:
                y = y * loops.take_rows(row_scale, base + first, rows)
            y = loops.to_bits(y * post, p.out_dtype)
            return loops.put_rows(out, todo.batch[i] * np.int32(m) + first, y, mask)

        return loops.for_tiles(todo.start[i], todo.end[i], m, rows, tile, out)

    flat = (int(np.prod(batch)) * m, n)
    if p.tail == "zero":
        out = loops.zeros_apart(flat, p.out_dtype, x.lhs)
    else:
        out = lax.empty(flat, loops.bits_dtype(p.out_dtype))
    out = lax.fori_loop(np.int32(0), todo.count, group, out)
    return loops.view(out, p.out_dtype).reshape(out_shape)


def quantize_rows(x, p):
    """The quantized values of x [rows, k], times their scales: one scale per (row x block_k)."""
    if p.lhs_dtype is None:
        return x
    dtype = numerics.QDTYPES[p.lhs_dtype]
    if p.lhs_bound is not None:
        scale = numerics.fixed_scale(p.lhs_bound, dtype)
        return numerics.round_trip(x * (np.float32(1.0) / scale), dtype) * scale
    rows, k = x.shape
    block = min(p.block_k, k)
    padded = jnp.pad(x, ((0, 0), (0, -k % block))).reshape(rows, -1, block)
    absmax = jnp.max(jnp.abs(padded), axis=-1, keepdims=True)
    q = numerics.round_trip(padded * numerics.block_inverse(absmax, dtype), dtype)
    q = q * numerics.block_scale(absmax, dtype)
    return q.reshape(rows, -1)[:, :k]


def _flat_row_scale(scale, shape):
    return None if scale is None else jnp.broadcast_to(scale, shape).reshape(-1, 1)


class _RhsScale:
    """How an rhs scale [*b, g | 1, s1, s2] enters: on the output, on lhs, or on the weights.

    Constant along the contraction: the output's columns are multiplied. Full along it and constant
    along the output: lhs is multiplied, before it is quantized. Else the weights are dequantized.
    """

    def __init__(self, scale, rhs_shape, transpose_rhs):
        self.scale = self.kind = None
        if scale is None:
            return
        *lead, g, a, b = rhs_shape
        contraction, output = (2, 1) if transpose_rhs else (1, 2)
        self.shape, self.output_dim = (a, b), (a, b)[output - 1]
        self.scale = jnp.broadcast_to(scale, (*lead, g, *scale.shape[-2:]))
        self.scale = self.scale.reshape(-1, *scale.shape[-2:])
        sizes = self.scale.shape
        if sizes[contraction] == 1:
            self.kind = "output"
        elif sizes[contraction] == rhs_shape[contraction - 3] and sizes[output] == 1:
            self.kind = "contraction"
        else:
            self.kind = "weight"

    def _at(self, source):
        return lax.dynamic_index_in_dim(self.scale, source, keepdims=False)

    def of_output(self, source):
        """[1, n] or [1, 1]."""
        if self.kind != "output":
            return jnp.ones((1, 1), jnp.float32)
        return _repeat(self._at(source).reshape(1, -1), (1, self.output_dim))

    def of_contraction(self, source):
        """[1, k] or [1, 1]."""
        if self.kind != "contraction":
            return jnp.ones((1, 1), jnp.float32)
        return self._at(source).reshape(1, -1)

    def dequantize(self, weight, source):
        if self.kind != "weight":
            return weight
        return weight * _repeat(self._at(source), self.shape)


def _repeat(scale, shape):
    for axis, (s, d) in enumerate(zip(scale.shape, shape, strict=True)):
        if s not in (1, d):
            scale = jnp.repeat(scale, d // s, axis=axis, total_repeat_length=d)
    return scale
