"""The SparseCore gather: its addresses, what the TensorCore does for it, and that it compiles.

The interpreter has no SparseCore, so a gather of XLA stands in for the kernel that runs there: it
reads the lines that the kernel's own address functions name. What lies around it is what is
compiled for the chips.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

import fp8moe_prims as fp8
from fp8moe_prims import moe
from fp8moe_prims.lowering.tpu import ragged_gather as gather
from fp8moe_prims.lowering.tpu import rows, sparse_core
from fp8moe_prims.lowering.tpu.chip import CHIPS
from fp8moe_prims.ragged_gather import RaggedGatherOperands, RowsParams
from tests import helpers, oracle, row_cases
from tests.helpers import TOPOLOGIES

_KERNEL = "fp8moe_sparse_core_gather"
_F32 = np.dtype(np.float32)
_F16 = np.dtype(np.float16)
_BF16 = np.dtype(jnp.bfloat16)
_E4M3 = np.dtype(jnp.float8_e4m3fn)


def _struct(chip):
    """(shape, dtype) -> an argument on one chip."""
    devices = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[:1]
    place = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), jax.P())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _lower(chip, x, m, weighted=False, tail="zero", lowering="auto", grad=False, **options):
    """A gather lowered for one chip."""
    struct = _struct(chip)

    def run(x, indices, end, weights):
        call = lambda x, weights: fp8.ragged_gather(
            x, indices, end=end, weights=weights, tail=tail, **options
        )
        return jax.jvp(call, (x, weights), (x, weights)) if grad else call(x, weights)

    x = jax.tree.map(lambda a: struct(a.shape, a.dtype), x)
    weights = struct((m,), jnp.float32) if weighted else None
    with fp8.use_lowering(lowering):
        return jax.jit(run).lower(x, struct((m,), jnp.int32), struct((), jnp.int32), weights)


def _rows(t, d, dtype, scaled=False):
    x = jax.ShapeDtypeStruct((t, d), dtype)
    return fp8.QArray(x, jax.ShapeDtypeStruct((t, 1), jnp.float32)) if scaled else x


class CompileTest(parameterized.TestCase):
    @parameterized.product(
        chip=("v7x", "v6e", "v5p"),
        case=(
            (_rows(77, 200, _E4M3, scaled=True), 333, False, "undefined"),
            (_rows(512, 7168, _BF16), 1024, False, "undefined"),
            (_rows(128, 256, _F32), 130, True, "zero"),
        ),
    )
    def test_chips_with_sparse_cores(self, chip, case):
        lowered = _lower(chip, *case, sparse_core=True)
        (call,) = (line for line in lowered.as_text().splitlines() if _KERNEL in line)
        self.assertTrue("DEVICE_TYPE_SPARSECORE" in call, "not for the SparseCores")
        lowered.compile()

    def test_chips_without(self):
        for lowering in ("auto", "xla"):
            for chip, option in (("v5e", True), ("v7x", False)):
                lowered = _lower(
                    chip, _rows(64, 128, _BF16), 128, sparse_core=option, lowering=lowering
                )
                self.assertFalse(_KERNEL in lowered.as_text(), (chip, option, lowering))

    def test_export(self):
        """An export that names no chip holds the default kernel, one that does the SparseCores'."""
        call = jax.jit(lambda x, i: fp8.ragged_gather(x, i, sparse_core=True))
        args = _rows(64, 128, _BF16), jax.ShapeDtypeStruct((128,), jnp.int32)
        for device in (None, jax.sharding.AbstractDevice("TPU7x", 1, "tpu")):
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            with jax.sharding.use_abstract_mesh(mesh):
                exported = jax.export.export(call, platforms=("cpu", "tpu"))(*args)
            self.assertEqual(_KERNEL in exported.mlir_module(), device is not None)

    def test_layer(self):
        """The layer's dispatch goes to the SparseCores on request."""
        t, d, f, e = 64, 128, 128, 4
        shapes = ((t, d), (t, e), (e, d, f), (e, d, f), (e, f, d))
        struct = _struct("v7x")
        args = [struct(shape, jnp.float32) for shape in shapes]
        config = moe.MoEConfig(num_experts=e, top_k=2, sparse_core_gather=True)
        layer = lambda *args: moe.moe_ffn(*args, config=config)
        self.assertTrue(_KERNEL in jax.jit(layer).lower(*args).as_text())

    def test_derivative(self):
        text = _lower("v7x", _rows(64, 128, _F32), 128, True, grad=True, sparse_core=True).as_text()
        self.assertGreaterEqual(text.count(_KERNEL), 2)

    def test_chip_table(self):
        """The number of cores and lanes is that of Pallas."""
        for name, kind in (
            ("v7x", "TPU7x"),
            ("v6e", "TPU v6 lite"),
            ("v5p", "TPU v5"),
            ("v5e", "TPU v5 lite"),
        ):
            device = jax.sharding.AbstractDevice(kind, 1, "tpu")
            with jax.sharding.use_abstract_mesh(
                jax.sharding.AbstractMesh((), (), abstract_device=device)
            ):
                info = pltpu.get_tpu_info().sparse_core
            chip = CHIPS[name]
            if info is None:
                self.assertEqual(chip.sparse_cores, 0)
            else:
                self.assertEqual(
                    (chip.sparse_cores, chip.subcores, chip.sparse_lanes),
                    (info.num_cores, info.num_subcores, info.num_lanes),
                )


class AddressTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, 64), (1, 64), (31, 32), (32, 32), (33, 32), (1000, 64), (2**31 - 1, 64)
    )
    def test_share(self, items, workers):
        """Every item once, in order, and no worker with two more than another."""
        shares = [sparse_core.share(np.int32(i), workers, np.int32(items)) for i in range(workers)]
        first, last = (np.array([int(s[k]) for s in shares]) for k in (0, 1))
        self.assertEqual((first[0], last[-1]), (0, items))
        np.testing.assert_array_equal(first[1:], last[:-1])
        self.assertLessEqual((last - first).max() - (last - first).min(), 1)

    @parameterized.parameters("v7x", "v6e", "v5p")
    def test_all_cores_are_busy(self, chip):
        """Every subcore is one worker, and the SparseCores' shares are equal to within one."""
        chip = CHIPS[chip]
        cores, subcores = np.indices((chip.sparse_cores, chip.subcores), dtype=np.int32)
        workers = sparse_core.worker_of(chip, cores, subcores)
        np.testing.assert_array_equal(np.sort(workers.ravel()), np.arange(workers.size))
        for items in (1, chip.sparse_cores, workers.size + 3, 1000):
            first, last = sparse_core.share(workers, workers.size, np.int32(items))
            each = np.asarray(last - first).sum(axis=1)
            self.assertEqual(each.sum(), items)
            self.assertLessEqual(each.max() - each.min(), 1)

    @parameterized.parameters(
        ([0], [4], 4), ([2], [0], 4), ([1, 0, 3], [2, 0, 1], 5), ([0, 0], [0, 0], 3)
    )
    def test_tile_order(self, first, count, tiles):
        want = [b * tiles + first[b] + i for b in range(len(first)) for i in range(count[b])]
        order, begin, total = sparse_core.tile_order(
            jnp.array(first, jnp.int32), jnp.array(count, jnp.int32), tiles
        )
        self.assertEqual(int(total[0]), sum(count))
        np.testing.assert_array_equal(order[: len(want)], want)
        np.testing.assert_array_equal(begin, np.cumsum([0, *count[:-1]]))
        self.assertTrue(np.all((order >= 0) & (order < len(first) * tiles)))

    def test_lines_of_float32_tiles(self):
        """A row's lines are its columns, where rows lie in tiles of 8."""
        x = np.arange(2 * 16 * 384, dtype=np.float32).reshape(2, 16, 384)
        w = rows.Words(_F32, 384, False, direct=True, lines=True)
        lines = np.asarray(sparse_core.direct_lines(jnp.asarray(x))).view(np.float32)
        at = sparse_core.line_of(w, np.arange(32, dtype=np.int32)[:, None], np.arange(3))
        np.testing.assert_array_equal(lines[at], x.reshape(32, 3, 128))


def _fetch(w, words, index, total, expected, chip):
    """What the subcores do, in XLA: the lines of the tiles that count, and junk elsewhere."""
    junk = 0x7FABCDEF
    chunks = jnp.arange(w.height, dtype=jnp.int32)[:, None, None]
    lines = sparse_core.line_of(w, index[None], chunks)
    got = jnp.take(words, lines, axis=0, mode="fill", fill_value=junk)
    counts = jnp.arange(len(index)) < total
    got = jnp.where(counts[None, :, None, None], got, junk)
    return got.reshape(w.height, index.size, 128)


