"""What the operations on the rows of a ragged buffer share: ranges, checks, weights."""

import jax.numpy as jnp

from fp8moe_prims import debug
from fp8moe_prims.groups import clip_integers, integers
from fp8moe_prims.lowering import numerics
from fp8moe_prims.qarray import WIDE_DTYPES


def row_range(op: str, start, end, m: int):
    """(start, end), int32 scalars clamped to [0, m]; end None is m; an inverted range is empty."""
    out = []
    for name, x in (("start", start), ("end", m if end is None else end)):
        x = integers(name, x)
        if x.shape not in ((), (1,)):
            raise ValueError(f"{name}: takes a scalar, shape () or (1,), got {x.shape}")
        if debug.enabled():
            debug.report(op, name, (x < 0) | (x > m), f"must lie in [0, {m}]", x)
        out.append(clip_integers(x, 0, m).reshape(()))
    return tuple(out)


def check_indices(name, x, rank: int):
    """The indices as int32: out-of-range values of any width become -1."""
    x = integers(name, x)
    if x.ndim != rank:
        raise ValueError(f"{name}: takes rank {rank}, got shape {x.shape}")
    return clip_integers(x, -1, 2**31 - 1)


def check_weights(name, x, shape):
    """The weights, wide, of this shape."""
    if x is None:
        return None
    if getattr(x, "dtype", None) not in WIDE_DTYPES:
        raise TypeError(
            f"{name}: takes bfloat16, float16 or float32, got {getattr(x, 'dtype', type(x))}"
        )
    if x.shape != shape:
        raise ValueError(f"{name}: takes shape {shape}, got {x.shape}")
    return jnp.asarray(x)


def is_data(x) -> bool:
    """Whether x is a plain float8 or int8 array, which is moved as data and has no gradient."""
    return getattr(x, "dtype", None) in numerics.QDTYPES.values()
