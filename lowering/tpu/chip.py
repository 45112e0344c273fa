"""What the kernels need to know of a TPU core. Pure Python: it must import on any host.

A lowering learns the device kind from what is being compiled for, never from the local device, so
that ahead-of-time compilation picks the tiles of the target. Where nothing says (export), SAFE
holds figures that every supported chip can honour.
"""

import dataclasses

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore as a kernel sees it.

    Attributes:
      name: short name, as in "v7x".
      vmem_bytes: what one kernel may claim of VMEM (its ``vmem_limit_bytes``), in bytes; a little
        less than the hardware has, because the compiler keeps some for itself.
      hbm_bytes_per_cycle: HBM bandwidth of the core, in bytes per core clock cycle.
      mxu_flops_per_cycle: bf16 multiplies and adds (two each) of all MXUs of the core, per cycle.
      mxu_width: rows and columns of one MXU.
      cores: TensorCores of one JAX device; the other figures are of one of them.
      native_fp8: whether the MXU multiplies float8 operands. Elsewhere they are widened to bf16.
      widens_fp8: whether the MXU itself widens them, see dots.py.
      native_int8: whether the MXU multiplies int8 operands, at twice its rate for bf16.
      bf16_vector: whether the vector unit computes in bf16.
      mxus_in_hand: whether a kernel can order each MXU's steps itself (mxu.py), for float8.
      sparse_cores: SparseCores that serve one JAX device, 0 where there are none.
      subcores: vector subcores of a SparseCore.
      sparse_lanes: 32-bit lanes of a vector subcore.
    """

    name: str
    vmem_bytes: int
    hbm_bytes_per_cycle: int
    mxu_flops_per_cycle: int
    mxu_width: int
    cores: int = 1
    native_fp8: bool = False
    widens_fp8: bool = False
    native_int8: bool = False
    bf16_vector: bool = False
    mxus_in_hand: bool = False
    sparse_cores: int = 0
    subcores: int = 0
    sparse_lanes: int = 0


_OLDER = dict(widens_fp8=True, native_int8=True)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v7x",
            vmem_bytes=60 * _MIB,
            hbm_bytes_per_cycle=1680,
            mxu_flops_per_cycle=524288,
            mxu_width=256,
            native_fp8=True,
            bf16_vector=True,
            mxus_in_hand=True,
            sparse_cores=2,
            subcores=16,
            sparse_lanes=16,
        ),
        Chip(
            "v6e",
            vmem_bytes=112 * _MIB,
            hbm_bytes_per_cycle=930,
            mxu_flops_per_cycle=524288,
            mxu_width=256,
            bf16_vector=True,
            sparse_cores=2,
            subcores=16,
            sparse_lanes=8,
            **_OLDER,
        ),
        Chip(
            "v5p",
            vmem_bytes=60 * _MIB,
            hbm_bytes_per_cycle=700,
            mxu_flops_per_cycle=131072,
            mxu_width=128,
            cores=2,
            sparse_cores=4,
            subcores=16,
            sparse_lanes=8,
            **_OLDER,
        ),
        Chip(
            "v5e",
            vmem_bytes=112 * _MIB,
            hbm_bytes_per_cycle=540,
            mxu_flops_per_cycle=131072,
            mxu_width=128,
            **_OLDER,
        ),
    )
}

# For an unknown target: the smallest VMEM of a chip we know of (16 MiB, v4), and no fp8 arithmetic.
SAFE = Chip(
    "safe",
    vmem_bytes=14 * _MIB,
    hbm_bytes_per_cycle=540,
    mxu_flops_per_cycle=131072,
    mxu_width=128,
)

# Device kinds as JAX spells them, the older and newer spellings of each.
_KINDS = {
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
    "TPU v7": "v7x",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
}


def chip_of(device_kind: str | None) -> Chip:
    """The chip of a JAX ``device_kind`` such as "TPU7x"; SAFE for None or an unknown kind."""
    if device_kind is None:
        return SAFE
    name = _KINDS.get(device_kind.strip())
    return SAFE if name is None else CHIPS[name]
