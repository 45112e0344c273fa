"""The tgmm_quant kernel for TPU: in Pallas's interpreter against a naive loop, and its tiles."""

import contextlib
import dataclasses
import itertools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import tgmm_quant as kernel
from fp8moe_prims.lowering.tpu.chip import CHIPS, SAFE
from fp8moe_prims.lowering.tpu.tgmm_tiles import Problem, choose_tiles

_TYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "int8": (np.int8, 127.5),
}
_CHIPS = CHIPS | {"safe": SAFE}


def _params(**changes):
    values = dict(
        lhs_dtype="e4m3",
        dout_dtype="e5m2",
        dout_bound=None,
        block_m=128,
        out_dtype=np.dtype(np.float32),
        transpose_out=False,
        expected_rows=None,
    )
    return types.SimpleNamespace(**(values | changes))


def _quantized(x, name, bound=None):
    """A float32 block [rows, channels], quantized and back: float64."""
    if name is None:
        return x.astype(np.float64)
    dtype, top = _TYPES[name]
    step = np.float32(1.0) / np.float32(top)
    if bound is None:
        scale = np.abs(x).max(0, keepdims=True) * step
    else:
        scale = np.full((1, x.shape[1]), np.float32(bound) / np.float32(top), np.float32)
    dead = scale < np.finfo(np.float32).tiny
    scale = np.where(dead, np.float32(1.0), scale)
    y = x * np.where(dead, np.float32(0.0), np.float32(1.0) / scale)
    if name == "int8":
        y = np.clip(np.round(y), -128, 127)
    else:
        y = np.clip(y, -top, top).astype(dtype)
    return y.astype(np.float64) * scale.astype(np.float64)


def _reference(lhs, lhs_scale, dout, starts, ends, p):
    """Naive loop over batch, groups and row blocks, float64."""
    batch = np.broadcast_shapes(lhs.shape[:-2], dout.shape[:-2], starts.shape[:-1])
    lhs, dout = (
        np.broadcast_to(np.asarray(x).astype(np.float32), batch + x.shape[-2:]) for x in (lhs, dout)
    )
    starts, ends = (np.broadcast_to(x, batch + x.shape[-1:]) for x in (starts, ends))
    if lhs_scale is not None:
        scale = np.broadcast_to(lhs_scale, batch + lhs.shape[-2:-1] + (1,))
    out = np.zeros(batch + starts.shape[-1:] + (lhs.shape[-1], dout.shape[-1]))
    for b in np.ndindex(*batch):
        for e in range(starts.shape[-1]):
            for row in range(starts[b][e], ends[b][e], p.block_m):
                rows = slice(row, min(row + p.block_m, ends[b][e]))
                d = dout[b][rows]
                if lhs_scale is not None:
                    d = d * scale[b][rows]
                out[b][e] += _quantized(lhs[b][rows], p.lhs_dtype).T @ _quantized(
                    d, p.dout_dtype, p.dout_bound
                )
    return out.swapaxes(-1, -2) if p.transpose_out else out


def _runner(p, chip="v7x"):
    """The kernel under jit, in the interpreter: arrays in, float64 array out."""

    @jax.jit
    def run(lhs, lhs_scale, dout, starts, ends):
        x = types.SimpleNamespace(
            lhs=lhs, lhs_scale=lhs_scale, dout=dout, starts=starts, ends=ends, lhs_carrier=None
        )
        return kernel.tgmm_quant(x, p, chip=_CHIPS[chip], interpret=pltpu.InterpretParams())

    return lambda *args: np.asarray(run(*args)).astype(np.float64)


def _ranges(sizes, gaps=None):
    """starts and ends, int32 [g], of groups with these sizes and these gaps before them."""
    gaps = [0] * len(sizes) if gaps is None else gaps
    ends = np.cumsum(np.asarray(sizes) + np.asarray(gaps)).astype(np.int32)
    return (ends - np.asarray(sizes)).astype(np.int32), ends


def _poisoned(x, inside, value):
    """x with ``value`` in the rows that are in no group."""
    return jnp.where(jnp.asarray(inside)[:, None], x, jnp.full_like(x, value))


@contextlib.contextmanager
def _chosen_tiles():
    """Yields a list of the tiles that are chosen within."""
    chosen = []

    def choose(*args):
        chosen.append(choose_tiles(*args))
        return chosen[-1]

    with mock.patch.object(kernel, "choose_tiles", choose):
        yield chosen


