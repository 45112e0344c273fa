"""tools/train.py: its verdict and table, and that its tails of NaN are there and change nothing."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from tools import train


class TrainTest(parameterized.TestCase):
    def results(self, **losses):
        names = {"dense": train.DENSE, "plain": train.PLAIN, "poisoned": train.POISONED}
        return {names[n]: ([loss], {1: loss}) for n, loss in losses.items()}

    @parameterized.parameters(
        (dict(dense=2.0, plain=2.019, poisoned=2.019), []),
        (dict(dense=2.0, plain=2.021), ["1.05% from dense"]),
        (dict(dense=2.0, plain=float("nan")), ["not finite", "nan% from dense"]),
        (dict(plain=2.0, poisoned=2.0001), ["NaN tail are not those of"]),
    )
    def test_faults(self, losses, expected):
        found = train.faults(self.results(**losses))
        self.assertLen(found, len(expected))
        for text, part in zip(found, expected, strict=True):
            self.assertIn(part, text)

    def test_table(self):
        lines = train.table(self.results(dense=2.0, plain=2.01)).splitlines()
        self.assertEqual(lines[2], "| 1 | 2.0000 | 2.0100 |")
        self.assertEqual(lines[3], "| largest distance from dense e5m2 | 0.00% | 0.50% |")

    def test_tails_of_nan_reach_no_loss(self):
        """Of the layer over two devices: NaN gives the gradients that 1.0 gives, bit for bit."""
        from fp8moe_prims.moe import MoEConfig

        rng = np.random.default_rng(0)
        make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        x, logits = make(16, 32), make(16, 4)
        weights = make(4, 32, 16), make(4, 32, 16), make(4, 16, 32)
        config = MoEConfig(4, 2)
        poisoned = []
        fill = train.fill_tail

        def counted(rows, end, value):
            poisoned.append(value)
            return fill(rows, end, value)

        @jax.jit
        def gradients(value):
            layer = train.sharded_layer(value)
            loss = lambda x, *w: jnp.sum(layer(x, logits, *w, config=config)[0] ** 2)
            return jax.grad(loss, (0, 1, 2, 3))(x, *weights)

        with mock.patch.object(train, "fill_tail", counted):
            results = [gradients(value) for value in (1.0, np.nan)]
        self.assertLen(poisoned, 4)  # gather, gmm, glu, gmm
        jax.tree.map(np.testing.assert_array_equal, *results)
        filled = train.fill_tail(jnp.ones((4, 2)), 3, np.nan)
        self.assertTrue(np.isnan(filled[3]).all() and (np.asarray(filled[:3]) == 1).all())


if __name__ == "__main__":
    absltest.main()
