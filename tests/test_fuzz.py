"""Random calls against the reference: shapes, dtypes, groups, scales, poison, transforms.

A few dozen examples run with the other tests; `-m sweep` runs 2,000 (FUZZ_EXAMPLES), under the
interpreter too, as for each chip. FUZZ_SEED repeats a run; the seed and the number of distinct
paths are printed.
"""

import collections
import contextlib
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import fp8moe_prims as fp8
from fp8moe_prims.lowering.tpu import chip
from tests import cases, checks, helpers, row_cases

SEED = int(os.environ.get("FUZZ_SEED", "20261129"))
MANY = int(os.environ.get("FUZZ_EXAMPLES", "2000"))
INTERPRETED = [f"interpret {name}" for name in chip.CHIPS]
RECIPES = {
    "none": None,
    "default": cases.DEFAULT,
    "e4m3": cases.E4M3,
    "e5m2": cases.E5M2,
    "fixed": cases.FIXED,
    "int8": cases.INT8,
}


@st.composite
def grouped(draw):
    """(a Case of gmm or tgmm_quant, what is checked)."""
    op = draw(st.sampled_from(["gmm", "gmm", "tgmm_quant"]))
    m = draw(st.sampled_from([1, 7, 24, 40, 130]))
    k, n = draw(st.sampled_from([(1, 43), (128, 129), (200, 64), (96, 1), (130, 20), (256, 512)]))
    g = draw(st.integers(1, 5))
    total = g + draw(st.integers(0, 2)) if op == "gmm" else max(1, g + draw(st.integers(-1, 2)))
    sizes = draw(st.lists(st.integers(-2, m + 3), min_size=total, max_size=total))
    starts = None
    if draw(st.booleans()):
        starts, at = [], 0
        for i in range(total):
            at += draw(st.integers(0, 4))
            starts.append(at)
            sizes[i] = min(sizes[i], max(m // total, 1))
            at += max(sizes[i], 0)
    recipe = draw(st.sampled_from(sorted(RECIPES)))
    wide = ["f32", "bf16", "f16"] if recipe != "int8" else ["f32+"]
    lhs = draw(st.sampled_from([*wide, "q:row", "q:one", "q:row:e5m2", "q:row:int8"]))
    if op == "tgmm_quant":
        rhs = draw(st.sampled_from(wide))
    else:
        scales = ["one", "channel", "expert", "channel:e5m2", "channel:int8"]
        scales += ["blocked", "blocked_channel"] if k % 2 == 0 else []
        rhs = draw(st.sampled_from([*wide, *(f"q:{s}" for s in scales)]))
    plain = recipe == "none" and not (lhs + rhs).count("q:")
    case = cases.Case(
        name=f"fuzz/{draw(st.integers(0, 2**31))}",
        op=op,
        shape=(m, k, n, g),
        sizes=tuple(sizes),
        starts=None if starts is None else tuple(starts),
        offset=draw(st.one_of(st.none(), st.integers(0, total))),
        lhs=lhs,
        rhs=rhs,
        recipe=RECIPES[recipe],
        transpose_rhs=op == "gmm" and draw(st.booleans()),
        tolerance=2e-5 if plain else 2e-3,
    )
    kinds = ["value", "poison", "vmap", "checkpoint"] + ["gradients"] * 2 * (op == "gmm")
    return case, draw(st.sampled_from(kinds))


@st.composite
def moved(draw):
    """(a RowCase, what is checked)."""
    op = draw(st.sampled_from(["ragged_gather", "ragged_gather_reduce", "ragged_glu"]))
    tokens, top_k = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 3, 6, 8]))
    rows = tokens * top_k
    kinds = {
        "ragged_gather": ["f32", "bf16", "e4m3", "int8", "q:e4m3:row", "q:e5m2:one", "q:int8:row"],
        "ragged_gather_reduce": ["f32", "bf16", "q:e4m3:row", "q:e5m2:one"],
        "ragged_glu": ["f32", "bf16"],
    }
    kind = draw(st.sampled_from(kinds[op]))
    plain_data = kind in ("e4m3", "int8")
    bad = op != "ragged_glu" and draw(st.booleans())
    case = row_cases.RowCase(
        name=f"fuzz/{draw(st.integers(0, 2**31))}",
        op=op,
        tokens=tokens,
        top_k=top_k,
        width=draw(st.sampled_from([1, 43, 96, 128, 200])),
        start=draw(st.integers(-3, rows + 3)),
        end=draw(st.one_of(st.none(), st.integers(-3, rows + 3))),
        kind=kind,
        weights=op != "ragged_glu" and not plain_data and draw(st.booleans()),
        inverse=op != "ragged_glu" and not bad and draw(st.booleans()),
        bad=bad,
    )
    return case, draw(st.sampled_from(["value"] if plain_data else ["value", "gradients"]))


