"""The ring kernels: races, late devices, rounds, barriers, compilation, when they are chosen."""

import contextlib
import math
import time
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

import fp8moe_prims as fp8
from fp8moe_prims import collectives
from fp8moe_prims.lowering.tpu import chip, ring, ring_all_gather, ring_reduce_scatter
from fp8moe_prims.primitives import RingAllGatherOperands, RingParams, RingReduceScatterOperands
from tests import helpers, ring_cases
from tests import races as race_detector

BOTH = ("ring_all_gather", "ring_reduce_scatter")


@contextlib.contextmanager
def interpreted(races=True, delayed=None):
    """Runs the kernels in the interpreter; yields what says whether a race was found.

    Args:
      races: whether to look for them.
      delayed: a device that sleeps before each of its copies.
    """
    start = interpreter.dma_start

    def late(token, device_id, *args, **kwargs):
        if int(device_id) == delayed:
            time.sleep(0.01)
        return start(token, device_id, *args, **kwargs)

    with (
        race_detector.watched() as states,
        mock.patch.object(interpreter, "dma_start", start if delayed is None else late),
        pltpu.force_tpu_interpret_mode(race_detector.params(races)),
        fp8.use_lowering("mosaic"),
    ):
        yield lambda: race_detector.found(states)


def _whole(devices, rows=16, width=128):
    """Whole numbers, so that sums are exact: [devices * rows, width]."""
    size = devices * rows * width
    return jnp.asarray(np.arange(size, dtype=np.float32).reshape(devices * rows, width) % 509)


def _run(fn, x, devices, **mesh):
    """A fresh compilation: what a test has patched is part of no jit's key."""
    mapped = ring_cases.over(ring_cases.mesh(devices, **mesh), lambda x: fn(x))
    return np.asarray(jax.block_until_ready(jax.jit(mapped)(x)))


def _gather_scatter(x):
    return fp8.ring_reduce_scatter(fp8.ring_all_gather(x, "x", tiled=True), "x", tiled=True)