class TgmmKernelTest(parameterized.TestCase):
    def _normal(self, shape, dtype=jnp.bfloat16, seed=0):
        rng = np.random.RandomState(seed)
        x = rng.randn(*shape) * np.exp2(rng.randint(-3, 4, shape[-1:]))
        return jnp.asarray(np.clip(x, -400, 400).astype(np.float32)).astype(dtype)

    def _operands(self, m, k, n, p):
        """lhs, its row scale or None, and dout: lhs in float8 where it is not quantized."""
        lhs, dout, scale = self._normal((m, k)), self._normal((m, n), seed=1), None
        if p.lhs_dtype is None:
            lhs = lhs.astype(jnp.float8_e4m3fn)
            scale = jnp.exp2(self._normal((m, 1), jnp.float32, seed=2).round())
        return lhs, scale, dout

    def _assert_close(self, got, want, tolerance=2e-3):
        self.assertEqual(got.shape, want.shape)
        self.assertLessEqual(np.abs(got - want).max(), tolerance * max(np.abs(want).max(), 1e-30))

    @parameterized.named_parameters(
        ("both_quantized", dict(), (600, 129, 200), 5, "v7x"),
        (
            "fp8_lhs_transposed",
            dict(lhs_dtype=None, dout_dtype="e4m3", block_m=256, transpose_out=True),
            (620, 43, 257),
            5,
            "v7x",
        ),
        ("f32_plain", dict(lhs_dtype=None, dout_dtype=None), (130, 127, 96), 5, "safe"),
        ("one_by_one", dict(dout_bound=2.0), (7, 1, 1), 5, "v5e"),
    )
    def test_layouts(self, changes, shape, groups, chip):
        """Empty groups, gaps, odd starts, one long group; tails that hold NaN and Inf."""
        m, k, n = shape
        p = _params(**changes)
        plain = p.lhs_dtype is None and p.dout_dtype is None
        lhs = self._normal((m, k), jnp.float32 if plain else jnp.bfloat16)
        dout = self._normal((m, n), lhs.dtype, seed=1)
        scale = None
        if p.lhs_dtype is None and not plain:
            lhs = lhs.astype(jnp.float8_e4m3fn)
            scale = jnp.exp2(self._normal((m, 1), jnp.float32, seed=2).round())
        run = _runner(p, chip)
        part = m // 7
        layouts = [
            _ranges([part + 1, 0, 3 * part - 1, 0, 2 * part]),
            _ranges([0, m, 0, 0, 0]),
            _ranges([part, part - 1, 0, 1, part], [1, part, 0, part // 2, 1]),
            _ranges([0] * groups, [part] + [0] * (groups - 1)),
        ]
        for starts, ends in layouts:
            got = run(lhs, scale, dout, starts, ends)
            want = _reference(lhs, scale, dout, starts, ends, p)
            self._assert_close(got, want, 2e-5 if plain else 2e-3)
            np.testing.assert_array_equal(got[starts == ends], 0.0)
            inside = np.zeros(m, bool)
            for s, e in zip(starts, ends, strict=True):
                inside[s:e] = True
            stale = (
                _poisoned(lhs, inside, np.nan),
                None if scale is None else _poisoned(scale, inside, np.nan),
                _poisoned(dout, inside, np.inf),
            )
            np.testing.assert_array_equal(run(*stale, starts, ends), got)

    @parameterized.named_parameters(
        ("both_quantized", dict(), "v7x"),
        ("fp8_lhs", dict(lhs_dtype=None, dout_dtype="e4m3"), "v7x"),
        ("both_widened", dict(), "v5e"),
        ("fp8_lhs_widened", dict(lhs_dtype=None, dout_dtype="e4m3"), "v6e"),
        ("int8", dict(lhs_dtype="int8", dout_dtype="int8", transpose_out=True), "v5p"),
    )
    def test_row_blocks(self, changes, chip):
        """Full, with a short one after it, several, short, and in the array's last window."""
        m, k, n = 2400, 129, 200
        p = _params(block_m=384, **changes)
        lhs, scale, dout = self._operands(m, k, n, p)
        starts, ends = _ranges([474, 300, 778, 434, 10, 230], [0, 5, 0, 3, 0, 0])
        got = _runner(p, chip)(lhs, scale, dout, starts, ends)
        self._assert_close(got, _reference(lhs, scale, dout, starts, ends, p))

    @parameterized.named_parameters(
        ("both_quantized", dict(out_dtype=np.dtype(jnp.bfloat16)), 6),
        ("fp8_lhs", dict(lhs_dtype=None, dout_dtype="e4m3"), 6.75),
        ("fp8_lhs_transposed", dict(lhs_dtype=None, transpose_out=True), 7.5),
    )
    def test_pipelined(self, changes, mib):
        """The MXUs in hand, several tiles of S or R; row blocks of all kinds, one in the end."""
        m, k, n = 1700, 500, 1000
        p = _params(block_m=256, **changes)
        lhs, scale, dout = self._operands(m, k, n, p)
        small = dataclasses.replace(CHIPS["v7x"], vmem_bytes=int(mib * 2**20))
        with mock.patch.dict(_CHIPS, small=small), _chosen_tiles() as chosen:
            run = _runner(p, "small")
            for sizes, gaps in (
                ([330, 256, 300, 0, 257, 500, 10], [7, 0, 5, 0, 0, 0, 3]),
                ([256, 340, 256, 0, 292, 256, 300], [0] * 7),
            ):
                starts, ends = _ranges(sizes, gaps)
                got = run(lhs, scale, dout, starts, ends)
                want = _reference(lhs, scale, dout, starts, ends, p)
                self._assert_close(got, want, 4e-3 if p.out_dtype.itemsize == 2 else 2e-3)
        self.assertTrue(chosen[0].pipelined)
        self.assertLess(chosen[0].ts * chosen[0].tr, k * n)  # several tiles

    @parameterized.parameters((False, 512, 256), (True, 512, 256), (False, 256, 1024))
    def test_two_cores(self, transpose, k, n):
        """Each core makes half of the streamed operand's columns, in one tile or in two."""
        p = _params(block_m=256, transpose_out=transpose, lhs_dtype=None)
        lhs, scale, dout = self._operands(900, k, n, p)
        starts, ends = _ranges([330, 0, 256, 300], [7, 0, 5, 0])
        with _chosen_tiles() as chosen:
            got = _runner(p, "v5p")(lhs, scale, dout, starts, ends)
        self._assert_close(got, _reference(lhs, scale, dout, starts, ends, p))
        self.assertEqual(chosen[0].cores, 2)

    @parameterized.parameters(
        dict(lhs_batch=(), dout_batch=(3,)),
        dict(lhs_batch=(3,), dout_batch=()),
        dict(lhs_batch=(), dout_batch=(), chip="v5p"),
    )
    def test_one_window_for_several_units(self, lhs_batch, dout_batch, chip="v7x"):
        """Of a window that is cleaned in place, where the pipeline has no cause to fetch it again.

        The batch elements share an operand and its rows, those of the last but for where they
        begin; or the cores, in turn, a group.
        """
        p = _params(block_m=256)
        lhs = self._normal((*lhs_batch, 900, 512))
        dout = self._normal((*dout_batch, 900, 256), seed=1)
        starts = np.array([[37], [37], [33]] if lhs_batch or dout_batch else [37], np.int32)
        ends = starts + np.int32(316)
        got = _runner(p, chip)(lhs, None, dout, starts, ends)
        self._assert_close(got, _reference(lhs, None, dout, starts, ends, p))

    def test_last_window(self):
        """It begins at row 704; one row block in it, a short one with it, several, none."""
        m, k, n = 1216, 129, 200
        p = _params(block_m=384)
        lhs, dout, run = self._normal((m, k)), self._normal((m, n), seed=1), _runner(p)
        for sizes, gaps in (
            ([384, 384, 384], [0, 0, 0]),
            ([832, 384, 0], [0, 0, 0]),
            ([752, 464, 0], [0, 0, 0]),
            ([703, 513, 0], [0, 0, 0]),
            ([736, 300, 180], [0, 0, 0]),
            ([384, 310, 0], [0, 6, 0]),
        ):
            starts, ends = _ranges(sizes, gaps)
            got = run(lhs, None, dout, starts, ends)
            self._assert_close(got, _reference(lhs, None, dout, starts, ends, p))

    @parameterized.named_parameters(
        ("mixed", (2, 1), (1, 3), (2, 3)),
        ("ranges", (1, 1), (2, 1), (1, 3)),
    )
    def test_batch(self, lhs_batch, dout_batch, range_batch):
        m, g = 24, 3
        p = _params(lhs_dtype=None)
        lhs = self._normal((*lhs_batch, m, 43), jnp.float8_e4m3fn)
        scale = jnp.exp2(self._normal((*lhs_batch, m, 1), jnp.float32, seed=2).round())
        dout = self._normal((*dout_batch, m, 129), seed=1)
        cuts = np.random.RandomState(3).randint(0, m + 1, (*range_batch, 2 * g))
        cuts = np.sort(cuts, axis=-1).astype(np.int32)
        starts, ends = cuts[..., ::2], cuts[..., 1::2]
        got = _runner(p)(lhs, scale, dout, starts, ends)
        self._assert_close(got, _reference(lhs, scale, dout, starts, ends, p))

    @parameterized.parameters((257, 43, False), (43, 257, True))
    def test_long_tables(self, k, n, transpose):
        """Columns are cut until the tables of each part are short enough."""
        m = 40
        p = _params(transpose_out=transpose, lhs_dtype=None, dout_dtype=None)
        lhs, dout = self._normal((m, k)), self._normal((m, n), seed=1)
        starts, ends = _ranges([17, 0, 20], [0, 0, 3])
        tiny = dataclasses.replace(SAFE, vmem_bytes=3 << 20)
        with mock.patch.dict(_CHIPS, tiny=tiny), mock.patch.object(kernel, "MAX_TABLE", 6):
            got = _runner(p, "tiny")(lhs, None, dout, starts, ends)
        self._assert_close(got, _reference(lhs, None, dout, starts, ends, p))

    def test_values(self):
        """A NaN or Inf shows in its channel only; a zero channel and a tiny one stay finite."""
        m, k, n = 40, 5, 6
        p = _params()
        run = _runner(p)
        lhs, dout = np.array(self._normal((2, m, max(k, n)), jnp.float32))
        lhs, dout = lhs[:, :k], dout[:, :n]
        starts, ends = _ranges([17, 20])
        lhs[:, 0], dout[:, 1] = 0.0, 1e-40
        clean = run(lhs, None, dout, starts, ends)
        self._assert_close(clean, _reference(lhs, None, dout, starts, ends, p))
        np.testing.assert_array_equal(clean[:, 0], 0.0)
        bad_lhs, bad_dout = lhs.copy(), dout.copy()
        bad_lhs[3, 2], bad_dout[20, 4] = np.nan, np.inf
        got = run(bad_lhs, None, bad_dout, starts, ends)
        bad = np.zeros((2, k, n), bool)
        bad[0, 2, :] = bad[1, :, 4] = True
        self.assertTrue(np.isnan(got[bad]).all())
        np.testing.assert_array_equal(got[~bad], clean[~bad])
        # Ranges that overlap or run backwards give any values, but an end.
        run(lhs, None, dout, np.array([0, 0], np.int32), np.array([40, 40], np.int32))
        run(lhs, None, dout, np.array([30, 5], np.int32), np.array([9, 2], np.int32))

    def test_nothing(self):
        for m, g in ((0, 2), (4, 0)):
            zeros = np.zeros(g, np.int32)
            out = _runner(_params())(jnp.zeros((m, 3)), None, jnp.zeros((m, 5)), zeros, zeros)
            np.testing.assert_array_equal(out, np.zeros((g, 3, 5)))

    def test_tiles_fit_every_chip(self):
        widths = (1, 43, 200, 2048, 2880, 7168, 14336)
        for chip, p, q in itertools.product(_CHIPS.values(), widths, widths):
            for item, slab in ((1, 1), (2, 2), (4, 4)):
                problem = Problem(
                    65536, p, q, 8, 1024, item, item, slab, np.float32, 65536, (True, True)
                )
                tiles = choose_tiles(problem, chip)
                self.assertIsNotNone(tiles)
                self.assertLess(tiles.vmem, chip.vmem_bytes)
                self.assertEqual((tiles.tp % 128, tiles.tq % 128, tiles.block % 32), (0, 0, 0))


if __name__ == "__main__":
    absltest.main()
