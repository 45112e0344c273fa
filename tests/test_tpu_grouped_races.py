"""The grouped matmul kernels scaled down, under the interpreter's race detector."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from fp8moe_prims.gmm import GmmOperands, GmmParams
from fp8moe_prims.lowering.tpu import gmm, tgmm_quant
from fp8moe_prims.lowering.tpu.chip import CHIPS
from fp8moe_prims.lowering.xla import gmm as xla_gmm
from fp8moe_prims.lowering.xla import tgmm_quant as xla_tgmm_quant
from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams
from tests import races
from tests.helpers import assert_close

M, K, N, SIZES = 448, 256, 1024, (300, 0, 60)
_CHIPS = {  # with so little VMEM that a call has several tiles of everything
    name: dataclasses.replace(CHIPS[name], vmem_bytes=8 * 2**20) for name in ("v7x", "v5p")
}


def _operands():
    """Tokens, the same in float8, their row scale, weights, their scale, dout, starts, ends."""
    rng = np.random.RandomState(0)
    x, w, dout = rng.randn(M, K), rng.randn(len(SIZES), K, N) * 50, rng.randn(M, N)
    ends = np.cumsum(SIZES).astype(np.int32) + np.int32(7)
    starts = ends - np.array(SIZES, np.int32)
    shapes = (M, 1), (len(SIZES), 1, N)
    scales = [np.exp2(rng.randint(-2, 3, shape)).astype(np.float32) for shape in shapes]
    narrow = lambda y: jnp.asarray(y.astype(np.float32)).astype(jnp.float8_e4m3fn)
    x, dout = (jnp.asarray(y.astype(np.float32)).astype(jnp.bfloat16) for y in (x, dout))
    return x, narrow(np.asarray(x) * 50), scales[0], narrow(w), scales[1], dout, starts, ends


def _call(name):
    """(TPU lowering, XLA lowering, operands, params)."""
    x, saved, row_scale, weights, scale, dout, starts, ends = _operands()
    common = dict(out_dtype=np.dtype(np.float32))
    both = dict(starts=starts, ends=ends)
    if name.startswith("tgmm"):
        lowerings = tgmm_quant.tgmm_quant, xla_tgmm_quant.tgmm_quant
        common |= dict(dout_dtype="e5m2", block_m=256)
        if name == "tgmm saved fp8":
            operands = TgmmOperands(saved, dout, lhs_scale=row_scale, **both)
            return (*lowerings, operands, TgmmParams(lhs_dtype=None, **common))
        return (*lowerings, TgmmOperands(x, dout, **both), TgmmParams(lhs_dtype="e4m3", **common))
    lhs, quantized = {
        "gmm fp8": (saved, None),
        "gmm quantized": (x, "e4m3"),
        "dlhs": (dout, "e5m2"),
    }[name]
    p = GmmParams(
        transpose_rhs=name == "dlhs",
        lhs_dtype=quantized,
        block_k=256,
        lhs_bound=None,
        tail="zero",
        **common,
    )
    lhs_scale = None if quantized else row_scale
    operands = GmmOperands(lhs, weights, lhs_scale=lhs_scale, rhs_scale=scale, **both)
    return gmm.gmm, xla_gmm.gmm, operands, p


_NAMES = ("gmm fp8", "gmm quantized", "dlhs", "tgmm saved fp8", "tgmm both bf16")
_MANY = [("gmm fp8", "v5p"), ("gmm quantized", "v7x"), ("dlhs", "v5p")]
_MANY += [("tgmm saved fp8", "v5p"), ("tgmm both bf16", "v7x")]
_REST = [(name, chip) for name in _NAMES for chip in _CHIPS if (name, chip) not in _MANY]


class RacesTest(parameterized.TestCase):
    @parameterized.parameters(*_MANY)
    def test_none(self, name, chip):
        self._check(name, chip)

    @pytest.mark.sweep
    def test_none_in_the_others(self):
        for name, chip in _REST:
            with self.subTest(name=name, chip=chip):
                self._check(name, chip)

    def _check(self, name, chip):
        """No race, and right: as XLA's, on one core and, of a device that has two, on both."""
        ours, xla, x, p = _call(name)
        chip = _CHIPS[chip]
        interpret = races.params(num_cores_or_threads=chip.cores)
        with races.watched() as states:
            out = jax.jit(lambda x: ours(x, p, chip=chip, interpret=interpret))(x)
            out.block_until_ready()
        self.assertTrue(states)
        self.assertFalse(races.found(states))
        assert_close(out, jax.jit(lambda x: xla(x, p, platform="cpu"))(x), 2e-3)


if __name__ == "__main__":
    absltest.main()
