"""The table of cases: every row is one call, with its reference, that all kinds of test run.

A row says what the call is made of, not how it is tested. Add a primitive: add rows whose op is its
public function; a test fails while a registered primitive has none.
"""

import dataclasses
import functools
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import fp8moe_prims as fp8
from tests import oracle

WIDE = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of gmm or tgmm_quant.

    Attributes:
      name: unique.
      op: "gmm" or "tgmm_quant".
      shape: (m, k, n, g).
      sizes, starts, offset: the group arguments; offset None is not passed.
      lhs, rhs: "f32", "bf16", "f16", "f32+" (see _make), or for a QArray "q:<scale>", where the
        scale is "row" (lhs), "one", "channel", "expert", "blocked" or "blocked_channel" (rhs).
      recipe: of gmm; of tgmm_quant its act_dtype, grad_dtype and block_m are lhs_dtype, dout_dtype
        and block_m.
      transpose_rhs: of gmm.
      tolerance: of max |error| relative to max |reference|.
      tags: "sweep" rows run in the long sweep only, "interpret" rows in the interpreter too,
        "grad" rows are differentiated.
    """

    name: str
    op: str
    shape: tuple[int, int, int, int]
    sizes: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    offset: int | None = None
    lhs: str = "f32"
    rhs: str = "f32"
    recipe: fp8.QuantRecipe | None = None
    transpose_rhs: bool = False
    tolerance: float = 2e-3
    tags: tuple[str, ...] = ("interpret", "grad")

    def arrays(self):
        """(lhs, second operand), numpy or QArrays of it; the tail holds normal values."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        m, k, n, g = self.shape
        lhs = _make(rng, self.lhs, (m, k))
        if self.op == "tgmm_quant":
            return lhs, _make(rng, self.rhs, (m, n))
        shape = (g, n, k) if self.transpose_rhs else (g, k, n)
        return lhs, _make(rng, self.rhs, shape, self.transpose_rhs)

    def kwargs(self):
        groups = dict(
            group_sizes=np.asarray(self.sizes, np.int32),
            group_starts=None if self.starts is None else np.asarray(self.starts, np.int32),
            group_offset=self.offset,
        )
        if self.op == "gmm":
            return groups | dict(recipe=self.recipe, transpose_rhs=self.transpose_rhs)
        recipe = self.recipe or fp8.QuantRecipe(None, None, None)
        return groups | dict(
            num_groups=self.shape[3],
            lhs_dtype=recipe.act_dtype,
            dout_dtype=recipe.grad_dtype,
            block_m=recipe.block_m,
        )

    def function(self):
        """The call as a function of (lhs, second operand, group_sizes)."""
        kwargs = self.kwargs()
        kwargs.pop("group_sizes")
        op = getattr(fp8, self.op)
        return lambda a, b, sizes: op(a, b, sizes, **kwargs)

    @property
    def groups(self):
        m, _, _, g = self.shape
        return oracle.ranges(self.sizes, self.starts, self.offset or 0, g, m)

    @property
    def valid(self):
        rows = np.zeros(self.shape[0], bool)
        for start, end in self.groups:
            rows[start:end] = True
        return rows

    def reference(self):
        """float64 result of the call."""
        lhs, rhs = self.arrays()
        recipe = self.recipe or fp8.QuantRecipe(None, None, None)
        if self.op == "tgmm_quant":
            value, scale = (lhs.qvalue, lhs.scale) if isinstance(lhs, fp8.QArray) else (lhs, None)
            return oracle.tgmm(
                value,
                rhs,
                self.groups,
                lhs_dtype=recipe.act_dtype if scale is None else None,
                dout_dtype=recipe.grad_dtype,
                block_m=recipe.block_m,
                lhs_scale=scale,
            )
        return oracle.gmm(
            self.lhs_values(lhs, recipe),
            self.rhs_values(rhs, recipe),
            self.groups,
            transpose_rhs=self.transpose_rhs,
        )

    def lhs_values(self, lhs, recipe):
        if isinstance(lhs, fp8.QArray):
            return dequantize(lhs)
        bound = _bound(recipe.act_calibration)
        return oracle.round_rows(lhs, recipe.act_dtype, recipe.block_k, bound)

    def rhs_values(self, rhs, recipe):
        if isinstance(rhs, fp8.QArray):
            return dequantize(rhs)
        bound = _bound(recipe.weight_calibration)
        return oracle.quantize_weights(rhs, recipe.weight_dtype, self.transpose_rhs, bound)

    def gradients(self, dout):
        """float64 (dlhs, drhs) of gmm for the cotangent dout, by the rules of the spec."""
        lhs, rhs = self.arrays()
        recipe = self.recipe or fp8.QuantRecipe(None, None, None)
        contraction, output = (1, 2) if self.transpose_rhs else (2, 1)
        weights = self.rhs_values(rhs, recipe)
        scale = self._contraction_scale(rhs, recipe, contraction, output)
        bound = _bound(recipe.grad_calibration)
        dy = np.asarray(dout).astype(np.float32)
        if scale is not None:
            weights = weights / np.where(scale == 0, 1, scale)

        def fold(rows, e):
            if scale is not None:
                rows = rows * np.broadcast_to(scale, (weights.shape[0], *scale.shape[1:]))[
                    e
                ].reshape(1, -1).astype(np.float32)
            return oracle.round_rows(rows, recipe.grad_dtype, recipe.block_k, bound)

        dlhs = oracle.gmm(dy, weights, self.groups, transpose_rhs=not self.transpose_rhs, fold=fold)
        value, row = (lhs.qvalue, lhs.scale) if isinstance(lhs, fp8.QArray) else (lhs, None)
        drhs = oracle.tgmm(
            value,
            dy,
            self.groups,
            lhs_dtype=recipe.act_dtype if row is None else None,
            dout_dtype=recipe.grad_dtype,
            block_m=recipe.block_m,
            lhs_scale=row,
            dout_bound=bound,
        )
        return dlhs, np.swapaxes(drhs, 1, 2) if self.transpose_rhs else drhs

    def _contraction_scale(self, rhs, recipe, contraction, output):
        """The rhs scale as the dlhs kernel folds it into dout, or None."""
        if not isinstance(rhs, fp8.QArray):
            if recipe.weight_dtype is None:
                return None
            rhs = fp8.quantize(
                jnp.asarray(rhs),
                recipe.weight_dtype,
                channelwise_axes=(0, contraction),
                calibration=recipe.weight_calibration,
            )
        scale = oracle.wide(rhs.scale)
        full = scale.shape[contraction] == rhs.qvalue.shape[contraction]
        return scale if full and scale.shape[output] == 1 else None


