"""The two MXUs of a core in the kernel's own hands: weights, rows, results, a step each.

An MXU multiplies rows [rows, 256] with the 256 x 256 *weights* it holds and adds to *results* it
keeps, [rows, 256] float32 at an address, 8 rows for each two addresses. They stay there from one
basic block to the next, so a kernel can take the results of one product while it starts another;
the products that the compiler schedules begin and end in one block, MXU idle at both ends.

The next weights wait in one of two registers. What goes in must come out: a register is pushed
once before each load, and results are popped (which leaves zeros) before the kernel ends.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims._primitive import mxu_steps
from fp8moe_prims.lowering.tpu import dots
from fp8moe_prims.lowering.tpu.chip import CHIPS

COUNT = 2  # MXUs of a core
WIDTH = 256  # rows and columns of the weights
RESULTS = 256  # addresses of the results of one MXU
_ROWS = 4  # rows of results [rows, 256] at an address


def _address(row: int) -> int:
    """Of results that begin with a row, a multiple of 8."""
    return row // _ROWS


class Mxus:
    """The MXUs of the chip."""

    def reset(self):
        """Before the first step of a kernel."""

    def push(self, weights, mxu: int, register: int):
        """[256, 256] into a register of an MXU."""
        pltpu.matmul_push_rhs(weights, register, mxu)

    def multiply(self, rows, mxu: int, register: int, first: int):
        """Loads the register's weights: results[first:] += rows [r, 256] @ weights."""
        multiply, _ = mxu_steps()
        multiply(_address(first), rows, mxu, register)

    def pop(self, mxu: int, first: int, rows: int):
        """The results of ``rows`` rows from ``first``, [rows, 256] float32; zeros are left."""
        _, pop = mxu_steps()
        return pop(_address(first), (rows, WIDTH), jnp.float32, mxu)

    def check(self, out):
        """After a product into ``out``: what went in has come out."""


class InterpretedMxus(Mxus):
    """The same for the interpreter, in scratch memory.

    A register is NaN but between a push and the load of it, and so are weights that are pushed over
    others: mistakes show. `check` makes the output NaN if results or waiting weights are left.
    """

    def __init__(self, waiting, results):
        self.waiting, self.results = waiting, results

    @staticmethod
    def scratch_shapes():
        """Of the arguments: weights in the registers, results."""
        shapes = (COUNT, 2, WIDTH, WIDTH), (COUNT, RESULTS * _ROWS, WIDTH)
        return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]

    def reset(self):
        self.waiting[...] = jnp.full(self.waiting.shape, np.float32(np.nan))
        self.results[...] = jnp.zeros(self.results.shape, jnp.float32)

    def push(self, weights, mxu, register):
        assert weights.shape == (WIDTH, WIDTH), weights.shape
        free = jnp.isnan(self.waiting[mxu, register])
        weights = jnp.where(free, weights.astype(jnp.float32), np.float32(np.nan))
        self.waiting[mxu, register] = weights

    def multiply(self, rows, mxu, register, first):
        weights = self.waiting[mxu, register]
        self.waiting[mxu, register] = jnp.full((WIDTH, WIDTH), np.float32(np.nan))
        at = pl.ds(first, rows.shape[0])
        x, dims = rows.astype(jnp.float32), (((1,), (0,)), ((), ()))
        product = dots.dot(x, weights, dims, CHIPS["v7x"])
        self.results[mxu, at, :] = self.results[mxu, at, :] + product

    def pop(self, mxu, first, rows):
        at = pl.ds(first, rows)
        x = self.results[mxu, at, :]
        self.results[mxu, at, :] = jnp.zeros((rows, WIDTH), jnp.float32)
        return x

    def check(self, out):
        left = jnp.any(self.results[...] != np.float32(0))
        waiting = jnp.any(jnp.logical_not(jnp.isnan(self.waiting[...])))

        @pl.when(left | waiting)
        def _():
            out[...] = jnp.full(out.shape, np.nan, out.dtype)
