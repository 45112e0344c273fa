"""Tiles of a tgmm_quant call, by an estimate of VMEM and cycles. Pure Python."""

import dataclasses
import math

import numpy as np

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES, round_up

ALIGN = 32  # rows of the widest packing (four float8 rows in each 32-bit word, eight sublanes)
SHORT = 256  # slab rows of a short block
TAIL = 128  # slab rows of a short block that goes with the one before it
CHUNK = 512  # rows and columns of the output that one product makes, at most


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
      vmem: the estimate, in bytes.
    """

    block: int
    window: int
    tail: bool
    resident_b: bool
    ts: int
    tr: int
    slots: int
    vmem: int

    @property
    def rows(self) -> int:
        """Rows of a slab."""
        return self.block + TAIL * self.tail

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


def chunk_width(width: int, limit: int) -> int:
    """The largest divisor of ``width`` that is a multiple of 128 and at most ``limit``."""
    whole = width // LANES
    return max(d for d in range(1, whole + 1) if whole % d == 0 and d * LANES <= limit) * LANES


def choose_tiles(
    m, p, q, groups, block_m, a_bytes, b_bytes, slab_bytes, out_dtype, rows, scales, chip: Chip
) -> Tiles | None:
    """The cheapest tiles that fit the chip's VMEM by an estimate, or None.

    Args:
      m, p, q, groups: rows, output rows, output columns, groups.
      block_m: rows that share a scale, or None where no scale depends on the rows.
      a_bytes, b_bytes: bytes per element of the operands in HBM.
      slab_bytes: bytes per element in the slabs, of both operands.
      out_dtype: the output's dtype.
      rows: rows expected to be valid.
      scales: whether a and whether b have scales of their own per row block.
      chip: the target.
    """
    out_bytes = np.dtype(out_dtype).itemsize
    blocks = (block_m,) if block_m is not None else (1024, 512, 256, 128)
    blocks = sorted({min(b, round_up(m, ALIGN)) for b in blocks}, reverse=True)
    budget = int(chip.vmem_bytes * 0.92)
    best = None
    for block in blocks:
        accumulate = m > block and np.dtype(out_dtype) != np.float32
        per_group = max(1, math.ceil(rows / max(groups, 1) / block))
        for resident_b in (True, False):
            s_width, r_width = (p, q) if resident_b else (q, p)
            s_bytes, r_bytes = (a_bytes, b_bytes) if resident_b else (b_bytes, a_bytes)
            for tr in _widths(r_width, 8192):
                for ts in _widths(s_width, 8192):
                    tp, tq = (ts, tr) if resident_b else (tr, ts)
                    if ts >= s_width and tr < r_width:
                        continue  # the roles exchanged do the same
                    tail = round_up(m, ALIGN) >= block + TAIL
                    window = block + TAIL if tail else min(block + ALIGN, round_up(m, ALIGN))
                    slab_rows = block + TAIL * tail
                    fixed = 2 * window * (ts * s_bytes + tr * r_bytes)
                    fixed += 2 * slab_rows * ts * slab_bytes
                    fixed += 2 * tp * tq * out_bytes + (tp * tq * 4 if accumulate else 0)
                    # one product and its operands as Mosaic may spell them out
                    chunk = chunk_width(tp, CHUNK) * chunk_width(tq, CHUNK)
                    part = (chunk_width(tp, CHUNK) + chunk_width(tq, CHUNK)) * block * slab_bytes
                    fixed += 3 * 4 * chunk + (3 if slab_bytes == 4 else 1) * part
                    fixed += (window + 2 * LANES) * 4 * LANES + (1 << 20)
                    a_column = 2 * tp * LANES * 4 if scales[0] else 0
                    b_row = 2 * tq * 8 * 4 if scales[1] else 0
                    fixed += 2 * (a_column if resident_b else b_row)
                    slot = slab_rows * tr * slab_bytes + (b_row if resident_b else a_column)
                    fixed += slot  # the stage
                    slots = min((budget - fixed) // slot, max(2, round_up(m, block) // block), 16)
                    if slots < 2:
                        continue
                    n_s, n_r = -(-s_width // ts), -(-r_width // tr)
                    r_reads = 1 if per_group <= slots else n_s
                    # cycles: the vector unit quantizes, the MXU multiplies, HBM carries
                    vector = rows * (s_width * n_r + r_width * r_reads) / 400
                    mxu = 2 * rows * n_s * ts * n_r * tr / chip.mxu_flops_per_cycle
                    hbm = (
                        rows * (s_width * n_r * s_bytes + r_width * r_reads * r_bytes)
                        + groups * p * q * out_bytes
                    ) / chip.hbm_bytes_per_cycle
                    visits = (per_group * groups) * n_s * n_r
                    cost = max(vector, hbm) + mxu + visits * 1000
                    cost += visits * tp * tq / 512  # the accumulator's loads and stores
                    key = (cost, -ts * tr)
                    if best is None or key < best[0]:
                        sizes = ts, tr, int(slots), int(fixed + slots * slot)
                        best = key, Tiles(block, window, tail, resident_b, *sizes)
    return None if best is None else best[1]
