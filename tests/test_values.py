"""Every row of the table equals its reference, under each lowering; the tail changes no bit."""

import hashlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import fp8moe_prims as fp8
from tests import cases, checks, helpers


class ValuesTest(parameterized.TestCase):
    @helpers.named(cases.select())
    def test_xla(self, case):
        checks.value(case, "xla")

    @helpers.named(cases.select(tag="interpret")[::4])
    def test_interpret(self, case):
        checks.value(case, "interpret")

    @helpers.named(cases.select(tag="grad")[::8])
    def test_eager(self, case):
        helpers.assert_same_bits(checks.run(case, "auto", jit=False), checks.run(case, "auto"))

    @helpers.named([c for c in cases.select(tag="grad") if not c.valid.all()][::3])
    def test_tail_changes_no_bit(self, case):
        for poison in (np.nan, np.inf, 3e38):
            checks.tail_changes_no_bit(case, "xla", poison)

    @helpers.named([c for c in cases.select(tag="grad") if not c.valid.all()][::6])
    def test_tail_changes_no_bit_interpreted(self, case):
        checks.tail_changes_no_bit(case, "interpret", np.nan)

    @helpers.named(cases.select(sweep=True) + cases.select(tag="interpret"))
    @pytest.mark.sweep
    def test_sweep(self, case):
        for lowering in ("xla", "interpret"):
            checks.value(case, lowering)


def _digest() -> str:
    """A hash of the bits of a quantized gmm and its gradients."""
    rng = np.random.default_rng(0)
    normal = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
    lhs, rhs, dout = normal(130, 256), normal(3, 256, 64), normal(130, 64)

    @jax.jit
    def run(lhs, rhs, dout):
        fn = lambda l, r: fp8.gmm(l, r, np.array([70, 0, 50]), recipe=fp8.QuantRecipe())
        out, pull = jax.vjp(fn, lhs, rhs)
        return out, pull(dout)

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run(lhs, rhs, dout)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


LOWERINGS = ("xla", "interpret")


