"""The gmm kernel for TPU: interpreted against a naive loop, its tiles, compiled for each chip."""

import dataclasses
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import gmm as kernel
from fp8moe_prims.lowering.tpu.chip import CHIPS, SAFE, chip_of
from fp8moe_prims.lowering.tpu.gmm_tiles import choose_tiles
from fp8moe_prims.lowering.tpu.visits import make_visits, max_visits
from tests import oracle
from tests.helpers import TOPOLOGIES, assert_close, assert_same_bits

_CHIPS = CHIPS | {"safe": SAFE}
# So little VMEM that the contraction is cut into k tiles.
_TINY = dataclasses.replace(SAFE, name="tiny", vmem_bytes=4 << 20)


def _params(**changes):
    values = dict(
        transpose_rhs=False,
        lhs_dtype=None,
        lhs_bound=None,
        block_k=128,
        out_dtype=np.dtype(np.float32),
        tail="zero",
        expected_rows=None,
    )
    return types.SimpleNamespace(**(values | changes))


def _operands(starts, ends, lhs, rhs, lhs_scale=None, rhs_scale=None):
    return types.SimpleNamespace(
        lhs=lhs, rhs=rhs, starts=starts, ends=ends, lhs_scale=lhs_scale, rhs_scale=rhs_scale
    )


def _runner(p, chip=CHIPS["v7x"]):
    @jax.jit
    def call(values):
        x = types.SimpleNamespace(**{name: values.get(name) for name in _RANKS})
        return kernel.gmm(x, p, chip=chip, interpret=pltpu.InterpretParams())

    def run(x):
        values = {name: jnp.asarray(value) for name, value in vars(x).items() if value is not None}
        return np.asarray(call(values))

    return run


def _run(x, p, chip=CHIPS["v7x"]):
    return _runner(p, chip)(x)


_RANKS = {"lhs": 2, "rhs": 3, "starts": 1, "ends": 1, "lhs_scale": 2, "rhs_scale": 3}


def _reference_one(lhs, rhs, starts, ends, p, lhs_scale, rhs_scale):
    """float64 [m, n] of one batch."""
    rows, weights = oracle.wide(lhs), oracle.wide(rhs)
    groups = list(zip(starts.tolist(), ends.tolist(), strict=True))
    scale = None if rhs_scale is None else np.asarray(rhs_scale)
    if scale is not None and p.transpose_rhs:
        scale = scale.swapaxes(1, 2)
    k = rows.shape[1]
    folded = scale is not None and k > 1 and scale.shape[1:] == (k, 1)
    if scale is not None and not folded:
        other = weights.swapaxes(1, 2) if p.transpose_rhs else weights
        weights = other * oracle.expand(scale, other.shape)
        weights = weights.swapaxes(1, 2) if p.transpose_rhs else weights

    def prepare(x, e):
        x = x.astype(np.float32)
        if folded:
            x = x * scale[e if scale.shape[0] > 1 else 0, :, 0]
        return oracle.round_rows(x, p.lhs_dtype, p.block_k, p.lhs_bound)

    out = oracle.gmm(rows, weights, groups, transpose_rhs=p.transpose_rhs, fold=prepare)
    return out if lhs_scale is None else out * oracle.wide(lhs_scale)


def _reference(x, p):
    arrays = {f: np.asarray(v) for f, v in vars(x).items() if v is not None}
    lead = np.broadcast_shapes(*(a.shape[: a.ndim - _RANKS[f]] for f, a in arrays.items()))
    flat = {}
    for field, a in arrays.items():
        shape = a.shape[a.ndim - _RANKS[field] :]
        flat[field] = np.broadcast_to(a, lead + shape).reshape((-1,) + shape)
    out = []
    for b in range(math.prod(lead)):
        one = {field: flat[field][b] if field in flat else None for field in _RANKS}
        out.append(_reference_one(p=p, **one))
    return np.stack(out).reshape(lead + out[0].shape)


def _valid(x, m):
    """bool [*B, m], the rows of a group."""
    row = np.arange(m)[:, None]
    starts, ends = np.asarray(x.starts)[..., None, :], np.asarray(x.ends)[..., None, :]
    return ((row >= starts) & (row < ends)).any(-1)


