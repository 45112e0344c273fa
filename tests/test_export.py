"""jax.export for three platforms from this CPU host, and ahead-of-time compilation per chip."""

import itertools
import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental import topologies

import fp8moe_prims as fp8
from tests import cases, helpers
from tests.helpers import TOPOLOGIES

SHAPES = (
    (4096, 7168, 2048, 8),
    (4096, 2048, 7168, 8),
    (200, 96, 160, 3),
    (1024, 2880, 2880, 4),
    (512, 5120, 1536, 16),
)


# Each chip, in a minute or two; the sweep has all pairs.
QUICK = [("v7x", SHAPES[0]), ("v6e", SHAPES[2]), ("v5p", SHAPES[3]), ("v5e", SHAPES[4])]


def compile_for(topology, fn, *args):
    """fn compiled ahead of time for one chip of the topology."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[:1]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    place = jax.NamedSharding(mesh, jax.P())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
    return jax.jit(fn).lower(*args).compile()


def _step(recipe):
    """Forward and both gradients; the cotangent is an argument."""

    def step(lhs, rhs, sizes, dout):
        out, pull = jax.vjp(lambda l, r: fp8.gmm(l, r, sizes, recipe=recipe), lhs, rhs)
        return out, pull(dout)

    return step


def _structs(m, k, n, g, dtype=jnp.bfloat16):
    shapes = ((m, k), dtype), ((g, k, n), dtype), ((g,), jnp.int32), ((m, n), dtype)
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


class ExportTest(parameterized.TestCase):
    def test_three_platforms_and_a_fresh_process(self):
        case = next(c for c in cases.CASES if c.name == "gmm/quantized")
        a, b = helpers.as_jax(case.arrays())
        sizes = jnp.asarray(case.sizes, jnp.int32)
        dout = jnp.ones((a.shape[0], b.shape[2]))
        step = jax.jit(_step(case.recipe))
        exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(a, b, sizes, dout)
        self.assertIn("tpu_custom_call", exported.mlir_module())
        want = step(a, b, sizes, dout)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x")
            with open(path + ".bin", "wb") as f:
                f.write(exported.serialize())
            np.savez(path + ".npz", a, b, sizes, dout)
            code = (
                "import jax, numpy as np, sys; p = sys.argv[1]; z = np.load(p + '.npz');"
                "e = jax.export.deserialize(open(p + '.bin', 'rb').read());"
                "out = e.call(*(z[k] for k in z)); np.savez(p, *jax.tree.leaves(out))"
            )
            subprocess.run([sys.executable, "-c", code, path], check=True)
            with np.load(path + ".npz") as z:
                for key, leaf in zip(z, jax.tree.leaves(want), strict=True):
                    helpers.assert_same_bits(z[key], leaf)


class AheadOfTimeTest(parameterized.TestCase):
    def _check(self, chip, shape):
        compiled = compile_for(TOPOLOGIES[chip], _step(fp8.QuantRecipe()), *_structs(*shape))
        self.assertGreaterEqual(compiled.as_text().count('custom_call_target="tpu_custom_call"'), 3)

    @parameterized.parameters(*QUICK)
    def test_forward_and_gradients(self, chip, shape):
        self._check(chip, shape)

    @parameterized.parameters(*(p for p in itertools.product(TOPOLOGIES, SHAPES) if p not in QUICK))
    @pytest.mark.sweep
    def test_sweep_forward_and_gradients(self, chip, shape):
        self._check(chip, shape)

    @parameterized.product(chip=["v7x", "v5e"], lowering=["xla"], shape=[(200, 96, 160, 3)])
    def test_xla_lowering_on_tpu(self, chip, lowering, shape):
        with fp8.use_lowering(lowering):
            compiled = compile_for(TOPOLOGIES[chip], _step(fp8.QuantRecipe()), *_structs(*shape))
        self.assertNotIn("tpu_custom_call", compiled.as_text())

    @parameterized.parameters("v7x", "v5e")
    def test_automatic_sharding(self, chip):
        """Outside shard_map, operands sharded over many devices: gathered, and the kernels run."""
        devices = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        place = lambda spec: jax.NamedSharding(mesh, jax.P(*spec))
        specs = ("x",), (None, None, "x"), (), ("x",)
        args = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(spec))
            for a, spec in zip(_structs(512, 256, 128, 4), specs, strict=True)
        ]
        lowered = jax.jit(_step(fp8.QuantRecipe())).lower(*args)
        self.assertEqual(lowered.as_text().count("@tpu_custom_call"), 3)
        lowered.compile()

    @parameterized.product(chip=["v7x", "v5e"], recipe=[None, cases.INT8])
    def test_other_recipes(self, chip, recipe):
        for dtype in (jnp.float32, jnp.bfloat16):
            compile_for(TOPOLOGIES[chip], _step(recipe), *_structs(200, 129, 43, 3, dtype))


if __name__ == "__main__":
    absltest.main()
