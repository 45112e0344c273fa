"""Tile sizes of a gmm call, by an estimate of VMEM and cycles over a few candidates. Pure Python.

A call has tiles of tm rows, tn output columns and tk contraction elements, see gmm_kernel.py. Among
the candidates that fit the chip's VMEM the cheapest wins, by the larger of the MXU's, the vector
unit's and HBM's time plus what a grid step costs.
"""

import dataclasses
import functools
import math

import numpy as np

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.dots import dot_dtypes, is_fp8
from fp8moe_prims.lowering.tpu.layout import LANES, round_up
from fp8moe_prims.lowering.tpu.visits import max_visits

_MIB = 1 << 20
MAX_TABLE = 160_000  # int32 values of tables that a call may put into SMEM (1 MiB)
_AHEAD_COLUMNS = 2048  # columns whose products the quantization of a lhs is spread over
SUB = 256  # rows of one run through the program, more than that is a loop
ROWS = 128  # rows that are quantized or converted at a time
PIECE_F32 = 1024  # contraction elements of one float32 product


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
    scale_form: str | None = None  # None | "column" | "fold" | "blocks" | "full", see gmm.py
    scale_block: int = 0  # contraction elements of a block, for "blocks"
    transpose_rhs: bool = False
    batches: int = 1
    rows: int | None = None  # valid rows expected in one batch

    def dtypes(self, chip: Chip, tk: int):
        """(lhs, rhs) dtypes that the MXU is given, with k tiles of tk elements."""
        lhs = self.qdtype or (np.dtype(np.float32) if self.scale_form == "fold" else self.lhs_dtype)
        rhs = np.dtype(np.float32) if self.scale_form == "full" else self.rhs_dtype
        masked, rows = self.k % tk != 0, self.n if self.transpose_rhs else tk
        stored_lhs = self.qdtype is None and not masked and (self.m % 32 == 0 or self.m > SUB)
        return dot_dtypes(lhs, rhs, chip, (stored_lhs, not masked and rows % 32 == 0))

    @property
    def unit_k(self) -> int:
        """What a k tile must be a multiple of, so that no scale block is cut."""
        unit = self.block_k or LANES
        if self.scale_form == "blocks":
            unit = math.lcm(unit, self.scale_block)
        return unit


