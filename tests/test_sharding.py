"""Inside shard_map: varying mesh axes, replicated operands, offsets from axis_index."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import fp8moe_prims as fp8
from tests import cases, helpers

K, N, G, ROWS = 96, 40, 3, 24


def _mesh(n=4):
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))


def _inputs():
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((4 * ROWS, K)).astype(np.float32)
    rhs = rng.standard_normal((G, K, N)).astype(np.float32)
    sizes = np.array([[10, 0, 8], [3, 4, 5], [0, 0, 0], [8, 8, 8]], np.int32)
    return tuple(map(jnp.asarray, (lhs, rhs, sizes)))


class ShardMapTest(parameterized.TestCase):
    @parameterized.product(
        check_vma=[True, False],
        recipe=[None, cases.DEFAULT, fp8.QuantRecipe(backward="dense")],
        lowering=["auto"],
    )
    def test_gradients(self, check_vma, recipe, lowering):
        lhs, rhs, sizes = _inputs()
        local = lambda l, r, s: fp8.gmm(l, r, s[0], recipe=recipe)
        fn = jax.shard_map(
            local,
            mesh=_mesh(),
            in_specs=(P("x"), P(), P("x")),
            out_specs=P("x"),
            check_vma=check_vma,
        )
        loss = lambda l, r: jnp.sum(jnp.sin(fn(l, r, sizes)))

        def loop(l, r):
            parts = [local(l[i * ROWS :][:ROWS], r, sizes[i : i + 1]) for i in range(4)]
            return jnp.sum(jnp.sin(jnp.concatenate(parts)))

        with fp8.use_lowering(lowering):
            got = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
        for a, b in zip(got, jax.jit(jax.grad(loop, (0, 1)))(lhs, rhs), strict=True):
            helpers.assert_close(a, b, 2e-5)

    @parameterized.parameters(True, False)
    def test_gradient_inside_is_what_ragged_dot_gives(self, check_vma):
        lhs, rhs, sizes = _inputs()

        def grads(op):
            local = lambda l, r, s: jax.grad(lambda r: jnp.sum(jnp.sin(op(l, r, s[0]))))(r)
            return jax.jit(
                jax.shard_map(
                    lambda l, r, s: local(l, r, s)[None],
                    mesh=_mesh(),
                    in_specs=(P("x"), P(), P("x")),
                    out_specs=P("x") if not check_vma else P(None),
                    check_vma=check_vma,
                )
            )(lhs, rhs, sizes)

        helpers.assert_close(grads(fp8.gmm), grads(jax.lax.ragged_dot), 1e-5)

    def test_scan_carry(self):
        rng = np.random.default_rng(0)
        lhs = jnp.asarray(rng.standard_normal((4 * ROWS, K)).astype(np.float32))
        rhs = jnp.asarray(0.05 * rng.standard_normal((G, K, K)).astype(np.float32))
        sizes = _inputs()[2]

        def local(l, r, s):
            step = lambda c, _: (c + fp8.gmm(c, r, s[0], recipe=cases.DEFAULT), None)
            return jax.lax.scan(step, l, None, length=2)[0]

        out = jax.jit(
            jax.shard_map(local, mesh=_mesh(), in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
        )(lhs, rhs, sizes)
        want = jnp.concatenate(
            [local(lhs[i * ROWS :][:ROWS], rhs, sizes[i : i + 1]) for i in range(4)]
        )
        helpers.assert_close(out, want, 1e-5)

    def test_offset_from_axis_index(self):
        lhs, _, _ = _inputs()
        lhs = lhs[:ROWS]
        rhs = jnp.asarray(np.random.default_rng(1).standard_normal((8, K, N)).astype(np.float32))
        sizes = jnp.asarray([3, 0, 5, 1, 2, 4, 0, 6], jnp.int32)

        def local(w):
            part = fp8.gmm(lhs, w, sizes, group_offset=2 * jax.lax.axis_index("x"))
            return jax.lax.psum(part, "x")

        out = jax.jit(jax.shard_map(local, mesh=_mesh(), in_specs=P("x"), out_specs=P()))(rhs)
        helpers.assert_close(out, fp8.gmm(lhs, rhs, sizes), 1e-6)

    def test_interpreted_on_two_devices(self):
        lhs, rhs, sizes = _inputs()
        fn = lambda lhs, rhs, sizes: jax.shard_map(
            lambda l, r, s: fp8.gmm(l, r, s[0], recipe=cases.DEFAULT),
            mesh=_mesh(2),
            in_specs=(P("x"), P(), P("x")),
            out_specs=P("x"),
        )(lhs, rhs, sizes)
        args = lhs[: 2 * ROWS], rhs, sizes[:2]
        with fp8.use_lowering("interpret"):
            out = jax.jit(fn)(*args)
        helpers.assert_close(out, jax.jit(fn)(*args), 1e-5)

    def test_auto_sharded_jit_is_right(self):
        lhs, rhs, _ = _inputs()
        sizes = jnp.asarray([30, 0, 50], jnp.int32)
        want = fp8.gmm(lhs, rhs, sizes)
        rows = jax.NamedSharding(_mesh(), P("x"))
        out = jax.jit(fp8.gmm)(jax.device_put(lhs, rows), rhs, sizes)
        helpers.assert_close(out, want, 1e-6)


if __name__ == "__main__":
    absltest.main()