def _rows(rng, kind, lead, m, k):
    """(lhs, lhs_scale) of a kind."""
    x = rng.normal(size=lead + (m, k)) * np.exp(rng.normal(size=lead + (m, 1)))
    if kind in ("bfloat16", "float32", "float16"):
        return jnp.asarray(x.astype(np.float32)).astype(kind), None
    dtype, shape = kind
    scale = rng.uniform(0.01, 1, size=lead + ((m, 1) if shape == "row" else (1, 1)))
    if dtype == "int8":
        x = np.clip(np.round(x * 20), -127, 127).astype(np.int8)
    else:
        x = np.clip(x * 20, -440, 440).astype(oracle.QDTYPES[dtype])
    return x, scale.astype(np.float32)


def _weights(rng, kind, scale, lead, g, k, n, transpose):
    """(rhs, rhs_scale); ``scale`` is None or [groups, values along k, values along n]."""
    shape = lead + ((g, n, k) if transpose else (g, k, n))
    x = rng.normal(size=shape)
    if scale is not None:
        groups, deep, wide = scale
        shape = lead + (groups,) + ((wide, deep) if transpose else (deep, wide))
        scale = rng.uniform(0.2, 2, size=shape).astype(np.float32)
    if kind in oracle.QDTYPES:
        return np.clip(x * 30, -100, 100).astype(oracle.QDTYPES[kind]), scale
    return jnp.asarray(x.astype(np.float32)).astype(kind), scale


def _bounds(sizes, gaps=None):
    """starts, ends of groups that follow each other after ``gaps`` rows each."""
    sizes = np.asarray(sizes, np.int32)
    gaps = np.zeros_like(sizes) if gaps is None else np.asarray(gaps, np.int32)
    ends = np.cumsum(sizes + gaps).astype(np.int32)
    return ends - sizes, ends


_E4M3, _E5M2, _INT8 = ("e4m3", "row"), ("e5m2", "row"), ("int8", "row")
# name, m, k, n, sizes, gaps, lhs kind, rhs kind, rhs scale, chip, parameters
_ROWS = [
    # Every kind of lhs, shapes that divide nothing, empty groups, gaps and tails.
    ("plain", 130, 200, 160, [50, 0, 70], None, "bfloat16", "bfloat16", None, "v7x", {}),
    ("float32", 100, 129, 43, [0, 44, 56], None, "float32", "float32", None, "v7x", {}),
    ("float16", 24, 96, 127, [3, 9], [2, 5], "float16", "float32", None, "v5e", {}),
    ("fp8", 600, 257, 128, [255, 1, 0, 300], [0, 0, 3, 7], _E4M3, "e4m3", [4, 1, 128], "v7x", {}),
    ("fp8_flat", 130, 127, 96, [129], None, ("e5m2", "flat"), "e4m3", [1, 1, 1], "v7x", {}),
    ("fp8_wide", 100, 200, 257, [33, 33], None, _E5M2, "e4m3", [2, 1, 257], "v5e", {}),
    ("int8", 24, 128, 200, [8, 8, 8], None, _INT8, "int8", [1, 1, 200], "v7x", {}),
    ("quantized", 520, 384, 129, [100, 156, 0, 260], None, "bfloat16", "e4m3", [4, 1, 129],
     "v7x", {"lhs_dtype": "e4m3", "block_k": 256}),
    ("emulated", 130, 257, 96, [64, 66], None, "bfloat16", "e4m3", [2, 1, 96], "v5e",
     {"lhs_dtype": "e5m2"}),
    ("to_int8", 24, 43, 200, [5, 0, 9], [0, 1, 1], "float32", "int8", [3, 1, 200], "v7x",
     {"lhs_dtype": "int8"}),
    ("fixed", 130, 200, 1, [13, 110], None, "float32", "e4m3", [2, 1, 1], "v7x",
     {"lhs_dtype": "e4m3", "lhs_bound": 2.5}),
    # Operands that the MXU widens to bf16, and products of int8.
    ("stored_e4m3", 640, 256, 128, [255, 1, 0, 300], None, _E4M3, "e4m3", [4, 1, 128], "v6e", {}),
    ("stored_e5m2", 96, 160, 96, [33, 60], None, _E5M2, "e5m2", [2, 1, 96], "v5e",
     {"transpose_rhs": True}),
    ("widened", 130, 256, 96, [64, 66], None, "bfloat16", "e4m3", [2, 1, 96], "v5p",
     {"lhs_dtype": "e4m3", "transpose_rhs": True}),
    ("widened_flat", 130, 256, 96, [64, 66], None, ("e4m3", "flat"), "e4m3", None, "v6e", {}),
    ("native_int8", 130, 257, 200, [64, 60], None, "bfloat16", "int8", [2, 1, 200], "v6e",
     {"lhs_dtype": "int8"}),
    ("transposed", 130, 96, 200, [127, 3], None, "bfloat16", "bfloat16", None, "v7x",
     {"transpose_rhs": True}),
    # Every form of the rhs scale: one per contraction element, in blocks, and both at once.
    ("fold", 130, 257, 129, [60, 0, 70], None, "bfloat16", "e4m3", [3, 257, 1], "v7x",
     {"lhs_dtype": "e5m2", "transpose_rhs": True}),
    ("fold_plain", 24, 127, 43, [10, 14], None, "bfloat16", "e4m3", [1, 127, 1], "v7x", {}),
    ("blocks", 100, 640, 96, [44, 55], None, "bfloat16", "e4m3", [2, 5, 4], "v7x",
     {"lhs_dtype": "e4m3", "block_k": 512}),
    ("blocks_transposed", 24, 256, 128, [20, 4], None, _E4M3, "e4m3", [2, 2, 1], "v7x",
     {"transpose_rhs": True}),
    ("odd_blocks", 24, 96, 43, [20, 4], None, "bfloat16", "e4m3", [2, 12, 43], "v7x",
     {"lhs_dtype": "e4m3", "transpose_rhs": True}),
    ("every_weight", 7, 129, 127, [1, 2, 3], None, "float32", "e4m3", [3, 129, 127], "v7x", {}),
    # Several k tiles, the last of them short; m = 1; nothing at all.
    ("k_tiles", 130, 640, 257, [0, 44, 80], None, "bfloat16", "e4m3", [3, 1, 257], "tiny",
     {"lhs_dtype": "e4m3", "block_k": 256}),
    ("k_tiles_plain", 100, 640, 200, [99], None, "float32", "float32", None, "tiny",
     {"transpose_rhs": True}),
    ("k_tiles_blocks", 24, 640, 640, [7, 9], None, "float32", "e4m3", [2, 5, 640], "tiny", {}),
    ("one_row", 1, 1, 1, [0, 1], None, "bfloat16", "bfloat16", None, "v7x", {}),
    ("empty", 130, 96, 127, [0, 0, 0], None, "bfloat16", "e4m3", [3, 1, 127], "v7x",
     {"lhs_dtype": "e4m3"}),
]  # fmt: skip


