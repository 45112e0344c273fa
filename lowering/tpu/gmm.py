"""Grouped matmul on a TPU core: out[r] = lhs[r] @ rhs[e] for the rows r of group e.

Everything that quantization adds happens in the kernel: the lhs is quantized tile by tile in VMEM,
and every scale is applied to a value that is there anyway. Only tiles with rows of a group are
read and multiplied, so the cost follows the valid rows and not the size of the buffer.

Grid: (n tiles, visits, k tiles). A visit (visits.py) is a tile of tm rows and one group with rows
in it; the number of visits is a run-time value. Usually the whole contraction is one k tile: then
the weights [k, tn] of a group stay in VMEM while its visits last, and are read from HBM once. The
rows of a visit are handled sub (256) at a time, by a loop over those that the group has: a tile may
be large, for few grid steps, and a boundary between groups still costs at most sub rows.

Buffers in VMEM, the pipelined blocks twice:
  lhs     [tm, tk]       rows of the visit
  rhs     [tk, tn]       (or [tn, tk]) weights of the visit's group
  out     [tm, tn]       stays while consecutive visits have the same rows, each adding its own
  ready   [sub, tk]      the lhs as the MXU takes it: quantized, scaled, converted; if it differs
  steps   [blocks, sub, 128]  the scales of the quantized lhs, by block of k and row, in each lane
  weights [tk, tn]       the rhs as the MXU takes it, made once per group, where it differs
  kept    [sub, tn]      out rows as earlier visits left them
  acc     [sub, 2048] f32  the sum over blocks of k (or [tm, tn], over k tiles)
SMEM holds one int32 table: the visits, and per group its rows and which operand blocks it reads.

Cycles per 256 rows, k = 7168, n = 2048, v7x (compiler's schedule; MXU floor 7168): 8700 with a bf16
lhs quantized per 512 elements of k, of which the MXU works 82%.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.dots import dot, dot_dtypes, widen
from fp8moe_prims.lowering.tpu.visits import make_visits, max_visits

_I = np.int32
_MIB = 1 << 20
_LANES = 128
_MAX_TABLE = 160_000  # int32 values of tables that a call may put into SMEM (1 MiB)


# ---- tiles -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of one call.

    Attributes:
      tm, tn, tk: rows, output columns and contraction elements of a tile.
      sub: rows that are handled at a time; a tile is a loop over those that the group has.
      step: columns of one product.
      vmem: the estimate, bytes.
    """

    tm: int
    tn: int
    tk: int
    sub: int
    step: int
    vmem: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the choice of tiles depends on, beside the chip. Sizes of one batch."""

    m: int
    k: int
    n: int
    g: int
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    qdtype: np.dtype | None = None  # what the lhs is quantized to in the kernel
    block_k: int | None = None  # elements that share one in-kernel scale; None: no such scale
    scale_form: str | None = None  # None | "column" | "fold" | "blocks" | "full", see _scale_form
    scale_block: int = 0  # contraction elements of a block, for "blocks"
    transpose_rhs: bool = False
    batches: int = 1
    rows: int | None = None  # valid rows expected in one batch

    @property
    def mxu_dtypes(self):
        """(lhs, rhs) dtypes as this call hands them to ``dot``, before its own conversion."""
        lhs = self.qdtype or (np.dtype(np.float32) if self.scale_form == "fold" else self.lhs_dtype)
        rhs = np.dtype(np.float32) if self.scale_form == "full" else self.rhs_dtype
        return np.dtype(lhs), np.dtype(rhs)

    @property
    def unit_k(self) -> int:
        """What a k tile must be a multiple of, so that no scale block is cut."""
        unit = self.block_k or _LANES
        if self.scale_form == "blocks":
            unit = math.lcm(unit, self.scale_block)
        return unit


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


def _vmem_bytes(q: Problem, chip: Chip, tm: int, tn: int, tk: int, sub: int, step: int) -> int:
    """VMEM that a call with these tiles needs: blocks, scratch, and temporaries of one product."""
    lhs, rhs = q.mxu_dtypes
    ready, weights = dot_dtypes(lhs, rhs, chip)
    cut = tk < q.k  # several k tiles
    masked = cut and q.k % tk != 0
    rows, cols, deep = _up(tm, 32), _up(tn, _LANES), _up(tk, _LANES)
    some = _up(sub, 32)
    if q.transpose_rhs:
        rhs_elements = _up(tn, 32) * deep
    else:
        rhs_elements = _up(tk, 32) * cols
    total = 2 * rows * deep * q.lhs_dtype.itemsize
    total += 2 * rhs_elements * q.rhs_dtype.itemsize
    total += (2 * rows + some) * cols * q.out_dtype.itemsize  # with kept
    if q.qdtype is not None or q.scale_form == "fold" or q.lhs_dtype != ready or masked:
        total += some * deep * ready.itemsize
    if q.scale_form == "full" or q.rhs_dtype != weights or masked:
        total += rhs_elements * weights.itemsize
    total += some * _up(_acc_columns(q, tn, tk, step), _LANES) * 4
    if q.block_k is not None:
        total += -(-tk // q.block_k) * some * _LANES * 4
    if q.scale_form == "full":
        total += 2 * rhs_elements * 4
    elif q.scale_form == "fold":
        total += 2 * 8 * deep * 4
    elif q.scale_form == "blocks":
        total += 2 * _up(q.k // q.scale_block, 8) * cols * 4
    else:
        total += 2 * 8 * cols * 4
    total += 2 * 8 * rows * 4 + rows * _LANES * 4  # the row scale, and it as a column
    # Temporaries: a product and its sum; the f32 form of a quantization block; f32 splits.
    total += 2 * some * _up(step, _LANES) * 4
    total += min(some, _ROWS) * min(deep, _up(q.block_k or 1024, _LANES)) * 4
    if q.rhs_dtype != weights:
        total += 256 * 512 * 4
    if ready == np.float32 or tn == 1:
        total += 2 * (some + _up(step, _LANES)) * min(deep, _PIECE_F32) * 4
    return total + 2 * _MIB


def _acc_columns(q: Problem, tn: int, tk: int, step: int) -> int:
    if tk < q.k:
        return tn
    if q.block_k is None or q.block_k >= tk:
        return 0
    return min(tn, max(_AHEAD_COLUMNS // step, 1) * step)


_AHEAD_COLUMNS = 2048  # columns whose products the quantization of a lhs is spread over
_SUB = 256  # rows of one run through the program, more than that is a loop
_ROWS = 128  # rows that are quantized or converted at a time
_PIECE_F32 = 1024  # contraction elements of one float32 product


def _cost(q: Problem, chip: Chip, tm: int, tn: int, tk: int, sub: int) -> float:
    """Cycles of a call, roughly: the larger of MXU and HBM time, and what a grid step costs."""
    rows = q.m if q.rows is None else min(q.rows, q.m)
    lhs, rhs = q.mxu_dtypes
    ready, weights = dot_dtypes(lhs, rhs, chip)
    passes = {1: 0.5, 2: 1.0, 4: 6.0}[ready.itemsize]
    groups = max(min(q.g, rows), 1)
    n_tiles, k_tiles = -(-q.n // tn), -(-q.k // tk)
    width = chip.mxu_width
    # A group fills its last rows up to sub; half of the groups lie across a tile's edge.
    runs = rows / sub + groups * (0.5 + 0.5 * (tm < q.m))
    visits = rows / tm + groups
    deep, wide = _up(q.k, _LANES), _up(tn, width)
    # Loading the weights into the MXU costs as much as half of its width in rows.
    mxu = 2.0 * (sub + width / 2) * deep * wide * passes / chip.mxu_flops_per_cycle
    vector = 0.0
    if q.qdtype is not None or q.scale_form == "fold":
        vector = sub * deep * 5 / 4096
    if q.block_k is not None:
        vector += sub * wide * 2 * (-(-q.k // q.block_k)) / 4096
    cycles = runs * n_tiles * (max(mxu, vector) + 0.25 * min(mxu, vector) + 100)
    if q.rhs_dtype != weights:
        cycles += (groups if k_tiles == 1 else visits) * q.k * q.n * 8 / 4096
    traffic = n_tiles * (rows + groups * tm / 2) * q.k * q.lhs_dtype.itemsize
    traffic += (groups if k_tiles == 1 else visits) * q.k * q.n * q.rhs_dtype.itemsize
    traffic += rows * q.n * q.out_dtype.itemsize
    hbm = traffic / chip.hbm_bytes_per_cycle
    # The weights of a group are fetched while the last tile of the one before it is handled.
    fetch = q.k * tn * q.rhs_dtype.itemsize / chip.hbm_bytes_per_cycle
    stall = groups * n_tiles * max(0.0, fetch - cycles / (visits * n_tiles))
    return max(cycles + stall, hbm) + 500.0 * visits * n_tiles * k_tiles


def _row_tiles(q: Problem, chip: Chip):
    """Candidates for tm."""
    sizes = [t for t in (1024, 512, 256, 128, 64, 32) if t < q.m]
    return ([q.m] if q.m <= _SUB else []) + sizes


def _column_tiles(n: int):
    """Candidates for tn: n itself, and multiples of 128 that cut n into fairly even tiles."""
    sizes = {n}
    for parts in range(2, 65):
        tile = _up(-(-n // parts), 256 if n >= 512 else _LANES)
        if tile < n:
            sizes.add(tile)
    if n > _LANES:
        sizes.add(_LANES)
    return sorted(sizes, reverse=True)


def _depth_tiles(q: Problem):
    """Candidates for tk: the whole contraction, and multiples of the scale blocks."""
    sizes = {q.k}
    unit = q.unit_k
    for parts in range(2, 513):
        tile = _up(-(-q.k // parts), unit)
        if tile < q.k:
            sizes.add(tile)
    if unit < q.k:
        sizes.add(unit)
    return sorted(sizes, reverse=True)


@functools.lru_cache(maxsize=1024)
def _choose(q: Problem, chip: Chip) -> Tiles:
    best, best_cost = None, math.inf
    for tk in _depth_tiles(q):
        for tm in _row_tiles(q, chip):
            for tn in _column_tiles(q.n):
                step = min(tn, 512)
                sub = _SUB if tm > _SUB and tk == q.k else tm
                vmem = _vmem_bytes(q, chip, tm, tn, tk, sub, step)
                if vmem > chip.vmem_bytes:
                    continue
                if max_visits(q.batches, q.m, q.g, tm) + 8 * q.batches * q.g > _MAX_TABLE:
                    continue
                cost = _cost(q, chip, tm, tn, tk, sub)
                if cost < best_cost:
                    best, best_cost = Tiles(tm, tn, tk, sub, step, vmem), cost
        if best is not None:
            return best  # fewer k tiles always win: each re-reads the weights for every visit
    raise ValueError(
        f"fp8moe gmm: no tiling of lhs [{q.m}, {q.k}] x rhs [{q.g}, {q.k}, {q.n}] with block_k "
        f"{q.block_k} fits the {chip.vmem_bytes} bytes of VMEM of a {chip.name} core; use a "
        "smaller block_k."
    )


def choose_tiles(m, k, n, g, lhs_dtype, rhs_dtype, out_dtype, quantize, chip, **more) -> Tiles:
    """The tiles of a call, by an estimate of VMEM and cycles. Pure Python.

    Args:
      m, k, n, g: sizes of one batch.
      lhs_dtype, rhs_dtype, out_dtype: dtypes in HBM.
      quantize: the dtype that the lhs is quantized to in the kernel, or None.
      chip: the target.
      **more: the other fields of Problem.
    """
    return _choose(
        Problem(
            m,
            k,
            n,
            g,
            np.dtype(lhs_dtype),
            np.dtype(rhs_dtype),
            np.dtype(out_dtype),
            None if quantize is None else np.dtype(quantize),
            **more,
        ),
        chip,
    )


# ---- operands --------------------------------------------------------------------------------


def _scale_form(shape, k: int, n: int, transpose: bool):
    """How an rhs scale [.., s1, s2] is applied, and the contraction elements of one block.

    "column": constant along the contraction, multiplies the output's columns.
    "fold":   one value per contraction element, multiplies the lhs before it is quantized.
    "blocks": blocks of a multiple of 128 along the contraction, multiplies the partial products.
    "full":   anything else, multiplies the rhs itself.
    """
    deep, wide = (shape[-1], shape[-2]) if transpose else (shape[-2], shape[-1])
    if deep == 1:
        return "column", k
    if deep == k and wide == 1:
        return "fold", 1
    if (k // deep) % _LANES == 0:
        return "blocks", k // deep
    return "full", k // deep


def _stretch(x, axis: int, size: int):
    """A block-wise scale with ``size`` values along ``axis``."""
    have = x.shape[axis]
    if have == size:
        return x
    if have == 1:
        shape = list(x.shape)
        shape[axis] = size
        return jnp.broadcast_to(x, shape)
    return jnp.repeat(x, size // have, axis=axis, total_repeat_length=size)


def _shaped_scale(scale, form: str, k: int, n: int, transpose: bool):
    """The rhs scale as the kernel reads it: [S, 1, n], [S, 1, k], [S, blocks, n] or rhs's shape."""
    scale = scale.astype(jnp.float32)
    scale = scale.reshape((-1,) + scale.shape[-2:])
    if form == "full":
        first, second = (n, k) if transpose else (k, n)
        return _stretch(_stretch(scale, -2, first), -1, second)
    if form == "fold":
        return scale.reshape(scale.shape[0], 1, k)
    if transpose:
        scale = jnp.swapaxes(scale, -1, -2)
    return _stretch(scale, -1, n)


