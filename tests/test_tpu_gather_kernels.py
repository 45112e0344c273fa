"""The row gathers for TPU, in Pallas's interpreter: equal to naive loops, to the bit."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import ragged_gather as gather
from fp8moe_prims.lowering.tpu import ragged_gather_dot as gather_dot
from fp8moe_prims.lowering.tpu import ragged_gather_reduce as gather_reduce
from fp8moe_prims.lowering.tpu import rows
from fp8moe_prims.lowering.tpu.chip import CHIPS, SAFE
from fp8moe_prims.ragged_gather import RowsParams
from tests import helpers, oracle, row_cases

_F32 = np.dtype(np.float32)
_BF16 = np.dtype(jnp.bfloat16)
_E4M3 = np.dtype(jnp.float8_e4m3fn)
_INT8 = np.dtype(np.int8)
_KERNELS = {
    "gather": gather.ragged_gather,
    "reduce": gather_reduce.ragged_gather_reduce,
    "dot": gather_dot.ragged_gather_dot,
}
_NAMES = ("x", "y", "a", "indices", "start", "end", "weights", "x_scale", "y_scale")


def _runner(op, out_dtype, tail="zero", chip="v7x", expected_rows=None):
    """The kernel under jit, in the interpreter: operands by name in, list of numpy arrays out."""
    p = RowsParams(np.dtype(out_dtype), tail, expected_rows)
    target = (CHIPS | {"safe": SAFE})[chip]

    @jax.jit
    def run(operands):
        x = types.SimpleNamespace(**(dict.fromkeys(_NAMES) | operands))
        return _KERNELS[op](x, p, chip=target, interpret=pltpu.InterpretParams())

    return lambda **operands: jax.tree.map(np.asarray, run(operands))


def _reduced(y, indices, start, end, weights=None, scale=None, a=None):
    """ragged_gather_reduce, or ragged_gather_dot with a, as a loop in float32."""
    t, top_k = indices.shape
    out = np.zeros((t, y.shape[1]), np.float32)
    dots = np.zeros((t, top_k), np.float32)
    for token in range(t):
        for j in range(top_k):
            row = indices[token, j]
            if start <= row < end:
                value = y[row].astype(np.float32)
                if scale is not None:
                    value = value * scale[min(row, len(scale) - 1)]
                if a is not None:
                    dots[token, j] = (a[token].astype(np.float32) * value).sum()
                out[token] += value if weights is None else value * weights[token, j]
    return out if a is None else dots


class RaggedGatherTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # name, dtype, t, m, d, weights, scale, chip, expected rows
        ("e4m3_scaled", _E4M3, 35, 40, 200, True, True, "v7x", None),
        ("int8", _INT8, 33, 40, 130, False, False, "safe", None),
        ("bf16_packed", _BF16, 9, 40, 129, True, False, "v7x", None),
        ("bf16_direct", _BF16, 40, 70, 128, False, False, "v5e", 8),
        ("f32_direct", _F32, 16, 40, 128, True, False, "v7x", None),
    )
    def test_moves(self, dtype, t, m, d, weighted, scaled, chip, expected):
        """Bits and zero rows, over ranges: whole, partial, reversed."""
        x, indices, weights, scale = row_cases.gather_inputs(dtype, t, m, d, weighted, scaled)
        run = _runner("gather", dtype, chip=chip, expected_rows=expected)
        for start, end in ((0, m), (3, m - 5), (m, 0)):
            got = run(
                x=x,
                indices=indices,
                start=np.int32(start),
                end=np.int32(end),
                weights=weights,
                x_scale=scale,
            )
            want, want_scale = oracle.gathered(x, indices, start, end, weights, scale)
            helpers.assert_same_bits(got[0], want)
            self.assertLen(got, 2 if scaled else 1)
            if scaled:
                np.testing.assert_array_equal(got[1], want_scale)

    def test_batch_and_undefined_tail(self):
        """Batches of some operands; the rows of the range, whatever the others hold."""
        rng = np.random.RandomState(1)
        t, m, d = 24, 41, 96
        x = row_cases.random_bits(rng, (1, 3, t, d), _E4M3)
        scale = np.exp2(rng.randint(-9, 9, (1, 3, t, 1))).astype(np.float32)
        indices = rng.randint(-1, t + 1, (2, 1, m)).astype(np.int32)
        start, end = np.array([[3], [33]], np.int32), np.array([[34], [34]], np.int32)
        weights = rng.randint(1, 9, (1, 1, m)).astype(np.float32)
        out, out_scale = _runner("gather", _E4M3, tail="undefined")(
            x=x, indices=indices, start=start, end=end, weights=weights, x_scale=scale
        )
        self.assertEqual((out.shape, out_scale.shape), ((2, 3, m, d), (2, 3, m, 1)))
        for i, j in np.ndindex(2, 3):
            first, last = start[i, 0], end[i, 0]
            want, want_scale = oracle.gathered(
                x[0, j], indices[i, 0], first, last, weights[0, 0], scale[0, j]
            )
            valid = slice(first, last)
            helpers.assert_same_bits(out[i, j, valid], want[valid])
            np.testing.assert_array_equal(out_scale[i, j, valid], want_scale[valid])

    def test_nothing(self):
        for t, m in ((0, 4), (4, 0)):
            out = _runner("gather", _BF16)(
                x=jnp.zeros((t, 8), _BF16),
                indices=np.zeros(m, np.int32),
                start=np.int32(0),
                end=np.int32(m),
            )
            np.testing.assert_array_equal(out[0].astype(np.float32), np.zeros((m, 8)))


class RaggedGatherReduceTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # name, op, dtype, out dtype, m, d, top_k, weights, row scale, chip
        ("bf16_direct", "reduce", _BF16, _BF16, 48, 256, 3, True, False, "v7x"),
        ("f32_packed", "reduce", _F32, _F32, 35, 96, 6, False, False, "v5p"),
        ("e4m3_scaled", "reduce", _E4M3, _BF16, 41, 200, 2, True, True, "v7x"),
        ("dot_bf16", "dot", _BF16, _F32, 40, 128, 2, False, False, "safe"),
        ("dot_e4m3_scaled", "dot", _E4M3, _F32, 41, 96, 1, False, True, "v7x"),
    )
    def test_sums(self, op, dtype, out_dtype, m, d, top_k, weighted, scaled, chip):
        """NaN outside the range; indices of any value; ranges whole, partial, reversed."""
        rng = np.random.RandomState(2)
        t = 33
        y = row_cases.small(rng, (m, d), dtype)
        if dtype == _F32 and not weighted:  # sums that depend on their order
            y = rng.randn(m, d).astype(np.float32)
        indices = rng.randint(-2, m + 2, (t, top_k)).astype(np.int32)
        indices[3], indices[:, 0][5] = -1, 2**31 - 1
        weights = rng.randint(1, 200, (t, top_k)).astype(np.float32) / 64 if weighted else None
        scale = None
        if scaled:
            scale = np.exp2(rng.permutation(m) % 9 - 4).astype(np.float32)[:, None]
        a = row_cases.small(rng, (t, d), _BF16) if op == "dot" else None
        run = _runner(op, out_dtype, chip=chip)
        for start, end in ((0, m), (3, m - 5), (m, 0)):
            stale = y.copy()
            stale[:start] = stale[max(end, 0) :] = np.nan
            got = run(
                y=stale,
                indices=indices,
                start=np.int32(start),
                end=np.int32(end),
                weights=weights,
                y_scale=scale,
                a=a,
            )
            want = _reduced(y, indices, start, end, weights, scale, a)
            np.testing.assert_array_equal(
                got.astype(np.float32), want.astype(out_dtype).astype(np.float32)
            )

    def test_batch(self):
        """Batches of some operands, a scale of the whole y, and no weights that count for NaN."""
        rng = np.random.RandomState(3)
        m, t, d, top_k = 40, 9, 128, 2
        y = row_cases.small(rng, (1, 3, m, d), _BF16)
        y[:, :, m - 1] = np.inf
        indices = rng.randint(-2, m - 1, (2, 1, t, top_k)).astype(np.int32)
        start, end = np.array([[3], [0]], np.int32), np.array([[30], [m]], np.int32)
        weights = rng.randint(1, 9, (1, 1, t, top_k)).astype(np.float32)
        scale = np.exp2(np.arange(3)).astype(np.float32).reshape(1, 3, 1, 1)
        out = _runner("reduce", _F32)(
            y=y, indices=indices, start=start, end=end, weights=weights, y_scale=scale
        )
        for i, j in np.ndindex(2, 3):
            want = _reduced(
                y[0, j], indices[i, 0], start[i, 0], end[i, 0], weights[0, 0], scale[0, j]
            )
            np.testing.assert_array_equal(out[i, j], want)

    def test_values(self):
        """A NaN shows in the tokens that read it, and a weight of an absent row nowhere."""
        m, t, d = 8, 3, 128
        y = np.ones((m, d), np.float32)
        y[2, 5] = np.nan
        indices = np.array([[1, 2], [-1, 3], [4, 99]], np.int32)
        weights = np.array([[1, 2], [np.nan, 3], [4, np.inf]], np.float32)
        out = _runner("reduce", _F32)(
            y=y, indices=indices, start=np.int32(0), end=np.int32(m), weights=weights
        )
        want = np.full((t, d), np.array([[3], [3], [4]], np.float32))
        want[0, 5] = np.nan
        np.testing.assert_array_equal(out, want)

    def test_nothing(self):
        for m, t in ((0, 4), (4, 0)):
            for op, width in (("reduce", 8), ("dot", 2)):
                out = _runner(op, _F32)(
                    y=np.zeros((m, 8), np.float32),
                    indices=np.zeros((t, 2), np.int32),
                    start=np.int32(0),
                    end=np.int32(m),
                    a=np.zeros((t, 8), np.float32),
                )
                np.testing.assert_array_equal(out, np.zeros((t, width)))


class RowsTest(absltest.TestCase):
    def test_exchange_is_its_own_inverse(self):
        rng = np.random.RandomState(4)
        for parts in (1, 2, 4):
            words = [
                jnp.asarray(rng.randint(-(2**31), 2**31, (8, 128), np.int64).astype(np.int32))
                for _ in range(parts)
            ]
            once = rows.exchange(words)
            split = lambda x: np.stack([np.asarray(v) for v in x])
            before, after = (
                split(x).view(f"u{4 // parts}").reshape(parts, 8, 128, parts) for x in (words, once)
            )
            np.testing.assert_array_equal(after, before.transpose(3, 1, 2, 0))
            for word, twice in zip(words, rows.exchange(once), strict=True):
                np.testing.assert_array_equal(twice, word)


if __name__ == "__main__":
    absltest.main()
