"""What all kernels need: lanes, rounding, columns, batches, loops."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 128  # columns of a tile, and of a register


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def flat_map(batch, full) -> np.ndarray:
    """int32 [prod(full)]: which flat batch index of an operand serves each one of the output."""
    index = np.arange(math.prod(batch), dtype=np.int32).reshape(batch)
    return np.broadcast_to(index, full).reshape(-1)


def as_column(row):
    """[1, 128] -> [128, 128] with out[i, :] = row[0, i]."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, LANES)))


def tree_max(values):
    """The maximum of a list of arrays, in few steps that wait for each other."""
    while len(values) > 1:
        half = len(values) // 2
        pairs = [jnp.maximum(values[i], values[half + i]) for i in range(half)]
        values = pairs + values[2 * half :]
    return values[0]


def loop_from(lower, upper, body):
    """body(i) for i in [lower, upper), int32 scalars."""

    def one(i):
        body(i)
        return i + np.int32(1)

    # A while loop with an int32 counter: that of fori_loop is an int64 where x64 is on.
    lax.while_loop(lambda i: i < upper, one, jnp.asarray(lower, jnp.int32))