def dequantize(q):
    return oracle.wide(q.qvalue) * oracle.expand(q.scale, q.qvalue.shape)


def _bound(calibration):
    return None if calibration == "absmax" else float(calibration.split(",")[-1])


def _make(rng, kind, shape, transposed=False):
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))).astype(np.float32)
    if kind == "f32+":  # the largest of each channel positive: -127.5 is a tie of int8's division
        return x * np.sign(np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1))
    if not kind.startswith("q:"):
        return x.astype(WIDE[kind])
    contraction = 2 if transposed else 1
    scale_shape = [1] * len(shape)
    match kind[2:].removesuffix(":int8").removesuffix(":e5m2"):
        case "row":
            scale_shape[0] = shape[0]
        case "channel":
            scale_shape[0], scale_shape[3 - contraction] = shape[0], shape[3 - contraction]
        case "expert":
            scale_shape[0] = shape[0]
        case "blocked":
            scale_shape[0], scale_shape[contraction] = shape[0], shape[contraction] // 2
        case "blocked_channel":
            scale_shape[:] = shape
            scale_shape[contraction] //= 2
    # Powers of two, all different enough that a misplaced scale shows.
    scale = np.exp2(rng.integers(-4, 5, scale_shape)).astype(np.float32)
    dtype = "e4m3" if kind.count(":") == 1 else kind.rpartition(":")[2]
    if dtype == "int8":
        return fp8.QArray(rng.integers(-127, 128, shape).astype(np.int8), scale)
    return fp8.QArray(x.astype(oracle.QDTYPES[dtype]), scale)


E4M3 = fp8.QuantRecipe(grad_dtype="e4m3", block_m=128, block_k=128)
E5M2 = fp8.QuantRecipe(act_dtype="e5m2", weight_dtype="e5m2", block_m=256)
DEFAULT = fp8.QuantRecipe()
INT8 = fp8.QuantRecipe(act_dtype="int8", weight_dtype="int8")
FIXED = fp8.QuantRecipe(
    act_calibration="fixed,-8,8", weight_calibration="fixed,16", grad_calibration="fixed,4"
)
PLAIN = dict(recipe=None, tolerance=2e-5)


def _sizes(m, g, seed):
    """Sizes that sum to less than m, about a third of them zero."""
    rng = np.random.default_rng(seed)
    share = rng.random(g) * (rng.random(g) > 0.33)
    sizes = np.floor(share / max(share.sum(), 1e-9) * m * rng.uniform(0.5, 1)).astype(int)
    return tuple(int(s) for s in sizes)


