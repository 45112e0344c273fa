"""ring_all_gather as jax.lax.all_gather."""

import jax.numpy as jnp
from jax import lax

from fp8moe_prims.lowering.xla import loops


def ring_all_gather(x, p, *, platform):
    """RingAllGatherOperands, RingParams -> [out] or [out, scale]."""
    del platform
    return [_gather(a, p) for a in x if a is not None]


def _gather(x, p):
    axis = p.dim + x.ndim + (0 if p.tiled else 1)
    gather = lambda a: lax.all_gather(a, p.axis, axis=axis, tiled=p.tiled)
    if x.dtype.itemsize > 1 or jnp.issubdtype(x.dtype, jnp.integer):
        return gather(x)
    # some platforms know no float8 collective: it is moved as bytes
    return loops.view(gather(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)