def _vmem_bytes(q: Problem, chip: Chip, tm: int, tn: int, tk: int, sub: int, step: int) -> int:
    """VMEM that a call with these tiles needs: blocks, scratch, and temporaries of one product."""
    ready, weights = q.dtypes(chip, tk)
    cut = tk < q.k  # several k tiles
    masked = cut and q.k % tk != 0
    rows, cols, deep = round_up(tm, 32), round_up(tn, LANES), round_up(tk, LANES)
    some = round_up(sub, 32)
    if q.transpose_rhs:
        rhs_elements = round_up(tn, 32) * deep
    else:
        rhs_elements = round_up(tk, 32) * cols
    total = 2 * rows * deep * q.lhs_dtype.itemsize
    total += 2 * rhs_elements * q.rhs_dtype.itemsize
    total += (2 * rows + some) * cols * q.out_dtype.itemsize  # with kept
    if q.qdtype is not None or q.scale_form == "fold" or q.lhs_dtype != ready or masked:
        total += some * deep * ready.itemsize
    if q.scale_form == "full" or q.rhs_dtype != weights or masked:
        total += rhs_elements * weights.itemsize
    total += some * round_up(acc_columns(q, tn, tk, step), LANES) * 4
    if q.block_k is not None:
        total += -(-tk // q.block_k) * some * LANES * 4
    if q.scale_form == "full":
        total += 2 * rhs_elements * 4
    elif q.scale_form == "fold":
        total += 2 * 8 * deep * 4
    elif q.scale_form == "blocks":
        total += 2 * round_up(q.k // q.scale_block, 8) * cols * 4
    else:
        total += 2 * 8 * cols * 4
    total += 2 * 8 * rows * 4 + rows * LANES * 4  # the row scale, and it as a column
    # Temporaries: a product and its sum; the f32 form of a quantization block; f32 splits.
    held = 2 * some * round_up(step, LANES) * 4
    held += min(some, ROWS) * min(deep, round_up(q.block_k or 1024, LANES)) * 4
    if q.rhs_dtype != weights:
        held += 256 * 512 * 4
    if ready == np.float32 or tn == 1:
        held += 2 * (some + round_up(step, LANES)) * min(deep, PIECE_F32) * 4
    return total + max(held, _kept_lhs(q, chip, tn, tk, sub, step)) + 2 * _MIB


def _kept_lhs(q: Problem, chip: Chip, tn: int, tk: int, sub: int, step: int) -> int:
    """Bytes of the lhs that stand in spilled registers while several column tiles are made.

    The compiler does so for MXUs of 128 columns, and with those of 256 for float32 and what is
    widened to bf16; else it reads the lhs from VMEM again.
    """
    ready, _ = q.dtypes(chip, tk)
    made = ready == np.float32 or ready != (q.qdtype or q.lhs_dtype)
    if tn <= LANES or (chip.mxu_width > LANES and not made):
        return 0
    # The contraction that all columns go through before the next part of it.
    by_block = q.block_k is not None and acc_columns(q, tn, tk, step) == tn
    deep = min(q.block_k, tk) if by_block else tk
    return round_up(sub, 32) * round_up(deep, LANES) * ready.itemsize


def acc_columns(q: Problem, tn: int, tk: int, step: int) -> int:
    if tk < q.k:
        return tn
    if q.block_k is None or q.block_k >= tk:
        return 0
    return min(tn, max(_AHEAD_COLUMNS // step, 1) * step)


def _cost(q: Problem, chip: Chip, tm: int, tn: int, tk: int, sub: int) -> float:
    """Cycles of a call, roughly: the larger of MXU and HBM time, and what a grid step costs.

    Of one core, where several share the tiles of columns.
    """
    rows = q.m if q.rows is None else min(q.rows, q.m)
    ready, weights = q.dtypes(chip, tk)
    native = ready == np.int8 or (chip.native_fp8 and is_fp8(ready))
    passes = 6.0 if ready == np.float32 else 0.5 if native else 1.0
    groups = max(min(q.g, rows), 1)
    all_tiles, k_tiles = -(-q.n // tn), -(-q.k // tk)
    n_tiles = -(-all_tiles // chip.cores)
    columns = q.n * n_tiles / all_tiles
    width = chip.mxu_width
    # A group fills its last rows up to sub; half of the groups lie across a tile's edge.
    runs = rows / sub + groups * (0.5 + 0.5 * (tm < q.m))
    visits = rows / tm + groups
    deep, wide = round_up(q.k, LANES), round_up(tn, width)
    # Loading the weights into the MXU costs as much as half of its width in rows.
    mxu = 2.0 * (sub + width / 2) * deep * wide * passes / chip.mxu_flops_per_cycle
    vector = 0.0
    if q.qdtype is not None or q.scale_form == "fold":
        vector = sub * deep * 5 / 4096
    if q.block_k is not None:
        vector += sub * wide * 2 * (-(-q.k // q.block_k)) / 4096
    cycles = runs * n_tiles * (max(mxu, vector) + 0.25 * min(mxu, vector) + 100)
    if q.rhs_dtype != weights:
        cycles += (groups if k_tiles == 1 else visits) * q.k * columns * weights.itemsize / 1024
    traffic = n_tiles * (rows + groups * tm / 2) * q.k * q.lhs_dtype.itemsize
    traffic += (groups if k_tiles == 1 else visits) * q.k * columns * q.rhs_dtype.itemsize
    traffic += rows * columns * q.out_dtype.itemsize
    hbm = traffic / chip.hbm_bytes_per_cycle
    # The weights of a group are fetched while the last tile of the one before it is handled.
    fetch = q.k * tn * q.rhs_dtype.itemsize / chip.hbm_bytes_per_cycle
    stall = groups * n_tiles * max(0.0, fetch - cycles / (visits * n_tiles))
    return max(cycles + stall, hbm) + 500.0 * visits * n_tiles * k_tiles


def _row_tiles(q: Problem, chip: Chip):
    """Candidates for tm."""
    sizes = [t for t in (1024, 512, 256, 128, 64, 32) if t < q.m]
    return ([q.m] if q.m <= SUB else []) + sizes


def _column_tiles(n: int):
    """Candidates for tn: n itself, and multiples of 128 that cut n into fairly even tiles."""
    sizes = {n}
    for parts in range(2, 65):
        tile = round_up(-(-n // parts), 256 if n >= 512 else LANES)
        if tile < n:
            sizes.add(tile)
    if n > LANES:
        sizes.add(LANES)
    return sorted(sizes, reverse=True)


def _depth_tiles(q: Problem):
    """Candidates for tk: the whole contraction, and multiples of the scale blocks."""
    sizes = {q.k}
    unit = q.unit_k
    for parts in range(2, 513):
        tile = round_up(-(-q.k // parts), unit)
        if tile < q.k:
            sizes.add(tile)
    if unit < q.k:
        sizes.add(unit)
    return sorted(sizes, reverse=True)


def table_length(q: Problem, tm: int) -> int:
    """int32 values of the tables of a call with row tiles of tm: one a visit, eight a group."""
    return max_visits(q.batches, q.m, q.g, tm) + 8 * q.batches * q.g


def fitting(q: Problem, chip: Chip, tk: int):
    """The tilings with k tiles of tk elements that fit VMEM and scalar memory."""
    for tm in _row_tiles(q, chip):
        for tn in _column_tiles(q.n):
            step = min(tn, 512)
            sub = SUB if tm > SUB and tk == q.k else tm
            vmem = _vmem_bytes(q, chip, tm, tn, tk, sub, step)
            if vmem <= chip.vmem_bytes and table_length(q, tm) <= MAX_TABLE:
                yield Tiles(tm, tn, tk, sub, step, vmem)


@functools.lru_cache(maxsize=1024)
def choose(q: Problem, chip: Chip) -> Tiles:
    for tk in _depth_tiles(q):
        cost = lambda t: _cost(q, chip, t.tm, t.tn, t.tk, t.sub)
        best = min(fitting(q, chip, tk), key=cost, default=None)
        if best is not None:
            return best  # fewer k tiles always win: each re-reads the weights for every visit
    if table_length(q, q.m) > MAX_TABLE:
        raise ValueError(
            f"fp8moe gmm: the tables of {q.batches * q.g} groups do not fit the scalar memory of a "
            f"{chip.name} core; take at most {MAX_TABLE // 10} groups in one call."
        )
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
    return choose(
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