def _batch_map(lead, full):
    """int32 [B]: where batch index b lies in an operand with leading dims ``lead``."""
    index = np.arange(math.prod(lead), dtype=np.int32).reshape(lead)
    return np.broadcast_to(index, full).reshape(-1)


def _leads(x):
    """(leading dims of each operand by name, their broadcast)."""
    leads = {"lhs": x.lhs.shape[:-2], "rhs": x.rhs.shape[:-3], "rows": x.starts.shape[:-1]}
    leads["ends"] = x.ends.shape[:-1]
    if x.lhs_scale is not None:
        leads["lhs_scale"] = x.lhs_scale.shape[:-2]
    if x.rhs_scale is not None:
        leads["rhs_scale"] = x.rhs_scale.shape[:-3]
    return leads, np.broadcast_shapes(*leads.values())


# ---- the kernel ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Everything static about one call of the kernel."""

    q: Problem
    t: Tiles
    chip: Chip
    tail: str
    bound: float | None
    row_scale: bool  # an lhs scale per row
    flat_scale: bool  # an lhs scale per batch
    visits: int  # V

    @property
    def tiles(self) -> int:
        return -(-self.q.m // self.t.tm)

    @property
    def units(self) -> int:
        return self.q.batches * self.tiles

    @property
    def groups(self) -> int:
        return 1 + self.q.batches * self.q.g

    @property
    def k_tiles(self) -> int:
        return -(-self.q.k // self.t.tk)

    @property
    def masked(self) -> bool:
        return self.q.k % self.t.tk != 0

    @property
    def dtypes(self):
        return dot_dtypes(*self.q.mxu_dtypes, self.chip)

    @property
    def makes_lhs(self) -> bool:
        q = self.q
        changed = q.qdtype is not None or q.scale_form == "fold" or q.lhs_dtype != self.dtypes[0]
        return changed or self.masked

    @property
    def makes_rhs(self) -> bool:
        q = self.q
        return q.scale_form == "full" or q.rhs_dtype != self.dtypes[1] or self.masked

    @property
    def ahead(self) -> bool:
        """Whether the lhs is quantized block by block between the products."""
        return self.block_k is not None and self.block_k < self.t.tk

    @property
    def acc_columns(self) -> int:
        """The first output columns, whose partial sums wait in ``acc``."""
        return _acc_columns(self.q, self.t.tn, self.t.tk, self.t.step)

    @property
    def block_k(self) -> int | None:
        """Contraction elements of one in-kernel scale, within a k tile."""
        return None if self.q.block_k is None else min(self.q.block_k, self.t.tk)


# The per-group columns of the table, after its V entries of visits.
_SHIFT, _STOP, _BATCH, _START, _END, _LHS, _RHS, _SCALE = range(8)


class _Table:
    """Reads of the SMEM table, by scalar code in index maps and in the kernel."""

    def __init__(self, spec: _Spec, ref):
        self.spec, self.ref = spec, ref

    def group(self, v):
        return self.ref[v]

    def get(self, field: int, p):
        return self.ref[p + _I(self.spec.visits + field * self.spec.groups)]

    def unit(self, v, p):
        """The unit of visit v."""
        return jnp.clip(v + self.get(_SHIFT, p), _I(0), _I(self.spec.units - 1))

    def own(self, v, p):
        """Whether visit v handles rows of its group, and not a unit without rows."""
        return v < self.get(_STOP, p)

    def lhs_tile(self, v, p):
        """The row tile that is in VMEM at visit v: a gap keeps the one before it."""
        v = jnp.minimum(v, self.get(_STOP, p) - _I(1))
        tile = v + self.get(_SHIFT, p) - self.get(_BATCH, p) * _I(self.spec.tiles)
        return jnp.clip(tile, _I(0), _I(self.spec.tiles - 1))

    def split(self, unit):
        """(batch, tile) of a unit."""
        tiles = self.spec.tiles
        if self.spec.q.batches == 1:
            return _I(0), unit
        if tiles == 1:
            return unit, _I(0)
        batch = jax.lax.div(unit, _I(tiles))
        return batch, unit - batch * _I(tiles)

    def k_tile(self, kt, v, p):
        if self.spec.k_tiles == 1:
            return _I(0)
        return jnp.where(self.own(v, p), kt, _I(self.spec.k_tiles - 1))


def _ranges(size: int, step: int):
    """[(start, stop)] that cover [0, size) in steps."""
    return [(at, min(at + step, size)) for at in range(0, size, step)]


def _pieces(spec: _Spec):
    """The products of one k tile: (start, stop, quantization block, scale block) each."""
    q, t, tk = spec.q, spec.t, spec.t.tk
    cuts = {0, tk}
    if spec.block_k is not None:
        cuts.update(range(0, tk, spec.block_k))
    if q.scale_form == "blocks":
        cuts.update(range(0, tk, q.scale_block))
    if spec.dtypes[0] == np.float32 or t.tn == 1:
        cuts.update(range(0, tk, _PIECE_F32))
    cuts = sorted(cuts)
    return [
        (a, b, a // spec.block_k if spec.block_k else 0, a // q.scale_block if q.scale_block else 0)
        for a, b in itertools.pairwise(cuts)
    ]


def _absmax(values):
    """float32 [rows, 1], the largest magnitude of each row; NaN where a row has one."""
    columns = values.shape[1]
    # First over whole registers, as far as it goes: a register holds 128 columns of float32 or 256
    # of bf16 (of half the rows), and only the last one needs the slow reduction across lanes.
    width = _LANES * 4 // values.dtype.itemsize
    parts = [values[:, c0:c1] for c0, c1 in _ranges(columns, width)]
    odd = parts.pop() if columns % width else None
    tops = []
    if parts:
        top = _tree_max([jnp.abs(x) for x in parts]).astype(jnp.float32)
        tops.append(_tree_max([top[:, c0:c1] for c0, c1 in _ranges(width, _LANES)]))
    if odd is not None:
        tops.append(jnp.abs(odd.astype(jnp.float32)))
    return _tree_max([jnp.max(x, axis=1, keepdims=True) for x in tops])


def _tree_max(values):
    while len(values) > 1:
        half = len(values) // 2
        values = [jnp.maximum(values[i], values[half + i]) for i in range(half)] + values[
            2 * half :
        ]
    return values[0]


def _make_lhs(spec: _Spec, kt, refs, rows, block: int, columns):
    """Fills ``ready`` (and ``steps``) from some rows and columns of the lhs block."""
    q, t = spec.q, spec.t
    (r0, r1), (c0, c1) = rows, columns
    values = refs["lhs"][r0:r1, c0:c1]
    absmax = None
    if q.scale_form == "fold" or spec.masked:
        values = values.astype(jnp.float32)
    elif spec.block_k is not None and (values.dtype == np.float32 or spec.chip.bf16_vector):
        absmax = _absmax(values)
    if q.qdtype is not None:
        values = values.astype(jnp.float32)
    if q.scale_form == "fold":
        values = values * refs["rhs_scale"][0:1, c0:c1]
    if spec.masked:
        column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        left = _I(q.k - c0) - kt * _I(t.tk)
        values = jnp.where(column < left, values, np.float32(0))
    if spec.block_k is not None:
        absmax = _absmax(values) if absmax is None else absmax
        scale = numerics.block_scale(absmax, q.qdtype)
        refs["steps"][block, r0:r1, :] = jnp.broadcast_to(scale, (r1 - r0, _LANES))
        # Not block_inverse, which is 0 where the scale was replaced by 1: such values round to 0.
        values = values * (np.float32(1) / scale)
        if q.qdtype == np.int8:
            values = numerics.round_to(values, q.qdtype)
        else:
            # As round_to, whose clip changes nothing here: the absmax may exceed the maximum of the
            # type by a few units in the last place, and the conversion rounds it to the maximum.
            values = values.astype(q.qdtype)
    elif q.qdtype is not None:
        scale = numerics.fixed_scale(spec.bound, q.qdtype)
        values = numerics.round_to(values * (np.float32(1) / scale), q.qdtype)
    refs["ready"][r0:r1, c0:c1] = widen(values, spec.dtypes[0])


def _loop(size: int, step: int, body):
    """body(start, length) over [0, size): a loop, so that the code stays small, and the rest."""
    count = size // step
    if count == 1:
        body(0, step)
    elif count > 1:

        def one(i, carry):
            body(pl.multiple_of(i * _I(step), step), step)
            return carry

        jax.lax.fori_loop(_I(0), _I(count), one, _I(0))
    if size % step:
        body(count * step, size % step)


def _make_rhs(spec: _Spec, kt, refs):
    """Fills ``weights`` from the rhs block."""
    q, t = spec.q, spec.t
    full = q.scale_form == "full"
    rows, columns = (t.tn, t.tk) if q.transpose_rhs else (t.tk, t.tn)

    def block(r0, height, c0, width):
        at = (pl.ds(r0, height), pl.ds(c0, width))
        values = refs["rhs"][at]
        if full or spec.masked:
            values = values.astype(jnp.float32)
        if full:
            values = values * refs["rhs_scale"][at]
        if spec.masked:
            axis, first = (1, c0) if q.transpose_rhs else (0, r0)
            deep = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
            left = _I(q.k) - first - kt * _I(t.tk)
            values = jnp.where(deep < left, values, np.float32(0))
        refs["weights"][at] = widen(values, spec.dtypes[1])

    _loop(rows, 256, lambda r, h: _loop(columns, 512, lambda c, w: block(r, h, c, w)))


def _dot(spec: _Spec, kt, refs, piece, columns):
    """float32 [tm, columns]: the product of one piece of the contraction, its scales applied."""
    q, t = spec.q, spec.t
    lhs = refs["ready"] if spec.makes_lhs else refs["lhs"]
    rhs = refs["weights"] if spec.makes_rhs else refs["rhs"]
    (a, b, block, scale_block), (c0, c1) = piece, columns
    if q.transpose_rhs:
        part = dot(lhs[:, a:b], rhs[c0:c1, a:b], (((1,), (1,)), ((), ())), spec.chip)
    else:
        part = dot(lhs[:, a:b], rhs[a:b, c0:c1], (((1,), (0,)), ((), ())), spec.chip)
    if spec.block_k is not None:
        part = part * _across(refs["steps"][block], c1 - c0)
    if q.scale_form == "blocks":
        row = scale_block
        if spec.k_tiles > 1:  # the last k tile may have pieces past k, all zero
            row = kt * _I(t.tk // q.scale_block) + _I(scale_block)
            row = jnp.minimum(row, _I(q.k // q.scale_block - 1))
        part = part * refs["rhs_scale"][pl.ds(row, 1), c0:c1]
    return part


def _across(column, width: int):
    """[rows, width] of a column that stands in each of the 128 lanes of ``column``."""
    if width % _LANES:
        return jnp.broadcast_to(column[:, 0:1], (column.shape[0], width))
    return jnp.concatenate([column] * (width // _LANES), axis=1)


def _multiply(spec: _Spec, kt, refs, batch, last):
    """The products of some rows of a visit and one k tile, and their end in ``out``.

    A lhs that is quantized is made ready one block of the contraction ahead of the products that
    use it, a few rows before each product: so both stand side by side in the program, one for the
    vector unit and one for the MXU. ``acc`` takes the sums that live longer than one product.
    """
    t = spec.t
    pieces = _pieces(spec)
    columns = _ranges(t.tn, t.step)
    blocks = _ranges(t.tk, spec.block_k or t.tk)
    lead = [c for c in columns if c[1] <= spec.acc_columns]
    if spec.makes_lhs and not spec.ahead:
        for block, cut in enumerate(_ranges(t.tk, spec.block_k or min(t.tk, 1024))):
            for rows in _ranges(t.sub, _ROWS):
                _make_lhs(spec, kt, refs, rows, block, cut)
    if spec.ahead:
        slices = _ranges(t.sub, max(32, _up(-(-t.sub // max(len(lead), 1)), 32)))
        for rows in slices:
            _make_lhs(spec, kt, refs, rows, 0, blocks[0])
    if spec.k_tiles > 1:

        @pl.when(kt == _I(0))
        def _clear():
            refs["acc"][...] = jnp.zeros_like(refs["acc"])

    for block, (a, b) in enumerate(blocks if lead else []):
        todo = list(slices) if spec.ahead and block + 1 < len(blocks) else []
        for c0, c1 in lead:
            if todo:
                _make_lhs(spec, kt, refs, todo.pop(0), block + 1, blocks[block + 1])
            inside = [piece for piece in pieces if a <= piece[0] < b]
            parts = [_dot(spec, kt, refs, piece, (c0, c1)) for piece in inside]
            if block or spec.k_tiles > 1:
                parts.insert(0, refs["acc"][:, c0:c1])
            total = functools.reduce(jnp.add, parts)
            if spec.k_tiles == 1 and block + 1 == len(blocks):
                _finish(spec, batch, refs, total, (c0, c1))
            else:
                refs["acc"][:, c0:c1] = total
        for rows in todo:
            _make_lhs(spec, kt, refs, rows, block + 1, blocks[block + 1])
    for cut in columns[len(lead) :]:
        parts = [_dot(spec, kt, refs, piece, cut) for piece in pieces]
        _finish(spec, batch, refs, functools.reduce(jnp.add, parts), cut)
    if spec.k_tiles > 1:

        @pl.when(last)
        def _end():
            for c0, c1 in columns:
                _finish(spec, batch, refs, refs["acc"][:, c0:c1], (c0, c1))


def _finish(spec: _Spec, batch, refs, total, columns):
    """The out columns of a complete float32 sum."""
    c0, c1 = columns
    if spec.q.qdtype is not None and spec.block_k is None:
        total = total * numerics.fixed_scale(spec.bound, spec.q.qdtype)
    if spec.q.scale_form == "column":
        total = total * refs["rhs_scale"][0:1, c0:c1]
    if spec.row_scale:
        total = total * refs["row_column"][...]
    if spec.flat_scale:
        total = total * refs["flat_scale"][batch]
    refs["out"][:, c0:c1] = total.astype(spec.q.out_dtype)


def _kernel(spec: _Spec, names, *refs):
    refs = dict(zip(names, refs, strict=True))
    q, t = spec.q, spec.t
    table = _Table(spec, refs["table"])
    v, kt = pl.program_id(1), pl.program_id(2)
    p = table.group(v)
    before = jnp.maximum(v - _I(1), _I(0))
    p_before = table.group(before)
    unit = table.unit(v, p)
    own = table.own(v, p)
    fresh = jnp.logical_or(v == _I(0), unit != table.unit(before, p_before))
    tile = unit - table.get(_BATCH, p) * _I(spec.tiles)
    low = table.get(_START, p) - tile * _I(t.tm)
    high = table.get(_END, p) - tile * _I(t.tm)
    # Rows of the tile that exist; those past m are never stored.
    there = jnp.minimum(_I(q.m) - tile * _I(t.tm), _I(t.tm))
    whole = jnp.logical_and(low <= _I(0), high >= there)
    last = kt == _I(spec.k_tiles - 1)

    if spec.tail == "zero":

        @pl.when(jnp.logical_and(fresh, jnp.logical_and(jnp.logical_not(own & whole), last)))
        def _zero():
            refs["out"][...] = jnp.zeros((t.tm, t.tn), q.out_dtype)

    if spec.makes_rhs:
        changed = jnp.logical_or(v == _I(0), table.get(_RHS, p) != table.get(_RHS, p_before))
        if q.scale_form == "full":
            other = table.get(_SCALE, p) != table.get(_SCALE, p_before)
            changed = jnp.logical_or(changed, other)
        if spec.k_tiles > 1:
            changed = True

        @pl.when(jnp.logical_and(own, changed))
        def _weights():
            _make_rhs(spec, kt, refs)

    batch = table.get(_BATCH, p)

    def some_rows(start):
        """Rows [start, start + sub) of the tile."""
        here = pl.ds(start, t.sub)
        views = {name: refs[name].at[here, :] for name in ("lhs", "out")}
        if spec.row_scale:
            # The scales lie along the lanes; products have their rows along the sublanes.
            views["row_column"] = refs["row_column"].at[here, :]
        some = refs | views
        # Where other groups have rows, or tail="zero" put zeros, these come back afterwards.
        cut = jnp.logical_or(start < low, start + _I(t.sub) > jnp.minimum(high, there))
        if spec.tail != "zero":
            cut = jnp.logical_and(cut, jnp.logical_not(fresh))
        cut = jnp.logical_and(jnp.logical_and(cut, jnp.logical_not(whole)), last)

        @pl.when(cut)
        def _keep():
            refs["kept"][...] = some["out"][...]

        _multiply(spec, kt, some, batch, last)

        @pl.when(cut)
        def _restore():
            row = jax.lax.broadcasted_iota(jnp.int32, (t.sub, t.tn), 0) + start
            mine = jnp.logical_and(row >= low, row < high)
            some["out"][...] = _select(mine, some["out"][...], refs["kept"][...])

    @pl.when(own)
    def _visit():
        if spec.row_scale:
            refs["row_column"][...] = jnp.swapaxes(refs["row_scale"][...], 0, 1)
        if t.sub == t.tm:
            some_rows(0)
        else:
            # From a row that float8 packing allows; the last run is moved back into the tile.
            begin = jnp.bitwise_and(jnp.maximum(low, _I(0)), _I(-32))
            runs = jax.lax.div(jnp.minimum(high, there) - begin + _I(t.sub - 1), _I(t.sub))

            def run(i, carry):
                start = jnp.minimum(begin + i * _I(t.sub), _I(t.tm - t.sub))
                some_rows(pl.multiple_of(start, 32))
                return carry

            jax.lax.fori_loop(_I(0), runs, run, _I(0))


def _select(mask, a, b):
    """where(mask, a, b) by 32-bit selects, which every chip has."""
    dtype = a.dtype
    return jnp.where(mask, a.astype(jnp.float32), b.astype(jnp.float32)).astype(dtype)


# ---- the call --------------------------------------------------------------------------------


def _parts(x, full):
    """x cut in two along its first batch dim of more than one element."""
    axis = next(i for i, d in enumerate(full) if d > 1)
    half = full[axis] // 2

    def cut(a, lo, hi):
        if a is None or a.shape[axis] == 1:
            return a
        return jax.lax.slice_in_dim(a, lo, hi, axis=axis)

    fields = ("lhs", "lhs_scale", "rhs", "rhs_scale", "starts", "ends")
    values = [getattr(x, f) for f in fields]
    return axis, [
        _Operands(*(cut(a, lo, hi) for a in values)) for lo, hi in ((0, half), (half, full[axis]))
    ]


@dataclasses.dataclass(frozen=True)
class _Operands:
    lhs: jax.Array
    lhs_scale: jax.Array | None
    rhs: jax.Array
    rhs_scale: jax.Array | None
    starts: jax.Array
    ends: jax.Array


def gmm(x, p, *, chip: Chip, interpret=False) -> jax.Array:
    """out[b, r] = lhs[b, r] @ rhs[b, e] for the rows r in [starts[b, e], ends[b, e]).

    Args:
      x: GmmOperands: lhs [*B, m, k], lhs_scale None | f32 [*B, m | 1, 1], rhs [*B, g, k, n] or
        [*B, g, n, k], rhs_scale None | f32 [*B, 1 | g, s1, s2], starts and ends int32 [*B, g].
        Leading dims broadcast.
      p: GmmParams.
      chip: the target.
      interpret: False, or pltpu.InterpretParams().

    Returns:
      p.out_dtype [*B, m, n].
    """
    leads, full = _leads(x)
    batches = math.prod(full)
    m, k = x.lhs.shape[-2:]
    g = x.rhs.shape[-3]
    n = x.rhs.shape[-2] if p.transpose_rhs else x.rhs.shape[-1]
    out_dtype = np.dtype(p.out_dtype)
    if m == 0 or batches == 0 or g == 0:
        return jnp.zeros(full + (m, n), out_dtype)
    lhs, rhs = x.lhs, x.rhs
    # Not every chip has float16 arithmetic or conversions; float32 holds its values exactly.
    if lhs.dtype == jnp.float16:
        lhs = lhs.astype(jnp.float32)
    if rhs.dtype == jnp.float16:
        rhs = rhs.astype(jnp.float32)
    form, scale_block = None, 0
    if x.rhs_scale is not None:
        form, scale_block = _scale_form(x.rhs_scale.shape, k, n, p.transpose_rhs)
    qdtype = None if p.lhs_dtype is None else numerics.QDTYPES[p.lhs_dtype]
    per_block = qdtype is not None and p.lhs_bound is None
    q = Problem(
        m=m,
        k=k,
        n=n,
        g=g,
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_dtype=np.dtype(rhs.dtype),
        out_dtype=out_dtype,
        qdtype=qdtype,
        block_k=p.block_k if per_block else None,
        scale_form=form,
        scale_block=scale_block if form == "blocks" else 0,
        transpose_rhs=p.transpose_rhs,
        batches=batches,
        rows=None if p.expected_rows is None else -(-p.expected_rows // batches),
    )
    if batches > 1 and max_visits(batches, m, g, 256) + 8 * batches * g > _MAX_TABLE // 2:
        # The tables of so many batches do not fit SMEM together.
        axis, halves = _parts(x, full)
        return jnp.concatenate(
            [gmm(h, p, chip=chip, interpret=interpret) for h in halves], axis=axis
        )
    t = _choose(q, chip)
    flat = math.prod(x.lhs_scale.shape[-2:]) == 1 if x.lhs_scale is not None else False
    spec = _Spec(
        q=q,
        t=t,
        chip=chip,
        tail=p.tail,
        bound=p.lhs_bound,
        row_scale=x.lhs_scale is not None and not flat,
        flat_scale=flat,
        visits=max_visits(batches, m, g, t.tm),
    )

    # The table.
    rows = [jnp.broadcast_to(a, full + (g,)).reshape(batches, g) for a in (x.starts, x.ends)]
    visits = make_visits(*rows, m=m, tm=t.tm, gaps=p.tail == "zero")
    lhs_map = _batch_map(leads["lhs"], full)
    group = np.arange(g, dtype=np.int32)[None, :]
    rhs_map = _batch_map(leads["rhs"], full)[:, None] * _I(g) + group
    scale_map = np.zeros((batches, g), np.int32)
    if form is not None:
        per = x.rhs_scale.shape[-3]
        scale_map = _batch_map(leads["rhs_scale"], full)[:, None] * _I(per) + group * _I(per > 1)

    def column(values, first):
        values = np.broadcast_to(values, (batches, g)).reshape(-1)
        return np.concatenate([np.array([first], np.int32), values.astype(np.int32)])

    zero = np.zeros((1,), np.int32)
    batch = np.arange(batches, dtype=np.int32)[:, None]
    table = jnp.concatenate(
        [
            visits.group,
            visits.shift,
            visits.stop,
            column(batch, 0),
            jnp.concatenate([zero, rows[0].reshape(-1)]),
            jnp.concatenate([zero, rows[1].reshape(-1)]),
            column(lhs_map[:, None], 0),
            column(rhs_map, -1),  # no group: its weights are of none
            column(scale_map, 0),
        ]
    )

    # Blocks.
    operands, names, in_specs = [], [], []

    def add(name, array, block, index):
        """An operand with a pipelined block; ``index(table, n tile, visit, group, k tile)``."""

        def index_map(j, v, kt, ref, *_):
            tab = _Table(spec, ref)
            group = tab.group(v)
            return index(tab, j, v, group, tab.k_tile(kt, v, group))

        operands.append(array)
        names.append(name)
        in_specs.append(pl.BlockSpec(block, index_map))

    def of(tab, field, group):
        return jnp.maximum(tab.get(field, group), _I(0))

    add(
        "lhs",
        lhs.reshape(-1, m, k),
        (None, t.tm, t.tk),
        lambda tab, j, v, e, kt: (of(tab, _LHS, e), tab.lhs_tile(v, e), kt),
    )
    if p.transpose_rhs:
        rhs_block, rhs_index = (None, t.tn, t.tk), lambda i, j, kt: (i, j, kt)
    else:
        rhs_block, rhs_index = (None, t.tk, t.tn), lambda i, j, kt: (i, kt, j)
    add(
        "rhs",
        rhs.reshape((-1,) + rhs.shape[-2:]),
        rhs_block,
        lambda tab, j, v, e, kt: rhs_index(of(tab, _RHS, e), j, kt),
    )
    if form is not None:
        scale = _shaped_scale(x.rhs_scale, form, k, n, p.transpose_rhs)
        if form == "full":
            block, index = rhs_block, rhs_index
        elif form == "fold":
            block, index = (None, 1, t.tk), lambda i, j, kt: (i, _I(0), kt)
        else:
            block, index = (None, scale.shape[1], t.tn), lambda i, j, kt: (i, _I(0), j)
        add("rhs_scale", scale, block, lambda tab, j, v, e, kt: index(of(tab, _SCALE, e), j, kt))
    if spec.row_scale:
        # [tiles, 1, tm] takes 4 bytes a row; [m, 1] would be padded to a line of 128 values.
        scale = x.lhs_scale.astype(jnp.float32).reshape(-1, m)
        scale = jnp.pad(scale, ((0, 0), (0, spec.tiles * t.tm - m)))
        scale_of = _batch_map(leads["lhs_scale"], full)
        direct = np.array_equal(scale_of, lhs_map)
        if not direct:  # batched otherwise than lhs: one scale per batch index
            scale = jnp.take(scale, scale_of, axis=0)
        field = _LHS if direct else _BATCH
        add(
            "row_scale",
            scale.reshape(-1, spec.tiles, 1, t.tm),
            (None, None, 1, t.tm),
            lambda tab, j, v, e, kt: (of(tab, field, e), tab.lhs_tile(v, e), _I(0), _I(0)),
        )
    scalars, scalar_names = [table], ["table"]
    if spec.flat_scale:
        flat_scale = x.lhs_scale.astype(jnp.float32).reshape(-1)
        scalars.append(jnp.take(flat_scale, _batch_map(leads["lhs_scale"], full), axis=0))
        scalar_names.append("flat_scale")

    def out_index(j, v, kt, ref, *_):
        tab = _Table(spec, ref)
        return (*tab.split(tab.unit(v, tab.group(v))), j)

    scratch, scratch_names = [], []

    def hold(name, shape, dtype):
        scratch.append(pltpu.VMEM(shape, dtype))
        scratch_names.append(name)

    hold("kept", (t.sub, t.tn), out_dtype)
    if spec.makes_lhs:
        hold("ready", (t.sub, t.tk), spec.dtypes[0])
    if spec.block_k is not None:
        hold("steps", (-(-t.tk // spec.block_k), t.sub, _LANES), jnp.float32)
    if spec.makes_rhs:
        hold("weights", rhs_block[1:], spec.dtypes[1])
    if spec.row_scale:
        hold("row_column", (t.tm, 1), jnp.float32)
    if spec.acc_columns:
        hold("acc", (t.sub, spec.acc_columns), jnp.float32)

    expected = batches * m if p.expected_rows is None else p.expected_rows
    used = min(batches * g, math.prod(rhs.shape[:-2]), max(expected, 1))
    moved = expected * (k * lhs.dtype.itemsize + n * out_dtype.itemsize)
    moved += used * k * n * rhs.dtype.itemsize
    call = pl.pallas_call(
        functools.partial(_kernel, spec, scalar_names + names + ["out"] + scratch_names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(-(-n // t.tn), visits.count, spec.k_tiles),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, t.tm, t.tn), out_index),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((batches, m, n), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=chip.vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * expected * k * n, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
        name="fp8moe_gmm",
    )
    return call(*scalars, *operands).reshape(full + (m, n))
