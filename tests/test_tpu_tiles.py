"""The tile choosers: legal tiles for hundreds of problems, and the VMEM that the compiler takes."""

import contextlib
import dataclasses
import math
import re
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from fp8moe_prims.gmm import GmmOperands, GmmParams
from fp8moe_prims.lowering.tpu import gmm, gmm_tiles, tgmm_quant, tgmm_tiles
from fp8moe_prims.lowering.tpu.chip import CHIPS, SAFE, Chip
from fp8moe_prims.lowering.tpu.layout import LANES, round_up
from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams
from tests.helpers import TOPOLOGIES
from tools._programs import text_of

_CHIPS = CHIPS | {"safe": SAFE}
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "e4m3": jnp.float8_e4m3fn}
_DTYPES |= {"e5m2": jnp.float8_e5m2, "int8": jnp.int8}
_SMEM = 1 << 20  # bytes of scalar memory of a core


@dataclasses.dataclass(frozen=True)
class _Call:
    """What calls of both operations have: lhs [m, k] in g groups, and n columns.

    Attributes:
      out: dtype of the result.
      row_scale: whether the lhs has a scale per row.
      transpose: gmm: whether rhs is [g, n, k]; tgmm: whether the result is.
      bound: fixed range of the quantization (tgmm: of dout's), or None.
      batch: leading dims of every operand.
    """

    chip: str
    m: int
    k: int
    n: int
    g: int = 32
    lhs: str = "bf16"
    out: str = "bf16"
    row_scale: bool = False
    transpose: bool = False
    bound: float | None = None
    batch: tuple[int, ...] = ()

    def structs(self, **more):
        """name -> ShapeDtypeStruct of the operands that both have, and of more, (shape, dtype)."""
        groups = (self.g,), np.int32
        arrays = dict(starts=groups, ends=groups, lhs=((self.m, self.k), _DTYPES[self.lhs]), **more)
        if self.row_scale:
            arrays["lhs_scale"] = (self.m, 1), np.float32
        return {
            name: jax.ShapeDtypeStruct(self.batch + shape, dtype)
            for name, (shape, dtype) in arrays.items()
        }


