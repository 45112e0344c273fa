"""debug_checks: each kind of bad data is reported by name, and nothing is left where it is off."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import fp8moe_prims as fp8
from fp8moe_prims.moe import MoEConfig, moe_ffn

X, W, DOUT = jnp.ones((8, 16)), jnp.ones((3, 16, 4)), jnp.ones((8, 4))


def _gmm(sizes, **more):
    return lambda: fp8.gmm(X, W, jnp.array(sizes), **more)


def _scaled(scale, axis):
    q = fp8.quantize(X, "e4m3", channelwise_axes=(0,))
    return fp8.QArray(q.qvalue, q.scale.at[axis].set(scale))


ROWS = {
    "negative size": (_gmm([3, -1, 2]), r"gmm: group_sizes\[1\] must not be negative, got -1"),
    "sizes that overrun": (
        _gmm([3, 4, 5]),
        r"gmm: group 2 ends at row 12, beyond the 8 rows \(group_sizes\[2\] = 5, start 7\)",
    ),
    "sizes whose sum wraps": (
        _gmm([3, 2**31 - 1, 2**31 - 1]),
        "gmm: group 1 ends at row 2147483650",
    ),
    "starts that overrun": (
        _gmm([1, 0, 3], group_starts=jnp.array([0, 1, 6])),
        r"gmm: group 2 ends at row 9, beyond the 8 rows \(group_sizes\[2\] = 3, start 6\)",
    ),
    "surplus groups": (
        _gmm([1, 1, 1, 0, 2]),
        "gmm: group_sizes has 5 groups, rhs 3, and no group_offset: the rows of group 4 are zero",
    ),
    "surplus groups, undefined": (_gmm([1, 1, 1, 2], tail="undefined"), "group 3 are undefined"),
    "starts that overlap": (
        _gmm([3, 2, 2], group_starts=jnp.array([0, 2, 6])),
        r"gmm: group_starts\[1\] must ascend",
    ),
    "starts below zero": (_gmm([1, 1, 1], group_starts=jnp.array([-1, 2, 6])), "group_starts"),
    "offset": (_gmm([1, 1, 1, 1], group_offset=2), r"gmm: group_offset must lie in \[0, 1\]"),
    "lhs scale": (
        lambda: fp8.gmm(_scaled(jnp.nan, 2), W, jnp.array([1, 2, 1])),
        r"gmm: lhs.scale\[2, 0\] must be finite",
    ),
    "rhs scale": (
        lambda: fp8.gmm(X, fp8.QArray(W.astype("float8_e4m3fn"), -jnp.ones((3, 1, 4))), [1, 1, 1]),
        r"gmm: rhs.scale",
    ),
    "tgmm sizes": (
        lambda: fp8.tgmm_quant(X, DOUT, jnp.array([9])),
        "tgmm_quant: group 0 ends at row 9, beyond the 8 rows",
    ),
    "gather index": (
        lambda: fp8.ragged_gather(X, jnp.array([0, 8])),
        r"ragged_gather: indices\[1\] must be -1 or lie in \[0, 8\), got 8",
    ),
    "gather end": (lambda: fp8.ragged_gather(X, jnp.array([0, 1]), end=3), "ragged_gather: end"),
    "reduce start": (
        lambda: fp8.ragged_gather_reduce(X, jnp.array([[0, 1]]), start=-1),
        "ragged_gather_reduce: start",
    ),
    "glu end": (lambda: fp8.ragged_glu(X, end=9), r"ragged_glu: end must lie in \[0, 8\], got 9"),
}


def _catch(fn):
    """The text of what fn raises inside debug_checks, or on leaving it."""
    try:
        with fp8.debug_checks():
            jax.block_until_ready(fn())
    except Exception as e:
        return str(e)
    return ""


class DebugTest(parameterized.TestCase):
    @parameterized.named_parameters(*((k.replace(" ", "_"), *v) for k, v in ROWS.items()))
    def test_reported(self, fn, pattern):
        self.assertRegex(_catch(lambda: jax.jit(fn)()), pattern)

    def test_eager_and_off_again(self):
        fn, pattern = ROWS["negative size"]
        self.assertRegex(_catch(fn), pattern)
        with self.assertRaisesRegex(fp8.DataError, pattern), fp8.debug_checks():
            jax.block_until_ready(fn())
        with self.assertRaises(jax.errors.JaxRuntimeError) as raised, fp8.debug_checks():
            jax.block_until_ready(jax.jit(fn)())
        self.assertRegex(str(raised.exception).splitlines()[-1], pattern)
        jax.block_until_ready(fn())  # clamped, and no error

    def test_under_transforms(self):
        sizes = jnp.array([[1, 2, 3], [3, -4, 2]])
        fn = lambda s: fp8.gmm(X, W, s, recipe=fp8.QuantRecipe())
        pattern = r"group_sizes\[1\] must not be negative, got -4"
        self.assertRegex(_catch(lambda: jax.vmap(fn)(sizes)), pattern)
        grad = jax.grad(lambda x, s: jnp.sum(fp8.gmm(x, W, s)))
        self.assertRegex(_catch(lambda: jax.jit(grad)(X, sizes[1])), pattern)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
        sharded = jax.shard_map(lambda s: fn(s[0]), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        self.assertRegex(_catch(lambda: jax.jit(sharded)(sizes)), pattern)

    def test_good_data_and_a_poisoned_tail_pass(self):
        x = _scaled(jnp.nan, 7)
        starts = jnp.array([0, 3, 5])
        with fp8.debug_checks():
            fp8.gmm(x, W, jnp.array([2, 0, 2]), group_starts=starts)
            fp8.gmm(X, W, jnp.array([1, 2, 3, 2]), group_offset=1)
            fp8.gmm(X, W, jnp.array([1, 2, 3, 2]), group_offset=0)  # group 3 is another device's
            fp8.gmm(X, W, jnp.array([1, 2, 3, 0]))
            fp8.ragged_gather(X, jnp.array([0, -1, 7, 99]), end=3)
            config = MoEConfig(4, 2, ragged_buffer_factor=0.5)
            w = jnp.ones((4, 16, 8))
            logits = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
            loss = lambda x: jnp.sum(
                moe_ffn(x, logits, w, w, jnp.ones((4, 8, 16)), config=config)[0]
            )
            jax.block_until_ready(jax.jit(jax.grad(loss))(X))

    def test_nothing_is_traced_when_off(self):
        fn = jax.jit(lambda s: fp8.gmm(X, W, s))
        sizes = jnp.array([1, 2, 3])
        with fp8.debug_checks():
            self.assertIn("callback", str(jax.make_jaxpr(fn)(sizes)))
            fn(sizes)
        self.assertNotIn("callback", str(jax.make_jaxpr(fn)(sizes)))
        self.assertNotIn("callback", fn.lower(sizes).as_text())


if __name__ == "__main__":
    absltest.main()
