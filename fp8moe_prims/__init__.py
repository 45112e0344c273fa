"""fp8 mixture-of-experts training in JAX: its operations as real primitives.

>>> import fp8moe_prims as fp8
"""

import os as _os

# In a checkout the package ``lowering`` lies beside this one; in a wheel, inside it.
if not _os.path.isdir(_os.path.join(__path__[0], "lowering")):
    __path__.append(_os.path.dirname(__path__[0]))

from fp8moe_prims import moe as moe
from fp8moe_prims import primitives as primitives
from fp8moe_prims._primitive import use_lowering as use_lowering
from fp8moe_prims.debug import DataError as DataError
from fp8moe_prims.debug import debug_checks as debug_checks
from fp8moe_prims.gmm import gmm as gmm
from fp8moe_prims.qarray import QArray as QArray
from fp8moe_prims.qarray import quantize as quantize
from fp8moe_prims.ragged_gather import ragged_gather as ragged_gather
from fp8moe_prims.ragged_gather_reduce import ragged_gather_reduce as ragged_gather_reduce
from fp8moe_prims.ragged_glu import ragged_glu as ragged_glu
from fp8moe_prims.recipe import QuantRecipe as QuantRecipe
from fp8moe_prims.ring_all_gather import ring_all_gather as ring_all_gather
from fp8moe_prims.ring_reduce_scatter import ring_reduce_scatter as ring_reduce_scatter
from fp8moe_prims.tgmm_quant import tgmm_quant as tgmm_quant
from fp8moe_prims.version import __version__ as __version__