@dataclasses.dataclass(frozen=True)
class Gmm(_Call):
    """A call of gmm: out[m, n] = lhs[m, k] @ rhs[g, k, n].

    Attributes:
      quantize: what the lhs is quantized to in the kernel, or None.
      scale: form of the rhs scale, "column", "fold", "blocks", "full", or None.
      scale_block: contraction elements that share a value of a scale in blocks.
    """

    rhs: str = "e4m3"
    quantize: str | None = None
    block_k: int = 512
    scale: str | None = None
    scale_block: int = 0

    def function(self):
        """(function of arrays, their ShapeDtypeStructs)."""
        k, n, g = self.k, self.n, self.g
        deep, wide = {
            None: (1, 1),
            "column": (1, n),
            "fold": (k, 1),
            "blocks": (k // max(self.scale_block, 1), n),
            "full": (k, n),
        }[self.scale]
        flip = lambda a, b: (b, a) if self.transpose else (a, b)
        more = {"rhs": ((g, *flip(k, n)), _DTYPES[self.rhs])}
        if self.scale is not None:
            more["rhs_scale"] = (g, *flip(deep, wide)), np.float32
        p = GmmParams(
            transpose_rhs=self.transpose,
            out_dtype=np.dtype(_DTYPES[self.out]),
            lhs_dtype=self.quantize,
            lhs_bound=self.bound,
            block_k=self.block_k,
        )
        fn = lambda x: gmm.gmm(GmmOperands(**x), p, chip=_CHIPS[self.chip])
        return fn, self.structs(**more)


@dataclasses.dataclass(frozen=True)
class Tgmm(_Call):
    """A call of tgmm_quant: out[g, k, n], or [g, n, k], from lhs [m, k] and dout [m, n].

    Attributes:
      quantize: what lhs and dout are quantized to in the kernel, or None.
    """

    dout: str = "bf16"
    quantize: tuple[str | None, str | None] = ("e4m3", "e5m2")
    block_m: int = 1024

    def function(self):
        """(function of arrays, their ShapeDtypeStructs)."""
        p = TgmmParams(
            out_dtype=np.dtype(_DTYPES[self.out]),
            lhs_dtype=self.quantize[0],
            dout_dtype=self.quantize[1],
            dout_bound=self.bound,
            block_m=self.block_m,
            transpose_out=self.transpose,
        )
        fn = lambda x: tgmm_quant.tgmm_quant(TgmmOperands(**x), p, chip=_CHIPS[self.chip])
        return fn, self.structs(dout=((self.m, self.n), _DTYPES[self.dout]))


# ---- random calls ----------------------------------------------------------------------------

_ROWS = (1, 64, 1000, 1024, 16384, 65536, 262144)
_WIDTHS = (1, 43, 128, 200, 512, 1408, 2048, 2880, 4096, 5120, 7168, 14336)
_GROUPS = (1, 8, 32, 128, 512)


def _any_call(rng, op: str, **fixed):
    """A random Gmm or Tgmm, of shapes and parameters that the primitives take."""

    def one(*values):
        return values[rng.integers(len(values))]

    x = dict(chip=one(*_CHIPS), m=one(*_ROWS), k=one(*_WIDTHS), n=one(*_WIDTHS), g=one(*_GROUPS))
    x |= dict(out=one("bf16", "f32"), transpose=one(False, True))
    if op == "gmm":
        lhs_to = fixed_to = one(None, None, "e4m3", "e5m2", "int8")
        x |= dict(rhs=one(*_DTYPES), quantize=lhs_to, block_k=one(128, 256, 512, 1024, 2048))
        blocks = [b for b in (128, 256, 512) if x["k"] % b == 0 and x["k"] > b]
        x |= dict(scale=one(None, "column", "fold", "full", *["blocks"] * bool(blocks)))
        x |= dict(scale_block=one(*blocks) if x["scale"] == "blocks" else 0)
    else:
        pairs = (None, None), ("e4m3", "e5m2"), ("int8", "int8"), (None, "e5m2"), ("e4m3", None)
        lhs_to, fixed_to = pair = one(*pairs)
        x |= dict(dout=one("bf16", "f32"), quantize=pair, block_m=one(256, 512, 1024))
    x |= dict(lhs=one("bf16", "f32") if lhs_to else one(*_DTYPES))
    x |= dict(row_scale=lhs_to is None and one(False, True))
    x |= dict(bound=one(None, 2.5) if fixed_to else None)
    return (Gmm if op == "gmm" else Tgmm)(**x | fixed)


class _Stop(Exception):
    """Ends a trace, with what was asked for."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What a call asked for and was given."""

    problem: object
    chip: Chip
    tiles: object


@contextlib.contextmanager
def _choices(stop=False):
    """The list of the choices inside; with ``stop``, the first one is raised."""
    choices = []

    def recorder(choose):
        def record(problem, chip):
            choices.append(_Choice(problem, chip, choose(problem, chip)))
            if stop:
                raise _Stop(choices[-1])
            return choices[-1].tiles

        return record

    with (
        mock.patch.object(gmm, "choose", recorder(gmm.choose)),
        mock.patch.object(tgmm_quant, "choose_tiles", recorder(tgmm_quant.choose_tiles)),
    ):
        yield choices


def _choice(call) -> _Choice:
    fn, arrays = call.function()
    with _choices(stop=True):
        try:
            jax.eval_shape(fn, arrays)
        except _Stop as e:
            return e.args[0]
    raise AssertionError("no tiles were chosen")


def _buffers(call):
    """(tiles, bytes of VMEM that the call's blocks and scratch have at least, bytes of its tables)

    of each kernel of the call. A block is there twice, and its rows take whole lines of 128.
    """
    found = []

    def size(shape, dtype):
        shape = [1 if d is None else getattr(d, "block_size", d) for d in shape]
        return math.prod(shape[:-1]) * round_up(shape[-1], LANES) * np.dtype(dtype).itemsize

    def pallas_call(body, *, grid_spec, out_shape, **options):
        def run(*args):
            count = grid_spec.num_scalar_prefetch
            tables, operands = args[:count], args[count:]
            blocks = [*zip(grid_spec.in_specs, operands, strict=True)]
            blocks.append((grid_spec.out_specs, out_shape))
            vmem = sum(2 * size(spec.block_shape, array.dtype) for spec, array in blocks)
            vmem += sum(size(x.shape, x.dtype) for x in grid_spec.scratch_shapes)
            found.append((choices[-1].tiles, vmem, sum(x.size * x.dtype.itemsize for x in tables)))
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return run

    fn, arrays = call.function()
    with _choices() as choices, mock.patch.object(pl, "pallas_call", pallas_call):
        jax.eval_shape(fn, arrays)
    return found


class ChoiceTest(parameterized.TestCase):
    """640 random calls, from the lowering functions to the tiles."""

    @parameterized.parameters(*range(10))
    def test_gmm(self, seed):
        rng = np.random.default_rng(seed)
        for _ in range(32):
            call = _any_call(rng, "gmm")
            x = _choice(call)
            q, t = x.problem, x.tiles
            with self.subTest(call=call, tiles=t):
                self.assertEqual((q.m, q.k, q.n, q.g), (call.m, call.k, call.n, call.g))
                self.assertTrue(t.tm == q.m <= gmm_tiles.SUB or (t.tm < q.m and t.tm % 32 == 0))
                self.assertTrue(t.tn == q.n or (t.tn < q.n and t.tn % LANES == 0))
                self.assertTrue(t.tk == q.k or (t.tk < q.k and t.tk % q.unit_k == 0))
                self.assertEqual(q.unit_k % LANES, 0)
                # A tile is a loop over its rows only where it holds the whole contraction.
                self.assertTrue(t.sub == t.tm or (t.sub == gmm_tiles.SUB and t.tk == q.k))
                self.assertEqual(t.tm % t.sub, 0)
                self.assertEqual(t.step, min(t.tn, 512))
                self.assertLessEqual(t.vmem, x.chip.vmem_bytes)

    @parameterized.parameters(*range(10))
    def test_tgmm(self, seed):
        rng = np.random.default_rng(seed)
        for _ in range(32):
            call = _any_call(rng, "tgmm")
            x = _choice(call)
            q, t = x.problem, x.tiles
            with self.subTest(call=call, tiles=t):
                self.assertEqual({q.p, q.q}, {call.k, call.n})
                whole = round_up(q.m, 32)
                if q.block_m is None:
                    self.assertEqual((t.block % 32, t.block <= min(whole, 1024)), (0, True))
                else:
                    self.assertEqual(t.block, min(call.block_m, whole))
                self.assertEqual((t.window % 32, t.rows % 32), (0, 0))
                self.assertBetween(t.window, t.block, whole)
                # All rows of a block that starts anywhere in a group of 32 rows; a tail too.
                room = t.rows if t.tail else min(t.block + 32, whole)
                self.assertGreaterEqual(t.window, room)
                self.assertBetween(t.tp, LANES, round_up(q.p, LANES))
                self.assertBetween(t.tq, LANES, round_up(q.q, LANES))
                self.assertEqual((t.tp % LANES, t.tq % LANES), (0, 0))
                self.assertGreaterEqual(t.slots, 2)
                self.assertLessEqual(t.vmem, x.chip.vmem_bytes)

    def test_tgmm_of_the_table(self):
        """docs/performance.md: the tiles whose cycles it gives."""
        saved = dict(lhs="e4m3", row_scale=True, quantize=(None, "e5m2"))
        for (k, n), options, expected in (
            ((7168, 2048), {}, (1024, 2048, (1024, 512))),
            ((7168, 2048), saved, (1792, 2048, (896, 512))),
            ((2048, 7168), {}, (2048, 1024, (1024, 512))),
            ((2048, 7168), saved, (2048, 1024, (1024, 512))),
        ):
            t = _choice(Tgmm("v7x", 32768, k, n, **options)).tiles
            self.assertEqual((t.tp, t.tq, t.product), expected)
            self.assertTrue(t.pipelined)

    @parameterized.product(op=("gmm", "tgmm"), seed=tuple(range(100, 106)))
    def test_buffers(self, op, seed):
        """The estimate covers what the call declares, and the tables fit scalar memory."""
        rng = np.random.default_rng(seed)
        for _ in range(8):
            call = _any_call(rng, op)
            for tiles, vmem, tables in _buffers(call):
                with self.subTest(call=call, tiles=tiles):
                    self.assertGreaterEqual(tiles.vmem, vmem)
                    self.assertLessEqual(tables, _SMEM)

    @parameterized.parameters("gmm", "tgmm")
    def test_long_tables(self, op):
        """Many rows, groups, output tiles or batch elements, which all make the tables longer."""
        large = dict(m=262144, k=7168, n=14336, g=128)
        small = dict(chip="v7x", m=8, k=128, n=128, g=8, batch=(16, 500))
        for fixed in (*({"chip": chip} | large for chip in ("v7x", "v6e", "safe")), small):
            call = _any_call(np.random.default_rng(0), op, **fixed)
            for _, _, tables in _buffers(call):
                self.assertLessEqual(tables, _SMEM, call)

    @parameterized.parameters("gmm", "tgmm")
    def test_takes_milliseconds(self, op):
        """The widest calls have the most candidates."""
        rng = np.random.default_rng(7)
        calls = [_any_call(rng, op, m=262144, k=14336, n=14336) for _ in range(20)]
        choices = [_choice(call) for call in calls]
        choose = gmm_tiles.choose.__wrapped__ if op == "gmm" else tgmm_tiles.choose_tiles
        start = time.process_time()
        for x in choices:
            self.assertEqual(choose(x.problem, x.chip), x.tiles)
        self.assertLess((time.process_time() - start) / len(choices), 0.1)

    def test_nothing_fits(self):
        """Blocks so large that not even the narrowest tile fits: the error says which to change."""
        gmm_call = Gmm("safe", 1024, 14336, 2048, lhs="f32", rhs="f32", quantize="e4m3",
                       block_k=14336)  # fmt: skip
        with self.assertRaisesRegex(ValueError, "smaller block_k"):
            _choice(gmm_call)
        with self.assertRaisesRegex(ValueError, "20000 groups .* at most 16000 groups"):
            _choice(Gmm("v7x", 64, 128, 128, g=20000))
        tgmm_call = Tgmm("safe", 65536, 2048, 2048, lhs="f32", dout="f32", block_m=16384)
        with self.assertRaisesRegex(NotImplementedError, "smaller block_m"):
            jax.eval_shape(*tgmm_call.function())


# ---- the compiler ----------------------------------------------------------------------------


def _compiled_vmem(call) -> tuple[object, int]:
    """(the chosen tiles, bytes of VMEM that the compiler gave the kernel)."""
    name = TOPOLOGIES["v5e" if call.chip == "safe" else call.chip]
    devices = topologies.get_topology_desc(name, platform="tpu").devices[:1]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    place = jax.NamedSharding(mesh, jax.P())
    # Rows first, as a kernel takes them: by default arguments of odd widths come transposed.
    in_order = lambda x: Format(Layout(tuple(range(x.ndim))), place)
    fn, arrays = call.function()
    with _choices() as choices, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        result = in_order(jax.eval_shape(fn, arrays))
        arrays = jax.tree.map(lambda x: x.update(sharding=in_order(x)), arrays)
        choices.clear()
        lowered = jax.jit(fn, out_shardings=result).lower(arrays)
    [choice] = choices
    for line in text_of(lowered.compile()).splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)[1]
            sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used)
            return choice.tiles, sum(map(int, sizes))
    raise AssertionError("the program has no kernel")


