"""The primitives themselves, for those who write transformations or rules over them."""

from fp8moe_prims._primitive import OperandPrimitive as OperandPrimitive
from fp8moe_prims._primitive import define as define
from fp8moe_prims._primitive import registry as registry
from fp8moe_prims._primitive import unsupported as unsupported
from fp8moe_prims.gmm import GmmOperands as GmmOperands
from fp8moe_prims.gmm import GmmParams as GmmParams
from fp8moe_prims.gmm import gmm_p as gmm_p
from fp8moe_prims.ragged_gather import RaggedGatherOperands as RaggedGatherOperands
from fp8moe_prims.ragged_gather import RowsParams as RowsParams
from fp8moe_prims.ragged_gather import ragged_gather_p as ragged_gather_p
from fp8moe_prims.ragged_gather_dot import RaggedGatherDotOperands as RaggedGatherDotOperands
from fp8moe_prims.ragged_gather_dot import ragged_gather_dot_p as ragged_gather_dot_p
from fp8moe_prims.ragged_gather_reduce import (
    RaggedGatherReduceOperands as RaggedGatherReduceOperands,
)
from fp8moe_prims.ragged_gather_reduce import ragged_gather_reduce_p as ragged_gather_reduce_p
from fp8moe_prims.ragged_glu import RaggedGluOperands as RaggedGluOperands
from fp8moe_prims.ragged_glu import RaggedGluParams as RaggedGluParams
from fp8moe_prims.ragged_glu import ragged_glu_p as ragged_glu_p
from fp8moe_prims.ragged_scatter_add import RaggedScatterAddOperands as RaggedScatterAddOperands
from fp8moe_prims.ragged_scatter_add import ScatterParams as ScatterParams
from fp8moe_prims.ragged_scatter_add import ragged_scatter_add_p as ragged_scatter_add_p
from fp8moe_prims.ring_all_gather import RingAllGatherOperands as RingAllGatherOperands
from fp8moe_prims.ring_all_gather import RingParams as RingParams
from fp8moe_prims.ring_all_gather import ring_all_gather_p as ring_all_gather_p
from fp8moe_prims.ring_reduce_scatter import (
    RingReduceScatterOperands as RingReduceScatterOperands,
)
from fp8moe_prims.ring_reduce_scatter import ring_reduce_scatter_p as ring_reduce_scatter_p
from fp8moe_prims.tgmm_quant import TgmmOperands as TgmmOperands
from fp8moe_prims.tgmm_quant import TgmmParams as TgmmParams
from fp8moe_prims.tgmm_quant import tgmm_quant_p as tgmm_quant_p