def _alternating(calls):
    """Gather and scatter along x, then along y, again and again; adds 1 in each pair."""

    def body(_, x):
        for axis in ("x", "y"):
            full = fp8.ring_all_gather(x, axis, tiled=True)
            x = fp8.ring_reduce_scatter(full, axis, tiled=True) / jax.lax.axis_size(axis) + 1
        return x

    return lambda x: jax.lax.fori_loop(0, calls // 4, body, x)


class OrderingTest(parameterized.TestCase):
    @parameterized.parameters(2, 3, 4, 8)
    def test_no_races(self, devices):
        x = _whole(devices)
        with interpreted() as found:
            out = _run(_gather_scatter, x, devices)
        np.testing.assert_array_equal(out, x * devices)
        self.assertFalse(found())

    def test_a_shared_semaphore_is_found(self):
        """The detector sees what it is there to see: steps that share a receive semaphore.

        Whether two copies cross depends on how the devices' threads run: several tries, a different
        device late in each.
        """
        gather = lambda x: fp8.ring_all_gather(x, "x")[None]

        def races(late):
            with (
                mock.patch.object(ring_all_gather, "receive_slot", lambda step: 0),
                interpreted(delayed=late) as found,
            ):
                _run(gather, _whole(5), 5)
            return found()

        self.assertTrue(any(races(late) for late in (None, *range(5)) * 3))

    @parameterized.parameters(
        ("rounds", (64, 128)), ("odd_rounds", (24, 512)), ("flat", (61, 256)), ("one", (3, 200))
    )
    def test_pieces(self, _, shape):
        """Rounds of one or two pieces, cut by rows or without regard to them: slots used again."""
        devices = 4
        x = _whole(devices, *shape)
        with (
            mock.patch.object(ring_reduce_scatter, "MAX_PIECE_BYTES", 16384),
            interpreted(delayed=1) as found,
        ):
            out = _run(_gather_scatter, x, devices)
        np.testing.assert_array_equal(out, x * devices)
        self.assertFalse(found())

    def _check_calls(self, calls, **how):
        x = _whole(4, 4)
        with interpreted(**how) as found:
            out = _run(_alternating(calls), x, 2, groups=2)
        np.testing.assert_array_equal(out, x + calls // 2)
        self.assertFalse(found())

    def test_calls_in_a_loop(self):
        self._check_calls(16)

    def test_one_device_late(self):
        self._check_calls(8, delayed=1)

    @parameterized.product(races=[True, False], delayed=[None, 0, 3])
    @pytest.mark.sweep
    def test_200_calls(self, races, delayed):
        self._check_calls(200, races=races, delayed=delayed)

    @parameterized.parameters(2, 3, 4, 8)
    @pytest.mark.sweep
    def test_each_device_late(self, devices):
        x = _whole(devices)
        for delayed in range(devices):
            with interpreted(delayed=delayed) as found:
                out = _run(_gather_scatter, x, devices)
            np.testing.assert_array_equal(out, x * devices)
            self.assertFalse(found())


def _lowered(op, devices, shape, dtype, axis="x", first=True, **options):
    """The pallas_call equation of a kernel, without interpreter or compiler."""
    mesh = ring_cases.mesh(devices, 8 // devices, first)
    p = RingParams(axis, mesh.shape[axis], -len(shape), True)
    gathers = op == "ring_all_gather"
    module = ring_all_gather if gathers else ring_reduce_scatter
    operands = RingAllGatherOperands if gathers else RingReduceScatterOperands
    options = dict(chip=chip.CHIPS["v7x"], interpret=False, mesh=mesh, forced=True) | options
    local = lambda x: getattr(module, op)(operands(x), p, **options)
    x = jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), dtype)
    jaxpr = jax.make_jaxpr(ring_cases.over(mesh, local, False))(x)
    found = [e for e in _eqns(jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    return found[0] if found else None


def _eqns(jaxpr):
    """Every equation in order, inner jaxprs after the one that has them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _eqns(sub)


def _kernel_eqns(call):
    body = call.params["jaxpr"]
    return list(_eqns(getattr(body, "jaxpr", body)))


class StructureTest(parameterized.TestCase):
    @parameterized.product(op=BOTH, devices=[2, 4, 8], rows=[1, 64])
    def test_own_entry_barrier(self, op, devices, rows):
        """Both neighbours are signalled and waited for before anything goes to another device."""
        eqns = _kernel_eqns(_lowered(op, devices, (rows * devices, 128), jnp.float32))
        names = [e.primitive.name for e in eqns]
        barrier = names.index("get_barrier_semaphore")
        semaphore = eqns[barrier].outvars[0]
        on_barrier = lambda name: [
            i
            for i, e in enumerate(eqns)
            if e.primitive.name == name and semaphore in list(e.invars)
        ]
        signals, waits = on_barrier("semaphore_signal"), on_barrier("semaphore_wait")
        remote = [
            i
            for i, e in enumerate(eqns)
            if e.primitive.name == "dma_start"
            and jax.tree.unflatten(e.params["tree"], e.invars)[-1] is not None
        ]
        self.assertEqual(names.count("get_barrier_semaphore"), 1)
        self.assertLen(signals, 2)
        self.assertLen(waits, 1)
        self.assertLess(max(signals), waits[0])
        self.assertLess(waits[0], min(remote))
        targets = {str(eqns[i].invars[-1]) for i in signals}
        self.assertLen(targets, 2)  # both ways

    def test_collective_ids_are_distinct(self):
        """For each pattern and each axis, in any order of the axes; equal for equal rings."""
        ids = {}
        for op in BOTH:
            for devices, first in ((2, True), (2, False), (4, True), (4, False)):
                for axis in ("x", "y"):
                    mesh = ring_cases.mesh(devices, 8 // devices, first)
                    size = mesh.shape[axis]
                    stride = math.prod(mesh.axis_sizes[mesh.axis_names.index(axis) + 1 :])
                    call = _lowered(op, devices, (32, 128), jnp.float32, axis, first)
                    params = call.params["compiler_params"]
                    ids.setdefault((op, size, stride), set()).add(params.collective_id)
        self.assertLen(set.union(*ids.values()), len(ids))
        self.assertGreaterEqual(min(set.union(*ids.values())), ring.FIRST_ID)

    @parameterized.parameters(*range(2, 9))
    def test_streams_make_every_hop_once(self, devices):
        for lanes in (1, 2, 4):
            made = ring.streams(devices, lanes)
            for lane in range(lanes):
                self.assertEqual(sum(s.hops for s in made if s.lane == lane), devices - 1)
            if lanes > 1:
                both = [
                    sum(s.hops for s in made if s.direction == d) for d in (ring.RIGHT, ring.LEFT)
                ]
                self.assertEqual(*both)

    @parameterized.parameters(*BOTH)
    def test_cost_estimate(self, op):
        call = _lowered(op, 4, (64, 256), jnp.bfloat16)
        cost = call.params["cost_estimate"]
        block = 64 * 256 * 2 if op == "ring_all_gather" else 16 * 256 * 2
        self.assertEqual(cost.remote_bytes_transferred, 3 * block)
        self.assertGreaterEqual(cost.bytes_accessed, 4 * block)

    @parameterized.parameters(jnp.float8_e4m3fn, jnp.int8, jnp.bfloat16, jnp.uint16)
    def test_values_travel_as_they_are(self, dtype):
        """A conversion, even to other bits of the same width, would be a pass over the result."""
        call = _lowered("ring_all_gather", 4, (64, 256), dtype)
        self.assertEqual({v.aval.dtype for v in (*call.invars, *call.outvars)}, {np.dtype(dtype)})

    @parameterized.product(op=BOTH, change=["part_of_axes", "not_forced", "one_device"])
    def test_falls_back(self, op, change):
        options = {
            "part_of_axes": dict(mesh=None),
            "not_forced": dict(forced=False),  # CPU devices have no coordinates
            "one_device": dict(axis="y"),
        }[change]
        self.assertIsNone(_lowered(op, 8, (8, 128), jnp.float32, **options))

    @parameterized.parameters(
        ("all_gather", False, 0), ("all_gather", True, 1),
        ("reduce_scatter", False, 0), ("reduce_scatter", True, 1),
    )  # fmt: skip
    def test_only_the_backward_pass_has_a_kernel(self, name, ring_cotangent, kernels):
        fn = lambda x: getattr(collectives, name)(x, "x", ring_cotangent=ring_cotangent)
        topology = topologies.get_topology_desc("v6e:2x2", platform="tpu")
        mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
        x = jax.ShapeDtypeStruct(
            (64, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("x"))
        )
        with fp8.use_lowering("mosaic"):
            forward = jax.jit(ring_cases.over(mesh, fn)).lower(x).as_text()
            pull = lambda x: jax.vjp(fn, x)[1](fn(x))[0]
            backward = jax.jit(ring_cases.over(mesh, pull)).lower(x).as_text()
        self.assertEqual(forward.count("tpu_custom_call"), 0)
        self.assertEqual(backward.count("tpu_custom_call"), kernels)


def _compile(topology, axes, names, fn, shape, dtype, lowering="mosaic", order=None):
    devices = np.array(topologies.get_topology_desc(topology, platform="tpu").devices)
    devices = devices if order is None else devices[list(order)]
    mesh = jax.sharding.Mesh(devices.reshape(axes), names)
    place = jax.NamedSharding(mesh, jax.P(names))
    x = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=place)
    with fp8.use_lowering(lowering):
        return jax.jit(ring_cases.over(mesh, fn)).lower(x).compile().as_text(), mesh


def _both(x):
    full = fp8.ring_all_gather(x, "x", tiled=True)
    return fp8.ring_reduce_scatter(jnp.sin(full), "x", tiled=True)


class CompileTest(parameterized.TestCase):
    @parameterized.parameters(
        ("tpu7x:2x2x1", (8,), ("x",), (256, 2048), jnp.bfloat16),
        ("tpu7x:2x2x1", (4, 2), ("y", "x"), (3, 200), jnp.float32),
        ("v6e:2x2", (4,), ("x",), (1, 200), jnp.bfloat16),
        ("v5p:2x2x1", (2, 2), ("x", "y"), (1003, 7168), jnp.float32),
        ("tpu7x:4x4x4", (128,), ("x",), (64, 512), jnp.bfloat16),
    )
    def test_kernels(self, topology, axes, names, shape, dtype):
        text, _ = _compile(topology, axes, names, _both, shape, dtype)
        self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 2)
        self.assertNotIn("all-gather(", text)
        self.assertNotIn("reduce-scatter(", text)

    @parameterized.product(
        topology=["tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1", "v5e:2x2", "tpu7x:4x4x4"],
        shape=[(1, 128), (3, 200), (16, 200), (4096, 7168), (1003, 640), (2, 3, 100), (8, 1)],
        dtype=[jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn],
    )
    @pytest.mark.sweep
    def test_every_shape(self, topology, shape, dtype):
        wide = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
        gather = lambda x: fp8.ring_all_gather(x, "x", tiled=True)
        size = len(topologies.get_topology_desc(topology, platform="tpu").devices)
        shape = shape if size < 100 else (min(shape[0], 64), *shape[1:])
        text, _ = _compile(
            topology, (size // 2, 2), ("x", "y"), _both if wide else gather, shape, dtype
        )
        self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1 + wide)

    def test_quantized_values_and_scales_in_one_kernel(self):
        def local(x):
            q = fp8.quantize(x, "e4m3", channelwise_axes=(0,))
            out = fp8.ring_all_gather(q, "x", tiled=True)
            return out.qvalue.astype(jnp.float32) * out.scale

        text, _ = _compile("tpu7x:2x2x1", (8,), ("x",), local, (128, 1024), jnp.bfloat16)
        self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)


class ChoiceTest(parameterized.TestCase):
    RING = (0, 1, 3, 2)  # around the square, where the order of a v6e:2x2 crosses it

    @parameterized.parameters((None, False), (RING, True))
    def test_auto_is_a_ring_where_the_torus_has_one(self, order, fits):
        text, mesh = _compile("v6e:2x2", (4,), ("x",), _both, (16, 128), jnp.float32, "auto", order)
        self.assertEqual(ring.is_torus_ring(mesh, "x", chip.CHIPS["v6e"]), fits)
        self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 2 * fits)

    def _mesh(self, topology, axes, names):
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
        at = {(*d.coords, d.core_on_chip): d for d in devices}
        grid = np.empty(np.max(list(at), axis=0) + 1, object)
        for where, device in at.items():
            grid[where] = device
        return jax.sharding.Mesh(grid.reshape(axes), names)

    def test_axes_of_the_torus(self):
        mesh = self._mesh("tpu7x:4x4x4", (4, 4, 4, 2), ("x", "y", "z", "core"))
        fits = lambda axis, kind: ring.is_torus_ring(mesh, axis, chip.CHIPS[kind])
        for axis in mesh.axis_names:
            self.assertTrue(fits(axis, "v7x"))
        self.assertFalse(fits("x", "v6e"))  # 4 chips in a row, but no link from last to first
        pairs = self._mesh("tpu7x:4x4x4", (16, 8), ("a", "b"))
        self.assertFalse(ring.is_torus_ring(pairs, "a", chip.CHIPS["v7x"]))

    def test_no_devices_no_ring(self):
        mesh = jax.sharding.AbstractMesh((4,), ("x",))
        self.assertFalse(ring.is_torus_ring(mesh, "x", chip.CHIPS["v7x"]))
        case = ring_cases.RingCase("ring_all_gather", 4, 8, 128)
        fn = jax.jit(case.mapped(case.ours))
        exported = jax.export.export(fn, platforms=("cpu", "cuda", "tpu"))(case.input)
        self.assertNotIn("tpu_custom_call", exported.mlir_module())
        x = jax.device_put(case.input, jax.NamedSharding(case.mesh, jax.P(("x", "y"))))
        helpers.assert_same_bits(jax.jit(exported.call)(x), fn(x))


if __name__ == "__main__":
    absltest.main()
