"""``QuantRecipe``: what is quantized, to what, and where."""

import dataclasses
from typing import Literal

from fp8moe_prims.qarray import parse_calibration, qdtype_name


@dataclasses.dataclass(frozen=True)
class QuantRecipe:
    """How a grouped matmul and its gradients quantize.

    A dtype of None means not quantized. An operand that already is a QArray is used as it is.

    Attributes:
      act_dtype: of lhs, quantized inside the kernel per (row x block_k of the contraction); in the
        weight gradient per (row block x channel). "e4m3", "e5m2", "int8" or None.
      weight_dtype: of rhs, quantized outside the kernel per (expert x output channel).
      grad_dtype: of the output's cotangent, inside both backward kernels: "e5m2", "e4m3" or None.
      act_calibration, weight_calibration, grad_calibration: "absmax", "fixed,-b,b" or "fixed,b".
      backward: "in_kernel", or "dense": the cotangent and the activation are quantized by XLA ops
        over the whole buffer before the kernels; slower, the reference to compare with.
      block_m: rows of a group that share a scale in the weight gradient, a multiple of 128.
      block_k: elements of the contraction that share a scale in a row, a multiple of 128.

    Raises:
      ValueError: a field holds something else.

    >>> import fp8moe_prims as fp8
    >>> fp8.QuantRecipe(grad_dtype="e4m3").backward
    'in_kernel'
    """

    act_dtype: str | None = "e4m3"
    weight_dtype: str | None = "e4m3"
    grad_dtype: Literal["e5m2", "e4m3"] | None = "e5m2"
    act_calibration: str = "absmax"
    weight_calibration: str = "absmax"
    grad_calibration: str = "absmax"
    backward: Literal["in_kernel", "dense"] = "in_kernel"
    block_m: int = 1024
    block_k: int = 512

    def __post_init__(self):
        for field in ("act_dtype", "weight_dtype", "grad_dtype"):
            value = getattr(self, field)
            if value is not None:
                allowed = ("e5m2", "e4m3") if field == "grad_dtype" else ("e4m3", "e5m2", "int8")
                object.__setattr__(self, field, qdtype_name(field, value, allowed))
        for field in ("act_calibration", "weight_calibration", "grad_calibration"):
            parse_calibration(field, getattr(self, field))
        if self.backward not in ("in_kernel", "dense"):
            raise ValueError(f"backward: must be 'in_kernel' or 'dense', got {self.backward!r}")
        check_block("block_m", self.block_m)
        check_block("block_k", self.block_k)


def check_block(name: str, block) -> None:
    """Raises ValueError unless block is a positive multiple of 128."""
    if not isinstance(block, int) or isinstance(block, bool) or block <= 0 or block % 128:
        raise ValueError(f"{name}: must be a positive multiple of 128, got {block!r}")


UNQUANTIZED = QuantRecipe(act_dtype=None, weight_dtype=None, grad_dtype=None)
