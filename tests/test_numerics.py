"""The shared rounding rule's shortcuts equal what they stand for, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.xla import loops
from tools import _hlo

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 448, 464, 465, 480, 57344, 61440, 61441, 1e38],
    np.float32,
)


def _same(actual, expected):
    """Equal bits, where any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(
        actual.view(np.uint32)[numbers], expected.view(np.uint32)[numbers]
    )


class RoundTripTest(parameterized.TestCase):
    def _check(self, x, name):
        dtype = numerics.QDTYPES[name]
        expected = jax.jit(lambda x: numerics.round_to(x, dtype).astype(jnp.float32))(x)
        _same(jax.jit(lambda x: numerics.round_trip(x, dtype))(x), expected)

    @parameterized.parameters(*numerics.QDTYPES)
    def test_bits_of_every_exponent(self, name):
        """All upper halves of a float32, which hold every tie, with random lower halves."""
        rng = np.random.default_rng(0)
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, rng.integers(0, 1 << 16, 1 << 16)):
            bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.asarray(low).astype(np.uint32)
            self._check(bits.view(np.float32), name)

    @parameterized.parameters(*numerics.QDTYPES)
    def test_special_values_and_neighbours(self, name):
        grid = np.arange(256, dtype=np.uint8).view(numerics.QDTYPES[name]).astype(np.float32)
        ties = (grid[:-1] + grid[1:]) / 2
        points = np.concatenate([SPECIAL, grid, ties[np.isfinite(ties)]])
        with np.errstate(all="ignore"):
            near = [np.nextafter(points, np.float32(to)) for to in (np.inf, -np.inf)]
        points = np.concatenate([points, *near])
        self._check(np.concatenate([points, -points]), name)


class ReadRowsTest(parameterized.TestCase):
    @parameterized.parameters(
        jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.bfloat16, jnp.float16
    )
    def test_every_value(self, dtype):
        dtype = np.dtype(dtype)
        codes = np.arange(1 << 8 * dtype.itemsize).astype(f"uint{8 * dtype.itemsize}")
        x = jnp.asarray(codes.view(dtype).reshape(-1, 16))
        read = jax.jit(lambda x: loops.read_rows(x, jnp.int32(0), x.shape[0]))
        _same(read(x), x.astype(jnp.float32))


class CompiledLoopTest(parameterized.TestCase):
    """On the CPU nothing of the buffer's size is widened or copied inside a loop."""

    @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
    def test_no_copy_of_the_buffer(self, dtype):
        m, k, n, g = 16384, 256, 128, 4

        def fn(lhs, rhs, sizes, dout):
            gmm = lambda a, b: fp8.gmm(a, b, sizes, recipe=fp8.QuantRecipe())
            out, vjp = jax.vjp(gmm, lhs, rhs)
            return out, *vjp(dout)

        shapes = ((m, k), (g, k, n), (m, n))
        lhs, rhs, dout = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
        sizes = jax.ShapeDtypeStruct((g,), jnp.int32)
        with fp8.use_lowering("xla"):
            text = jax.jit(fn).lower(lhs, rhs, sizes, dout).compile().as_text()
        computations = _hlo.parse_hlo(text).computations
        every = [op for c in computations.values() for op in c.values()]
        fused = {name for op in every if op.opcode == "fusion" for name in op.called("calls")}
        stored = [op for c in computations.keys() - fused for op in computations[c].values()]
        for op in stored:
            for array in op.results:
                if _hlo.runs_over_rows(array, m):
                    self.assertNotEqual(op.opcode, "copy")
                    self.assertLessEqual(array.bytes, max(m * k, m * n) * jnp.dtype(dtype).itemsize)


if __name__ == "__main__":
    absltest.main()