# The problems that are hardest on VMEM, for each chip; every form of scale and every dtype.
GMM_COMPILED = [
    Gmm("v7x", 16384, 7168, 2048, rhs="bf16"),
    Gmm("v7x", 65536, 2048, 7168, rhs="bf16", out="f32", transpose=True),
    Gmm("v7x", 16384, 7168, 2048, lhs="f32", rhs="f32", out="f32"),
    Gmm("v7x", 32768, 7168, 2048, quantize="e4m3", scale="column", out="f32"),
    Gmm("v7x", 16384, 2048, 7168, g=128, lhs="f32", quantize="int8", rhs="int8", scale="column"),
    Gmm("v7x", 1024, 2048, 7168, lhs="e4m3", row_scale=True, scale="full", out="f32"),
    Gmm("v7x", 16384, 4099, 1409, g=8, rhs="bf16", transpose=True),
    Gmm("v6e", 16384, 14336, 512, lhs="f32", rhs="f32"),
    Gmm("v6e", 65536, 7168, 2048, quantize="e4m3", scale="column", out="f32"),
    Gmm("v6e", 1024, 5120, 1536, lhs="int8", rhs="int8", row_scale=True, scale="blocks",
        scale_block=256),
    Gmm("v6e", 16384, 2048, 7168, quantize="e5m2", scale="fold", transpose=True),
    Gmm("v6e", 262144, 14336, 4096, lhs="e5m2", row_scale=True, scale="column"),
    Gmm("v5p", 16384, 7168, 2048, rhs="bf16", out="f32"),
    Gmm("v5p", 16384, 14336, 512, rhs="bf16", transpose=True),
    Gmm("v5p", 16384, 14336, 512, lhs="e4m3", row_scale=True, scale="column"),
    Gmm("v5p", 16384, 7168, 2048, lhs="f32", rhs="f32", out="f32", transpose=True),
    Gmm("v5p", 16384, 2048, 7168, quantize="e4m3", scale="blocks", scale_block=128, out="f32"),
    Gmm("v5p", 1024, 1409, 2881, g=8, quantize="int8", rhs="int8", scale="column", out="f32"),
    Gmm("v5e", 16384, 7168, 2048, lhs="f32", rhs="f32", out="f32"),
    Gmm("v5e", 16384, 14336, 512, quantize="e4m3", bound=2.5),
    Gmm("v5e", 16384, 7168, 4096, quantize="e4m3"),
    Gmm("v5e", 16384, 2048, 7168, lhs="int8", rhs="int8", row_scale=True, scale="column",
        out="f32", transpose=True),
    Gmm("safe", 16384, 7001, 2048, lhs="f32", scale="full", out="f32"),
]  # fmt: skip
_NONE, _INT8 = (None, None), ("int8", "int8")
TGMM_COMPILED = [
    Tgmm("v7x", 32768, 7168, 2048),
    Tgmm("v7x", 32768, 2048, 7168, lhs="e4m3", row_scale=True, quantize=(None, "e5m2")),
    Tgmm("v7x", 32768, 7168, 2048, lhs="f32", dout="f32", out="f32", quantize=_NONE),
    Tgmm("v7x", 32768, 2048, 7168, out="f32", quantize=_NONE, transpose=True),
    Tgmm("v7x", 16384, 7168, 2048, lhs="f32", dout="f32", out="f32", quantize=_INT8),
    Tgmm("v7x", 16384, 4099, 1409, g=8, lhs="f32", out="f32", transpose=True, block_m=512),
    Tgmm("v7x", 16384, 1408, 2944, lhs="e4m3", row_scale=True, quantize=(None, "e5m2"), out="f32"),
    Tgmm("v6e", 32768, 7168, 2048, out="f32"),
    Tgmm("v6e", 32768, 2048, 7168, lhs="f32", dout="f32", quantize=_NONE),
    Tgmm("v6e", 16384, 7168, 2048, lhs="int8", row_scale=True, quantize=(None, "int8"), out="f32"),
    Tgmm("v6e", 16384, 5120, 1536, g=128, block_m=256, bound=2.0),
    Tgmm("v6e", 1024, 43, 14336, g=8, lhs="f32", dout="f32", out="f32"),
    Tgmm("v5p", 32768, 7168, 2048, transpose=True),
    Tgmm("v5p", 32768, 2048, 7168, lhs="f32", dout="f32", out="f32", quantize=_NONE),
    Tgmm("v5p", 16384, 7168, 2048, out="f32", quantize=_INT8),
    Tgmm("v5p", 16384, 1409, 2881, lhs="e4m3", row_scale=True, quantize=(None, "e5m2"), out="f32"),
    Tgmm("v5e", 32768, 7168, 2048, lhs="f32", dout="f32", out="f32"),
    Tgmm("v5e", 32768, 2048, 7168, quantize=_NONE, out="f32"),
    Tgmm("v5e", 65536, 14336, 4096, g=8, lhs="e4m3", row_scale=True, quantize=(None, "e5m2")),
    Tgmm("v5e", 64, 7168, 2048, lhs="f32", dout="f32", out="f32", quantize=_INT8),
    Tgmm("safe", 16384, 7168, 2048, lhs="f32", dout="f32", out="f32"),
]  # fmt: skip


class CompileTest(parameterized.TestCase):
    """The estimate of a call is no less than what the compiler takes for its kernel.

    ``pytest -m sweep -n 0 -s -k vmem tests/test_tpu_tiles.py`` prints both. One of the programs can
    be read back with jax 0.12 only.
    """

    @parameterized.parameters(*GMM_COMPILED, *TGMM_COMPILED)
    @pytest.mark.sweep
    def test_sweep_vmem(self, call):
        tiles, used = _compiled_vmem(call)
        print(f"{call}: estimate {tiles.vmem}, compiler {used} ({used / tiles.vmem:.0%})")
        self.assertLessEqual(used, tiles.vmem)


if __name__ == "__main__":
    absltest.main()