class ValuesTest(parameterized.TestCase):
    @parameterized.named_parameters(*_ROWS)
    def test_against_loop(self, m, k, n, sizes, gaps, lhs, rhs, scale, chip, changes):
        rng = np.random.default_rng(0)
        p = _params(**changes)
        rows, row_scale = _rows(rng, lhs, (), m, k)
        weights, scale = _weights(rng, rhs, scale, (), len(sizes), k, n, p.transpose_rhs)
        x = _operands(*_bounds(sizes, gaps), rows, weights, row_scale, scale)
        out = _run(x, p, _TINY if chip == "tiny" else CHIPS[chip])
        exact = lhs in ("float32", "float16") and p.lhs_dtype is None
        assert_close(out, _reference(x, p), 2e-5 if exact else 2e-3)

    @parameterized.parameters(*range(8))
    def test_batches(self, subset):
        """Each of lhs, rhs and groups has both batch dims, or one of them."""
        quantize = subset % 3 == 0
        rng = np.random.default_rng(subset)
        m, k, n, g = 24, 129, 43, 3
        lead = [(2, 1 + (subset >> i & 1)) if i else (1 + (subset & 1), 2) for i in range(3)]
        p = _params(lhs_dtype="e4m3" if quantize else None)
        rows, row_scale = _rows(rng, "bfloat16" if quantize else _E4M3, lead[0], m, k)
        weights, scale = _weights(rng, "e4m3", [g, 1, n], lead[1], g, k, n, False)
        cuts = np.sort(rng.integers(0, m + 1, size=lead[2] + (2 * g,)), axis=-1).astype(np.int32)
        x = _operands(cuts[..., 0::2], cuts[..., 1::2], rows, weights, row_scale, scale)
        assert_close(_run(x, p), _reference(x, p), 2e-3)

    def test_batched_scales(self):
        """Scales with batch dims that their values do not have; one group, so only they change."""
        rng = np.random.default_rng(6)
        m, k, n = 24, 96, 43
        rows, row_scale = _rows(rng, _E4M3, (1,), m, k)
        weights, scale = _weights(rng, "e4m3", [1, 12, n], (1,), 1, k, n, False)
        row_scale = np.concatenate([row_scale, 2 * row_scale[:, ::-1]])
        scale = np.concatenate([scale, 3 * scale[:, :, ::-1]])
        starts, ends = _bounds([19])
        x = _operands(starts[None], ends[None], rows, weights, row_scale, scale)
        assert_close(_run(x, _params()), _reference(x, _params()), 2e-3)

    @parameterized.parameters("zero", "undefined")
    def test_tail(self, tail):
        """NaN and Inf in rows of no group change no bit of the others."""
        rng = np.random.default_rng(3)
        m, k, n = 300, 200, 129
        starts, ends = _bounds([30, 0, 101, 100], [3, 0, 9, 20])
        weights, scale = _weights(rng, "e4m3", [4, 1, n], (), 4, k, n, False)
        p = _params(lhs_dtype="e4m3", tail=tail)
        rows = np.array(_rows(rng, "bfloat16", (), m, k)[0])
        valid = _valid(_operands(starts, ends, None, None), m)
        run, outs = _runner(p), []
        for value in (0, np.nan, np.inf):
            rows[~valid] = value
            outs.append(run(_operands(starts, ends, rows, weights, None, scale)))
            if tail == "zero":
                self.assertFalse(np.any(outs[-1][~valid]))
        assert_same_bits(outs[1][valid], outs[0][valid])
        assert_same_bits(outs[2][valid], outs[0][valid])

    def test_bad_rows_stay_alone(self):
        """A NaN or Inf, or values near the smallest float32, in valid rows."""
        rng = np.random.default_rng(4)
        m, k, n = 32, 256, 96
        weights, scale = _weights(rng, "e4m3", [2, 1, n], (), 2, k, n, False)
        rows = np.array(_rows(rng, "float32", (), m, k)[0])
        rows[3, 7], rows[20, 200], rows[5], rows[6] = np.nan, np.inf, 1e-36, 1e-40
        starts, ends = _bounds([10, 22])
        x = _operands(starts, ends, rows, weights, None, scale)
        run = _runner(_params(lhs_dtype="e4m3"))
        out = run(x)
        bad = np.isin(np.arange(m), (3, 20))
        self.assertTrue(np.all(np.isnan(out[bad])))
        self.assertTrue(np.all(np.isfinite(out[~bad])))
        rows[bad] = 0
        assert_same_bits(out[~bad], run(x)[~bad])

    def test_bad_groups(self):
        """Groups that overlap or descend read and write inside the buffers."""
        rng = np.random.default_rng(5)
        m, k, n = 130, 96, 43
        rows, _ = _rows(rng, "bfloat16", (), m, k)
        weights, _ = _weights(rng, "bfloat16", None, (), 3, k, n, False)
        run = _runner(_params())
        for starts, ends in (([0, 0, 0], [130, 130, 130]), ([100, 40, 0], [130, 90, 130])):
            x = _operands(np.array(starts, np.int32), np.array(ends, np.int32), rows, weights)
            self.assertEqual(run(x).shape, (m, n))

    @parameterized.parameters((0, 2), (24, 0))
    def test_nothing(self, m, g):
        x = _operands(
            np.zeros((g,), np.int32), np.zeros((g,), np.int32),
            jnp.zeros((m, 43), jnp.bfloat16), jnp.zeros((g, 43, 96), jnp.bfloat16),
        )  # fmt: skip
        out = _run(x, _params())
        self.assertEqual((out.shape, np.any(out)), ((m, 96), False))