def _runner(chip, p):
    """The whole lowering under jit, with `_fetch` for the kernel on the SparseCores."""
    fits = lambda w, dtype, chip, interpret: chip.sparse_cores > 0

    @jax.jit
    def run(operands):
        x = RaggedGatherOperands(**(dict.fromkeys(RaggedGatherOperands._fields) | operands))
        with (
            mock.patch.object(sparse_core, "fetch", _fetch),
            mock.patch.object(sparse_core, "usable", fits),
        ):
            return gather.ragged_gather(x, p, chip=CHIPS[chip], interpret=pltpu.InterpretParams())

    return lambda **operands: jax.tree.map(np.asarray, run(operands))


class ValueTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # name, chip, dtype, t, m, d, weights, row scale
        ("e4m3_scaled", "v6e", _E4M3, 35, 130, 200, True, True),
        ("bf16", "v5p", _BF16, 9, 129, 129, False, False),
        ("f32_direct", "v7x", _F32, 16, 140, 256, True, False),
    )
    def test_moves(self, chip, dtype, t, m, d, weighted, scaled):
        """Bit for bit x[indices], zero rows, and the ranges: whole, partial, reversed."""
        x, indices, weights, scale = row_cases.gather_inputs(dtype, t, m, d, weighted, scaled)
        run = _runner(chip, RowsParams(dtype, sparse_core=True))
        for start, end in ((0, m), (3, 128), (m, 0)):
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
            if scaled:
                np.testing.assert_array_equal(got[1], want_scale)

    def test_batch(self):
        """Batches of some operands, with ranges of different tiles, one of them empty."""
        rng = np.random.RandomState(1)
        t, m, d = 24, 300, 96
        x = rng.randint(0, 256, (1, 2, t, d)).astype(np.uint8).view(_E4M3)
        scale = np.exp2(rng.randint(-9, 9, (1, 2, t, 1))).astype(np.float32)
        indices = rng.randint(0, t, (2, 1, m)).astype(np.int32)
        start, end = np.array([[150], [33]], np.int32), np.array([[290], [33]], np.int32)
        run = _runner("v7x", RowsParams(_E4M3, "undefined", None, True))
        out, out_scale = run(x=x, indices=indices, start=start, end=end, x_scale=scale)
        self.assertEqual((out.shape, out_scale.shape), ((2, 2, m, d), (2, 2, m, 1)))
        for i, j in np.ndindex(2, 2):
            valid = slice(start[i, 0], end[i, 0])
            at = indices[i, 0, valid]
            helpers.assert_same_bits(out[i, j, valid], x[0, j][at])
            np.testing.assert_array_equal(out_scale[i, j, valid], scale[0, j][at])

    @parameterized.parameters("interpret", "xla")
    def test_elsewhere_the_same(self, lowering):
        """Where there is no SparseCore, the option changes nothing, derivatives included."""
        rng = np.random.RandomState(2)
        x = jnp.asarray(rng.randn(8, 128), jnp.float32)
        q = fp8.quantize(x, "e4m3", channelwise_axes=(0,))
        indices = jnp.asarray(rng.randint(-1, 9, 21), jnp.int32)
        weights = jnp.asarray(rng.randn(21), jnp.float32)

        def run(lowering, option):
            def call(x, w):
                return fp8.ragged_gather(x, indices, start=1, end=20, weights=w, sparse_core=option)

            def all_of(x, q, weights):
                if lowering == "interpret":
                    return (call(x, weights),)
                y, pull = jax.vjp(call, x, weights)
                return y, call(q, weights), *pull(y)

            with fp8.use_lowering(lowering):
                return jax.jit(all_of)(x, q, weights)

        got, want = run(lowering, True), run("xla", False)
        jax.tree.map(helpers.assert_same_bits, got, want[: len(got)])

    def test_no_bool(self):
        with self.assertRaisesRegex(TypeError, "sparse_core"):
            fp8.ragged_gather(jnp.ones((2, 2)), jnp.zeros(3, jnp.int32), sparse_core=1)


if __name__ == "__main__":
    absltest.main()