def _check_grouped(case, kind, lowering):
    if kind == "value":
        checks.value(case, lowering)
    elif kind == "poison":
        checks.tail_changes_no_bit(case, lowering, np.nan)
    elif kind == "gradients":
        checks.gradients(case, lowering)
    else:
        a, b = helpers.as_jax(case.arrays())
        fn, sizes = case.function(), case.kwargs()["group_sizes"]
        with fp8.use_lowering(lowering):
            if kind == "checkpoint":
                out = jax.jit(jax.checkpoint(fn))(a, b, sizes)
            else:  # two sets of groups, one of them the case's own; the operands are not batched
                both = jnp.stack([jnp.asarray(sizes, jnp.int32), jnp.zeros(len(sizes), jnp.int32)])
                out, empty = jax.jit(jax.vmap(fn, (None, None, 0)))(a, b, both)
                assert not np.any(np.asarray(empty, np.float32)) or np.isnan(empty).any()
        helpers.assert_same_bits(out, checks.run(case, lowering))


def _check_moved(case, kind, lowering):
    (checks.rows_value if kind == "value" else checks.rows_gradients)(case, lowering)


@contextlib.contextmanager
def _for_chip(name: str):
    """As if every device were the chip of this name, or as it is."""
    if not name:
        yield
        return
    with mock.patch.object(chip, "chip_of", lambda device_kind: chip.CHIPS[name]):
        yield


def _fuzz(strategy, check, examples, lowerings):
    paths = collections.Counter()

    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy, st.sampled_from(lowerings))
    def run(example, lowering):
        case, kind = example
        way, _, name = lowering.partition(" ")
        with _for_chip(name):
            check(case, kind, way)
        paths[_path(case, kind, lowering)] += 1

    run()
    total = sum(paths.values())
    print(f"{total} examples, {len(paths)} distinct paths, FUZZ_SEED={SEED}")
    return total


def _path(case, kind, lowering):
    """What decides which code a call goes through, without its sizes."""
    if isinstance(case, cases.Case):
        groups = case.starts is not None, case.offset is not None
        rules = case.op, case.lhs, case.rhs, str(case.recipe), case.transpose_rhs
    else:
        groups = case.start > 0, case.end is not None
        rules = case.op, case.kind, case.weights, case.inverse, case.bad
    return (*rules, *groups, kind, lowering)


class FuzzTest(parameterized.TestCase):
    def test_grouped(self):
        self.assertEqual(_fuzz(grouped(), _check_grouped, 20, ["xla"]), 20)

    def test_moved(self):
        self.assertEqual(_fuzz(moved(), _check_moved, 20, ["xla"]), 20)

    @pytest.mark.sweep
    def test_sweep_grouped(self):
        lowerings = ["xla"] * 28 + INTERPRETED
        self.assertGreaterEqual(_fuzz(grouped(), _check_grouped, MANY * 3 // 4, lowerings), 1)

    @pytest.mark.sweep
    def test_sweep_moved(self):
        lowerings = ["xla"] * 28 + INTERPRETED
        self.assertGreaterEqual(_fuzz(moved(), _check_moved, MANY // 4, lowerings), 1)


if __name__ == "__main__":
    absltest.main()