class VisitsTest(parameterized.TestCase):
    @parameterized.product(seed=tuple(range(8)), gaps=(False, True))
    def test_against_loop(self, seed, gaps):
        rng = np.random.default_rng(seed)
        batches, g = rng.integers(1, 4), rng.integers(1, 7)
        m, tm = int(rng.integers(1, 300)), int(rng.choice([8, 32, 256]))
        cuts = np.sort(rng.integers(0, m + 1, size=(batches, 2 * g)), axis=-1).astype(np.int32)
        starts, ends = cuts[:, 0::2], cuts[:, 1::2]
        want, tiles, before = [], -(-m // tm), 0
        for b, t in itertools.product(range(batches), range(tiles)):
            here = [
                e for e in range(g) if max(starts[b, e], t * tm) < min(ends[b, e], (t + 1) * tm)
            ]
            want += [(b * tiles + t, 1 + b * g + e, True) for e in here]
            before = want[-1][1] if want else 0
            if gaps and not here:
                want.append((b * tiles + t, before, False))
        v = make_visits(jnp.asarray(starts), jnp.asarray(ends), m=m, tm=tm, gaps=gaps)
        group, shift, stop = (np.asarray(a) for a in (v.group, v.shift, v.stop))
        self.assertEqual(len(group), max_visits(batches, m, g, tm))
        self.assertEqual(int(v.count), max(len(want), 1))
        for i, (unit, p, own) in enumerate(want):
            self.assertEqual((i + shift[group[i]], group[i], i < stop[group[i]]), (unit, p, own))


class TilesTest(parameterized.TestCase):
    @parameterized.product(chip=sorted(_CHIPS), quantize=(None, "e4m3"))
    def test_fit(self, chip, quantize):
        chip = _CHIPS[chip]
        sizes = (1, 43, 128, 200, 768, 2048, 7168, 14336)
        for k, n, m in itertools.product(sizes, sizes, (1, 100, 4096)):
            for lhs, rhs in (("bfloat16", "float8_e4m3fn"), ("float32", "float32")):
                t = choose_tiles(
                    m, k, n, 8, jnp.dtype(lhs), jnp.dtype(rhs), jnp.dtype(lhs),
                    quantize and oracle.QDTYPES[quantize], chip, block_k=512 if quantize else None,
                )  # fmt: skip
                self.assertLessEqual(t.vmem, chip.vmem_bytes)
                self.assertTrue(t.tm == m or t.tm % 32 == 0)
                self.assertTrue(t.tn == n or t.tn % 128 == 0)
                self.assertTrue(t.tk == k or t.tk % 512 == 0 or (not quantize and t.tk % 128 == 0))

    def test_chips(self):
        self.assertIs(chip_of("TPU7x"), CHIPS["v7x"])
        self.assertIs(chip_of("TPU v6 lite"), CHIPS["v6e"])
        self.assertIs(chip_of("TPU v5"), CHIPS["v5p"])
        self.assertIs(chip_of("TPU v5e"), CHIPS["v5e"])
        self.assertIs(chip_of("an unknown thing"), SAFE)
        self.assertIs(chip_of(None), SAFE)


class CompileTest(parameterized.TestCase):
    """The real compiler takes the kernel; the interpreter accepts more than it does."""

    @parameterized.product(chip=sorted(TOPOLOGIES), form=("forward", "dlhs", "fp8", "float32"))
    def test_compiles(self, chip, form):
        m, k, n, g = 200, 257, 160, 3
        topology = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu")
        mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def array(*shape, dtype="float32"):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

        rows = (array(g, dtype="int32"), array(g, dtype="int32"))
        fp8, wide = "float8_e4m3fn", "bfloat16"
        scale = array(g, 1, n)
        x, p = {
            "forward": (
                (array(m, k, dtype=wide), array(g, k, n, dtype=fp8), None, scale),
                _params(lhs_dtype="e4m3", out_dtype=jnp.dtype(wide)),
            ),
            "dlhs": (
                (array(m, n, dtype=wide), array(g, k, n, dtype=fp8), None, scale),
                _params(lhs_dtype="e5m2", transpose_rhs=True, out_dtype=jnp.dtype(wide)),
            ),
            "fp8": (
                (array(m, k, dtype=fp8), array(g, k, n, dtype=fp8), array(m, 1), scale),
                _params(out_dtype=jnp.dtype(wide), tail="undefined"),
            ),
            "float32": ((array(m, k), array(g, k, n)), _params()),
        }[form]
        chip = chip_of(topology.devices[0].device_kind)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            call = jax.jit(lambda *a: kernel.gmm(_operands(*a), p, chip=chip))
            compiled = call.lower(*rows, *x).compile()
        self.assertIn("fp8moe_gmm", compiled.as_text())


if __name__ == "__main__":
    absltest.main()
