"""Tiles of a tgmm_quant call, by an estimate of VMEM and cycles. Pure Python."""

import dataclasses
import itertools
import math

import numpy as np

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, round_up

ALIGN = 32  # rows of the widest packing (four float8 rows in each 32-bit word, eight sublanes)
SHORT = 256  # slab rows of a short block
TAIL = 128  # slab rows of a short block that goes with the one before it
STRIP = 256  # columns that are quantized at a time, mostly
MXU_COLUMNS = 512  # columns of the output that fill the MXUs of a core
MAX_TABLE = 22000  # visits of one call: of each up to eleven int32 values lie in SMEM, 1 MiB


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one call is cut: see the module docstring.

    Attributes:
      block: rows of a row block, and of a slab (a multiple of 32).
      window: rows fetched for it; ``block`` where that is the whole array.
      tail: whether a window and a slab have room for a short block after the full one.
      resident_b: whether R is the operand b (the output's columns), else a.
      ts, tr: columns of a tile of S and of R.
      slots: row blocks in the R slab.
      product: rows and columns of the output that one product makes.
      cores: how many cores of the device share S's columns, each the tiles of an equal part.
      pipelined: whether the kernel has the MXUs in hand, see tgmm_product.py.
      vmem: the estimate, in bytes.
    """

    block: int
    window: int
    tail: bool
    resident_b: bool
    ts: int
    tr: int
    slots: int
    product: tuple[int, int]
    cores: int
    pipelined: bool
    vmem: int

    @property
    def rows(self) -> int:
        """Rows of a slab."""
        return self.block + TAIL * self.tail

    @property
    def products(self) -> int:
        """Products of an output tile."""
        cp, cq = self.product
        return (self.tp // cp) * (self.tq // cq)

    @property
    def chunk(self) -> int:
        """Rows of the output that the MXUs work on at a time, of ``product`` rows.

        Their results hold two such chunks, a short block's results apart.
        """
        return _divisor(self.product[0], 256)

    @property
    def tp(self) -> int:
        return self.ts if self.resident_b else self.tr

    @property
    def tq(self) -> int:
        return self.tr if self.resident_b else self.ts


def _widths(width: int, limit: int):
    """Tile widths for an operand of ``width`` columns: multiples of 128 that waste little."""
    whole = round_up(width, LANES) // LANES
    seen = set()
    for count in range(1, whole + 1):
        lanes = -(-whole // count)
        if lanes > 2 and lanes % 2:  # pairs of 128 fill an MXU
            lanes += 1
        lanes = min(lanes, whole)
        if lanes not in seen and lanes * LANES <= limit:
            seen.add(lanes)
            yield lanes * LANES


def _divisor(width: int, limit: int) -> int:
    """The largest divisor of a width that is a multiple of 32 and at most ``limit``."""
    return max(d for d in range(32, limit + 1, 32) if width % d == 0)


def _pipelined_shape(tp: int, tq: int) -> tuple[int, int] | None:
    """Rows and columns of the blocks of a pipelined product, an even number of them; or None.

    A block takes all columns that the MXUs of a core have weights for.
    """
    for cp in range(min(tp, 1024), 127, -LANES):
        if tp % cp == 0 and tq % MXU_COLUMNS == 0 and (tp // cp) * (tq // MXU_COLUMNS) % 2 == 0:
            return cp, MXU_COLUMNS
    return None


def _product_shape(tp: int, tq: int, limit: int) -> tuple[int, int]:
    """Rows and columns of one product: equal parts of a tile, two or more of them if it has 256.

    A product is a program of its own, whose ends leave the MXU idle for some 250 cycles: it should
    be large: ``limit`` rows and columns, at most.
    """

    def part(width, limit, units):
        whole = width // LANES
        parts = [d for d in range(1, whole + 1) if whole % d == 0 and d * LANES <= limit]
        for unit in units:
            if fitting := [d for d in parts if d * LANES % unit == 0]:
                return fitting[-1] * LANES
        raise ValueError(f"{width} columns have no part of at most {limit}")

    columns = (MXU_COLUMNS, MXU_COLUMNS // 2, LANES)
    cp, cq = part(tp, limit, (LANES,)), part(tq, limit, columns)
    if (cp, cq) == (tp, tq):
        if cq > cp or cp == LANES:
            cq = part(tq, max(tq // 2, LANES), columns)
        else:
            cp = part(tp, max(tp // 2, LANES), (LANES,))
    return cp, cq


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the choice depends on, beside the chip.

    Attributes:
      m, p, q, groups: rows, output rows, output columns, groups.
      block_m: rows that share a scale, or None where no scale depends on the rows.
      a_bytes, b_bytes: bytes per element of the operands in HBM.
      slab_bytes: bytes per element in the slabs, of the operand that has more.
      out_dtype: the output's dtype.
      rows: rows expected to be valid.
      scales: whether a and whether b have scales of their own per row block.
      batches: batch elements, which the groups belong to.
      mxus: whether the slabs are float8 on a chip whose MXUs a kernel can have in hand.
    """

    m: int
    p: int
    q: int
    groups: int
    block_m: int | None
    a_bytes: int
    b_bytes: int
    slab_bytes: int
    out_dtype: object
    rows: int
    scales: tuple[bool, bool]
    batches: int = 1
    mxus: bool = False

    @property
    def whole(self) -> int:
        """Rows of the array, in whole tiles."""
        return round_up(self.m, ALIGN)

    @property
    def out_bytes(self) -> int:
        return np.dtype(self.out_dtype).itemsize

    def widths(self, resident_b: bool):
        """(columns, bytes per element) of S and of R."""
        a, b = (self.p, self.a_bytes), (self.q, self.b_bytes)
        return (a, b) if resident_b else (b, a)


def _candidates(x: Problem):
    """(block, resident_b, ts, tr, rows and columns of a product at most): all that is looked at."""
    limits = (1024,) if x.slab_bytes == 1 else (1024, 512)
    blocks = (x.block_m,) if x.block_m is not None else (1024, 512, 256, 128)
    for block in sorted({min(b, x.whole) for b in blocks}, reverse=True):
        for resident_b in (True, False):
            (s_width, _), (r_width, _) = x.widths(resident_b)
            for tr, ts in itertools.product(_widths(r_width, 8192), _widths(s_width, 8192)):
                if ts < s_width or tr >= r_width:  # else the roles exchanged do the same
                    for limit in limits:
                        yield block, resident_b, ts, tr, limit


def _cores(chip: Chip, s_width: int, r_width: int, ts: int, tr: int) -> int:
    """How many cores share S's columns: all that the device has, or one."""
    share = ts * chip.cores
    # With one S tile for each core, S's window would stay, cleaned, while R's tiles change.
    moves = share < s_width or tr >= r_width
    return chip.cores if s_width % share == 0 and moves else 1


def _fit(x: Problem, chip: Chip, block, resident_b, ts, tr, limit) -> Tiles | None:
    """The tiles of a candidate with as many slots as fit, or None."""
    budget = int(chip.vmem_bytes * 0.955)
    (s_width, s_bytes), (r_width, r_bytes) = x.widths(resident_b)
    tp, tq = (ts, tr) if resident_b else (tr, ts)
    tail = x.whole >= block + TAIL
    window = block + TAIL if tail else min(block + ALIGN, x.whole)
    slab_rows = block + TAIL * tail
    accumulate = x.m > block and np.dtype(x.out_dtype) != np.float32
    fixed = 2 * window * (ts * s_bytes + tr * r_bytes)
    fixed += 2 * slab_rows * ts * x.slab_bytes
    fixed += 2 * tp * tq * x.out_bytes + (tp * tq * 4 if accumulate else 0)
    shape = _pipelined_shape(tp, tq) if x.mxus and tail and block % SHORT == 0 else None
    # one product and its operands as Mosaic may spell them out
    cp, cq = shape or _product_shape(tp, tq, limit)
    product = 4 * cp * cq
    product += (3 if x.slab_bytes == 4 else 1) * (cp + cq) * block * x.slab_bytes
    # or, where it is small, the float32 strips of 128 columns that are quantized together
    fixed += max(product, 6 * block * LANES * 4)
    fixed += (window + 2 * LANES) * 4 * LANES + (5 << 18)
    a_column = 2 * tp * LANES * 4 if x.scales[0] else 0
    b_row = 2 * tq * 8 * 4 if x.scales[1] else 0
    fixed += 2 * (a_column if resident_b else b_row)
    slot = slab_rows * tr * x.slab_bytes + (b_row if resident_b else a_column)
    slots = int(min((budget - fixed) // slot, max(2, round_up(x.m, block) // block), 16))
    if slots < 2:
        return None
    return Tiles(
        block=block,
        window=window,
        tail=tail,
        resident_b=resident_b,
        ts=ts,
        tr=tr,
        slots=slots,
        product=(cp, cq),
        cores=_cores(chip, s_width, r_width, ts, tr),
        pipelined=shape is not None,
        vmem=int(fixed + slots * slot),
    )


def _cost(x: Problem, t: Tiles, chip: Chip) -> float:
    """Cycles of a core in a call: the vector unit quantizes, the MXU multiplies, HBM carries."""
    (s_width, s_bytes), (r_width, r_bytes) = x.widths(t.resident_b)
    s_width //= t.cores
    per_group = max(1, math.ceil(x.rows / max(x.groups, 1) / t.block))
    n_s, n_r = -(-s_width // t.ts), -(-r_width // t.tr)
    visits = (per_group * x.groups) * n_s * n_r
    r_reads = 1 if per_group <= t.slots else n_s
    # Each turn of the products takes equally many strips of both operands, the last ones again.
    turns = max(t.products // 2, 1)
    widths = t.ts, t.tr if n_s == 1 or r_reads > 1 else -(-t.tr // (n_s - 1))
    scaled = x.scales if t.resident_b else x.scales[::-1]
    as_is = 0.2 if x.slab_bytes == 1 else 0.7  # of the work
    columns = sum(
        turns * -(-width // (turns * STRIP)) * STRIP * (1.0 if work else as_is)
        for width, work in zip(widths, scaled, strict=True)
    )
    vector = visits * t.block * columns / (400 if x.slab_bytes == 1 else 300)
    _, cq = t.product
    mxu = 2 * x.rows * n_s * t.ts * n_r * t.tr / chip.mxu_flops_per_cycle
    mxu *= round_up(cq, MXU_COLUMNS) / cq
    moved = x.rows * (s_width * n_r * s_bytes + r_width * r_reads * r_bytes)
    moved += x.groups * s_width * r_width * x.out_bytes
    hbm = moved * (1 if t.cores > 1 else 1 / chip.cores) / chip.hbm_bytes_per_cycle
    cost = max(vector, hbm) + mxu + visits * (1000 + t.products * (0 if t.pipelined else 250))
    return cost + visits * t.tp * t.tq / 512  # the accumulator's loads and stores


def most_visits(x: Problem, t: Tiles) -> int:
    """Visits of a core that the groups of one batch element have at most, however long they are."""
    tiles = -(-x.p // t.tp) * -(-x.q // t.tq) // t.cores
    return tiles * (x.m // t.block + x.groups // x.batches)


def fitting(x: Problem, chip: Chip) -> list[Tiles]:
    """The tilings that fit VMEM, the best by the estimate first.

    Where all have too many visits for the tables of one call, those with the fewest come first.
    """

    def key(t):
        visits = most_visits(x, t)
        return visits if visits > MAX_TABLE else 0, _cost(x, t, chip), -t.ts * t.tr

    tilings = (_fit(x, chip, *cut) for cut in _candidates(x))
    return sorted((t for t in tilings if t is not None), key=key)


def choose_tiles(x: Problem, chip: Chip) -> Tiles | None:
    """The cheapest tiling that fits the chip's VMEM by an estimate, or None."""
    return next(iter(fitting(x, chip)), None)
