"""The router weights' gradient on TPU: out[b, t, j] = <a[b, t], y[b, indices[b, t, j]]>.

One kernel with the combine, see ragged_gather_reduce.py. Zero where an index is not in
[start, end).
"""

import jax

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.ragged_gather_reduce import over_tokens


def ragged_gather_dot(x, p, *, chip: Chip, interpret=False) -> jax.Array:
    """The dot products of each token's row with the rows it names: [*B, t, top_k].

    Args:
      x: operands: a [*ba, t, d], y [*by, m, d], y_scale None | float32 [*by, m | 1, 1], indices
        int32 [*bi, t, top_k], start, end int32 [*bs].
      p: parameters: out_dtype, expected_rows.
      chip: the target chip.
      interpret: passed to pallas_call.
    """
    return over_tokens(x, None, x.a, p.out_dtype, p.expected_rows, chip, interpret)
