"""The primitives themselves, for those who write transformations or rules over them."""

from fp8moe_prims._primitive import OperandPrimitive as OperandPrimitive
from fp8moe_prims._primitive import define as define
from fp8moe_prims._primitive import registry as registry
from fp8moe_prims._primitive import unsupported as unsupported
from fp8moe_prims.gmm import GmmOperands as GmmOperands
from fp8moe_prims.gmm import GmmParams as GmmParams
from fp8moe_prims.gmm import gmm_p as gmm_p
from fp8moe_prims.tgmm_quant import TgmmOperands as TgmmOperands
from fp8moe_prims.tgmm_quant import TgmmParams as TgmmParams
from fp8moe_prims.tgmm_quant import tgmm_quant_p as tgmm_quant_p
