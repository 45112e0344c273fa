"""MXU steps: the stand-in that the interpreter has for them, and a kernel of them compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu import mxu, tgmm_quant
from fp8moe_prims.lowering.tpu.chip import CHIPS
from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams
from tests.helpers import TOPOLOGIES
from tools import _llo

_DEPTH = 2  # of 256


def _run(a, b, steps):
    """steps(mxus, a, b) -> [64, 256] in the interpreter."""

    def body(a_ref, b_ref, out_ref, *scratch):
        mxus = mxu.InterpretedMxus(*scratch)
        mxus.reset()
        out_ref[...] = steps(mxus, a_ref, b_ref)
        mxus.check(out_ref)

    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((64, 256), jnp.float32),
        scratch_shapes=mxu.InterpretedMxus.scratch_shapes(),
        interpret=pltpu.InterpretParams(),
    )
    return np.asarray(jax.jit(call)(a, b))


def _product(mxus, a, b, *, pushes=1, pushed=_DEPTH, popped=(0, 32)):
    """a @ b on the second MXU, row 64 of its results; right as it is."""
    for i in range(_DEPTH):
        depth = slice(i * 256, i * 256 + 256)
        if i < pushed:
            for _ in range(pushes):
                mxus.push(b[depth], 1, i % 2)
        mxus.multiply(a[:, depth], 1, i % 2, 64)
    out = {row: mxus.pop(1, 64 + row, 32) for row in popped}
    return jnp.concatenate([out.get(row, out[0]) for row in (0, 32)], axis=0)


class MxuTest(parameterized.TestCase):
    def setUp(self):
        rng = np.random.RandomState(0)
        a, b = rng.randn(64, 512), rng.randn(512, 256)
        self.a, self.b = (jnp.asarray(x.astype(np.float32)).astype("float8_e4m3fn") for x in (a, b))

    def test_product(self):
        want = np.asarray(self.a).astype(np.float32) @ np.asarray(self.b).astype(np.float32)
        np.testing.assert_allclose(_run(self.a, self.b, _product), want, atol=1e-4)

    @parameterized.parameters(dict(pushes=2), dict(pushed=1), dict(popped=(0,)))
    def test_mistakes(self, **mistake):
        """Weights pushed over others, weights never pushed, results left: NaN."""
        steps = lambda *args: _product(*args, **mistake)
        self.assertTrue(np.isnan(_run(self.a, self.b, steps)).all())

    def test_compiles(self):
        """Of both jax versions, which name the steps apart."""
        devices = topologies.get_topology_desc(TOPOLOGIES["v7x"], platform="tpu").devices[:1]
        place = jax.sharding.SingleDeviceSharding(devices[0])
        struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        p = TgmmParams(
            out_dtype=np.dtype(jnp.bfloat16),
            lhs_dtype="e4m3",
            dout_dtype="e5m2",
            dout_bound=None,
            block_m=256,
        )

        def call(lhs, dout, starts, ends):
            x = TgmmOperands(lhs=lhs, dout=dout, starts=starts, ends=ends)
            return tgmm_quant.tgmm_quant(x, p, chip=CHIPS["v7x"])

        rows, ends = struct((2048, 512), jnp.bfloat16), struct((4,), jnp.int32)
        lowered = jax.jit(call).lower(rows, rows, ends, ends)
        [(_, kernel)] = _llo.mosaic(lowered.as_text())
        self.assertIn("tpu.matmul_pop", kernel)
        lowered.compile()


if __name__ == "__main__":
    absltest.main()