def _gmm_rows():
    row = functools.partial(Case, op="gmm")
    yield row("gmm/plain", shape=(130, 96, 160, 4), sizes=(40, 0, 60, 7), **PLAIN)
    yield row("gmm/bf16", shape=(130, 96, 160, 4), sizes=(40, 0, 60, 7), lhs="bf16", rhs="bf16")
    yield row("gmm/f16", shape=(24, 96, 40, 2), sizes=(10, 9), lhs="f16", rhs="f16", tags=("grad",))
    yield row("gmm/quantized", shape=(300, 200, 96, 4), sizes=(100, 0, 60, 33), recipe=DEFAULT)
    yield row(
        "gmm/quantized_bf16",
        shape=(300, 640, 128, 3),
        sizes=(150, 1, 149),
        lhs="bf16",
        rhs="bf16",
        recipe=E4M3,
    )
    yield row("gmm/e5m2", shape=(100, 257, 43, 3), sizes=(44, 0, 50), recipe=E5M2)
    yield row("gmm/int8", shape=(64, 128, 96, 2), sizes=(30, 30), rhs="f32+", recipe=INT8)
    yield row("gmm/fixed", shape=(64, 160, 96, 2), sizes=(30, 30), recipe=FIXED)
    yield row(
        "gmm/transposed",
        shape=(100, 200, 96, 3),
        sizes=(44, 0, 50),
        transpose_rhs=True,
        recipe=DEFAULT,
    )
    yield row(
        "gmm/transposed_plain",
        shape=(100, 129, 33, 3),
        sizes=(1, 98, 1),
        transpose_rhs=True,
        **PLAIN,
    )
    for name, sizes, extra in (
        ("all_empty", (0, 0, 0), {}),
        ("one_full", (0, 96, 0), {}),
        ("overrun", (50, 60, 70), {}),
        ("negative", (30, -1, 40), {}),
        ("short", (5, 6, 7), {}),
        ("starts", (10, 0, 30), dict(starts=(16, 32, 48))),
        ("starts_overrun", (10, 20, 30), dict(starts=(0, 40, 90))),
        ("offset", (10, 20, 0, 30, 20), dict(offset=2)),
        ("offset_past_end", (10, 20, 30, 20), dict(offset=3)),
        ("offset_far", (10, 20, 30), dict(offset=9)),
    ):
        yield row(f"gmm/{name}", shape=(96, 128, 160, 3), sizes=sizes, recipe=DEFAULT, **extra)
    yield row("gmm/one_row_groups", shape=(32, 96, 96, 32), sizes=(1,) * 32, recipe=DEFAULT)
    yield row(
        "gmm/many_empty",
        shape=(64, 128, 64, 18),
        sizes=(9, 0, 0, 0, 7, 0, 0, 0, 0, 20, 0, 0, 3, 0, 8, 0, 0, 17),
        recipe=DEFAULT,
    )
    yield row("gmm/no_rows", shape=(0, 64, 32, 2), sizes=(3, 4), recipe=DEFAULT, tags=())
    yield row("gmm/many_rows", shape=(33000, 8, 8, 3), sizes=(20000, 0, 12000), tags=(), **PLAIN)
    for lhs, rhs in (
        ("q:row", "q:channel"),
        ("q:one", "q:one"),
        ("q:row:e5m2", "q:expert:e5m2"),
        ("q:row", "bf16"),
        ("bf16", "q:channel"),
        ("q:row:int8", "q:channel:int8"),
        ("bf16", "q:channel:int8"),
        ("q:row", "q:blocked"),
        ("bf16", "q:blocked_channel"),
    ):
        recipe = fp8.QuantRecipe(act_dtype=None, weight_dtype=None)
        for transpose in (False, True):
            yield row(
                f"gmm/{lhs}/{rhs}{'/transposed' * transpose}",
                shape=(72, 128, 96, 3),
                sizes=(20, 0, 45),
                lhs=lhs,
                rhs=rhs,
                recipe=recipe,
                transpose_rhs=transpose,
            )
    yield row(
        "gmm/contraction_scale",  # the form that dlhs takes
        shape=(72, 96, 128, 3),
        sizes=(20, 0, 45),
        rhs="q:channel",
        recipe=fp8.QuantRecipe(weight_dtype=None),
    )
    dims = (1, 43, 96, 127, 128, 129, 160, 200, 257, 640)
    for i, m in enumerate((1, 7, 24, 100, 130, 333, 511, 777, 1024, 1100)):
        k, n = dims[i], dims[(3 * i + 5) % 10]
        for name, recipe in ((("e4m3", E4M3), ("e5m2", E5M2))[i % 2], ("plain", None)):
            yield row(
                f"gmm/m{m}k{k}n{n}/{name}",
                shape=(m, k, n, 5),
                sizes=_sizes(m, 5, i),
                recipe=recipe,
                tolerance=2e-3 if recipe else 2e-5,
                tags=("interpret",) if name != "plain" or i % 3 == 0 else (),
            )
    for i, (k, n) in enumerate((k, n) for k in dims for n in dims):
        m = (1, 13, 64, 250, 600, 1100)[i % 6]
        recipe = (E4M3, E5M2, None)[i % 3]
        yield row(
            f"gmm/sweep/m{m}k{k}n{n}",
            shape=(m, k, n, 6),
            sizes=_sizes(m, 6, i),
            recipe=recipe,
            tolerance=2e-3 if recipe else 2e-5,
            tags=("sweep", "interpret"),
        )