class NumbersTest(parameterized.TestCase):
    """Blocks that are zero, tiny, huge or not finite."""

    def _gmm(self, lhs, lowering, rhs=None, recipe=None):
        rhs = jnp.asarray(np.ones((2, lhs.shape[1], 8), np.float32) if rhs is None else rhs)
        sizes = np.array([lhs.shape[0] // 2, lhs.shape[0] - lhs.shape[0] // 2], np.int32)
        with fp8.use_lowering(lowering):
            return np.asarray(
                fp8.gmm(jnp.asarray(lhs), rhs, sizes, recipe=recipe or fp8.QuantRecipe())
            )

    @parameterized.parameters(*LOWERINGS)
    def test_tiny_rows(self, lowering):
        lhs = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
        clean = self._gmm(lhs, lowering)
        lhs[2], lhs[5], lhs[6] = 1e-36, 1e-40, 0
        out = self._gmm(lhs, lowering)
        keep = [0, 1, 3, 4, 7]
        helpers.assert_same_bits(out[keep], clean[keep])
        self.assertTrue(np.isfinite(out).all())
        np.testing.assert_array_equal(out[[5, 6]], 0)

    @parameterized.parameters(*LOWERINGS)
    def test_rows_not_finite_stay_alone(self, lowering):
        lhs = np.random.default_rng(0).standard_normal((8, 200)).astype(np.float32)
        clean = self._gmm(lhs, lowering)
        lhs[1, 2], lhs[6, 199] = np.inf, np.nan
        out = self._gmm(lhs, lowering)
        keep = [0, 2, 3, 4, 5, 7]
        helpers.assert_same_bits(out[keep], clean[keep])
        self.assertTrue(np.isnan(out[[1, 6]]).all())

    @parameterized.parameters(*LOWERINGS)
    def test_fixed_range_saturates(self, lowering):
        values = np.array([448, 464, 465, 480, 1000, -1000], np.float32)
        recipe = fp8.QuantRecipe(act_calibration="fixed,-448,448", weight_dtype=None)
        lhs = np.zeros((6, 128), np.float32)
        lhs[:, 0] = values
        out = self._gmm(lhs, lowering, recipe=recipe)
        np.testing.assert_array_equal(out[:, 0], np.clip(values, -448, 448))

    @parameterized.parameters(*LOWERINGS)
    def test_moved_row_keeps_its_bits(self, lowering):
        lhs = np.random.default_rng(0).standard_normal((200, 160)).astype(np.float32)
        rhs = np.random.default_rng(1).standard_normal((2, 160, 96)).astype(np.float32)
        rhs[1] = rhs[0]
        out = self._gmm(lhs, lowering, rhs)
        order = np.random.default_rng(2).permutation(200)
        helpers.assert_same_bits(self._gmm(lhs[order], lowering, rhs), out[order])

    @parameterized.parameters(*LOWERINGS)
    def test_accumulates_in_float32(self, lowering):
        k = 4096
        lhs, rhs = np.full((2, k), 30, np.float16), np.full((2, k, 8), 30, np.float16)
        with fp8.use_lowering(lowering):
            out = fp8.gmm(
                jnp.asarray(lhs),
                jnp.asarray(rhs),
                np.array([1, 1]),
                preferred_element_type=jnp.float32,
            )
        np.testing.assert_array_equal(out, 900.0 * k)

    @parameterized.parameters(*LOWERINGS)
    def test_weight_gradient_accumulates_in_float32(self, lowering):
        lhs = np.full((4096, 8), 1 + 2.0**-7, np.float32)
        with fp8.use_lowering(lowering):
            out = fp8.tgmm_quant(
                jnp.asarray(lhs),
                jnp.asarray(lhs),
                np.array([4096]),
                lhs_dtype=None,
                dout_dtype=None,
            )
        np.testing.assert_allclose(out, 4096 * (1 + 2.0**-7) ** 2, rtol=1e-6)

    @parameterized.parameters(*LOWERINGS)
    def test_zero_and_tiny_channels(self, lowering):
        rng = np.random.default_rng(0)
        lhs, dout = (rng.standard_normal((300, d)).astype(np.float32) for d in (96, 40))
        lhs[:, 3], lhs[:, 4], dout[:, 7], dout[:, 8] = 0, 1e-40, 0, 1e-36
        with fp8.use_lowering(lowering):
            out = np.asarray(
                fp8.tgmm_quant(jnp.asarray(lhs), jnp.asarray(dout), np.array([128, 100]))
            )
        self.assertTrue(np.isfinite(out).all())
        np.testing.assert_array_equal(out[:, [3, 4]], 0)
        np.testing.assert_array_equal(out[:, :, 7], 0)

    @parameterized.parameters(*LOWERINGS)
    def test_channels_not_finite_stay_alone(self, lowering):
        rng = np.random.default_rng(0)
        lhs, dout = (rng.standard_normal((300, d)).astype(np.float32) for d in (96, 40))
        run = lambda: np.asarray(
            fp8.tgmm_quant(jnp.asarray(lhs), jnp.asarray(dout), np.array([128, 100]))
        )
        with fp8.use_lowering(lowering):
            clean = run()
            lhs[5, 3], dout[130, 7] = np.nan, np.inf
            out = run()
        self.assertTrue(np.isnan(out[0, 3]).all() and np.isnan(out[1, :, 7]).all())
        keep = np.ones(out.shape, bool)
        keep[0, 3] = keep[1, :, 7] = False
        helpers.assert_same_bits(out[keep], clean[keep])

    @parameterized.parameters(*LOWERINGS)
    def test_weight_gradient_does_not_depend_on_place(self, lowering):
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((300, d)).astype(np.float32) for d in (96, 40)]
        recipe = dict(block_m=128, num_groups=1)

        def place(first):
            padded = [np.full((700, r.shape[1]), np.nan, np.float32) for r in rows]
            for p, r in zip(padded, rows, strict=True):
                p[first : first + 300] = r
            starts = np.array([first])
            with fp8.use_lowering(lowering):
                return np.asarray(
                    fp8.tgmm_quant(
                        *map(jnp.asarray, padded), np.array([300]), group_starts=starts, **recipe
                    )
                )

        # The quantized values are the same; the sums run over tiles that lie differently.
        for first in (1, 37, 128, 399):
            helpers.assert_close(place(first), place(0), 1e-6)

    def test_scale_in_bf16_is_widened(self):
        q = np.ones((4, 128), jnp.float8_e4m3fn)
        scale = np.array([[1], [2], [3.140625], [0.1]], jnp.bfloat16)
        rhs = jnp.ones((1, 128, 8))
        run = lambda s: fp8.gmm(fp8.QArray(jnp.asarray(q), jnp.asarray(s)), rhs, np.array([4]))
        helpers.assert_same_bits(run(scale), run(scale.astype(np.float32)))

    def test_same_bits_again_and_in_another_process(self):
        """Values and gradients; `_digest` hashes their bits."""
        first = _digest()
        self.assertEqual(_digest(), first)
        code = "from tests import conftest, test_values; print(test_values._digest())"
        root = pathlib.Path(__file__).parent.parent
        out = subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
        )
        self.assertEqual(out.stdout.strip().splitlines()[-1], first)

    def test_result_dtype(self):
        q = fp8.QArray(jnp.ones((4, 128), jnp.float8_e4m3fn), jnp.ones((1, 1)))
        w = fp8.QArray(jnp.ones((1, 128, 8), jnp.float8_e4m3fn), jnp.ones((1, 1, 1)))
        run = lambda a, b, **kw: fp8.gmm(a, b, np.array([4]), **kw).dtype
        self.assertEqual(run(q, w), jnp.bfloat16)
        self.assertEqual(run(q, jnp.ones((1, 128, 8))), jnp.float32)
        self.assertEqual(run(jnp.ones((4, 128), jnp.bfloat16), jnp.ones((1, 128, 8))), jnp.float32)
        self.assertEqual(run(jnp.ones((4, 128), jnp.bfloat16), w), jnp.bfloat16)
        self.assertEqual(run(q, w, preferred_element_type=jnp.float32), jnp.float32)


if __name__ == "__main__":
    absltest.main()
