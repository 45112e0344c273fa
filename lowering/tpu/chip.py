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
      native_fp8: whether the MXU multiplies float8 operands. Elsewhere they are widened to bf16,
      widens_fp8: by the MXU itself, see dots.py.
      native_int8: whether the MXU multiplies int8 operands, at twice its rate for bf16.
      bf16_vector: whether the vector unit computes in bf16.
      cores: TensorCores of one JAX device; the figures are of one of them.
      hbm_bytes_per_cycle: HBM bandwidth of the core, in bytes per core clock cycle.
      mxu_flops_per_cycle: bf16 multiplies and adds (two each) of all MXUs of the core, per cycle.
      mxu_width: rows and columns of one MXU.
      mxus_in_hand: whether a kernel can order each MXU's steps itself (mxu.py), for float8.
      sparse_cores: SparseCores that serve one JAX device, 0 where there are none.
      subcores: vector subcores of a SparseCore.
      sparse_lanes: 32-bit lanes of a vector subcore.
    """

    name: str
    vmem_bytes: int
    native_fp8: bool
    widens_fp8: bool
    native_int8: bool
    bf16_vector: bool
    cores: int
    hbm_bytes_per_cycle: int
    mxu_flops_per_cycle: int
    mxu_width: int
    mxus_in_hand: bool = False
    sparse_cores: int = 0
    subcores: int = 0
    sparse_lanes: int = 0


CHIPS = {
    "v7x": Chip("v7x", 60 * _MIB, True, False, False, True, 1, 1680, 524288, 256, True, 2, 16, 16),
    "v6e": Chip("v6e", 112 * _MIB, False, True, True, True, 1, 930, 524288, 256, False, 2, 16, 8),
    "v5p": Chip("v5p", 60 * _MIB, False, True, True, False, 2, 700, 131072, 128, False, 4, 16, 8),
    "v5e": Chip("v5e", 112 * _MIB, False, True, True, False, 1, 540, 131072, 128),
}

# For an unknown target: the smallest VMEM of a chip we know of (16 MiB, v4), and no fp8 arithmetic.
SAFE = Chip("safe", 14 * _MIB, False, False, False, False, 1, 540, 131072, 128)

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