def _tgmm_rows():
    row = functools.partial(Case, op="tgmm_quant")
    yield row("tgmm/plain", shape=(130, 96, 160, 4), sizes=(40, 0, 60, 7), **PLAIN)
    yield row("tgmm/bf16", shape=(300, 96, 160, 3), sizes=(140, 0, 160), lhs="bf16", rhs="bf16")
    yield row("tgmm/quantized", shape=(300, 200, 96, 4), sizes=(100, 0, 60, 33), recipe=DEFAULT)
    yield row("tgmm/blocks", shape=(700, 43, 129, 3), sizes=(391, 0, 200), recipe=E4M3)
    yield row("tgmm/e5m2", shape=(600, 127, 257, 2), sizes=(300, 290), recipe=E5M2)
    yield row("tgmm/saved", shape=(300, 96, 128, 3), sizes=(151, 3, 100), lhs="q:row", recipe=E4M3)
    yield row("tgmm/saved_one", shape=(64, 96, 40, 2), sizes=(30, 20), lhs="q:one", recipe=E4M3)
    yield row("tgmm/saved_plain", shape=(64, 96, 40, 2), sizes=(30, 20), lhs="q:row", recipe=None)
    for name, sizes, extra in (
        ("all_empty", (0, 0, 0), {}),
        ("overrun", (50, 60, 70), {}),
        ("negative", (30, -1, 40), {}),
        ("starts", (10, 0, 30), dict(starts=(16, 32, 48))),
        ("offset", (10, 20, 0, 30, 20), dict(offset=2)),
        ("offset_past_end", (10, 20, 30, 20), dict(offset=3)),
        ("fewer_sizes", (40, 20), {}),
    ):
        yield row(f"tgmm/{name}", shape=(96, 128, 160, 3), sizes=sizes, recipe=E4M3, **extra)
    yield row("tgmm/one_row_groups", shape=(32, 96, 96, 32), sizes=(1,) * 32, recipe=DEFAULT)
    yield row("tgmm/no_rows", shape=(0, 64, 32, 2), sizes=(3, 4), recipe=DEFAULT, tags=())
    dims = (1, 43, 96, 127, 128, 129, 160, 200, 257, 640)
    for i, m in enumerate((1, 7, 24, 100, 130, 333, 511, 777, 1024, 1100)):
        k, n = dims[i], dims[(3 * i + 5) % 10]
        for name, recipe in ((("e5m2", E5M2), ("e4m3", E4M3))[i % 2],):
            yield row(
                f"tgmm/m{m}k{k}n{n}/{name}",
                shape=(m, k, n, 5),
                sizes=_sizes(m, 5, i),
                recipe=recipe,
                tags=("interpret",),
            )
    for i, (k, n) in enumerate((k, n) for k in dims for n in dims):
        m = (1, 13, 64, 250, 600, 1100)[i % 6]
        recipe = (E4M3, E5M2, None)[i % 3]
        yield row(
            f"tgmm/sweep/m{m}k{k}n{n}",
            shape=(m, k, n, 6),
            sizes=_sizes(m, 6, i),
            recipe=recipe,
            tolerance=2e-3 if recipe else 2e-5,
            tags=("sweep", "interpret"),
        )


CASES = (*_gmm_rows(), *_tgmm_rows())


def select(*, tag=None, op=None, sweep=False):
    """Rows with a tag and an op; the sweep's rows only where asked for."""
    return [
        c
        for c in CASES
        if (tag is None or tag in c.tags)
        and (op is None or c.op == op)
        and ("sweep" in c.tags) == sweep
    ]
