"""tools/bench.py: programs of the compiler followed, tables, the modes it has."""

import dataclasses
import json
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from tests.helpers import run_tool as _run
from tools import _bench_projection, _bench_tilings, _bench_tpu, _llo_run, _tpu_call, bench

LISTING = """\
= control target key start
LB: loop body
     0   :  { %s1_s0 = inlined_call_operand.<no memory space> [index: 0, kind: input] }
   0x1   :  { %s2_s1 = inlined_call_operand.hbm [index: 1, kind: input] /* a
table */ }
   0x2   :  { %s3_s2 = smov.u32 [#allocation5]  ;;  %s4_s3 = smov.u32 0 }
   0x3   :  { %5 = dma.hbm_to_smem %s2_s1, /*size_in_granules=*/16, %s3_s2, [#allocation1] }
   0x4   :  { %6 = vsyncpa [#allocation7], 0 } /* Start region 1 */
   0x5 LB: > { %7 = sst [smem:[#allocation9]] %s8_s3  ;;  %s8_s3 = sphi %s4_s3, %s9_s3 /* i
*/ } /* Start region 2 */
   0x6   : > { %s10_s4 = sld [smem:[#allocation5 + %s8_s3]]  ;;  %s9_s3 = sadd.s32 1, %s8_s3 }
   0x7   : > { %p11_p0 = scmp.lt.s32 %s10_s4, 0  ;;  %s12_s5 = smulhi.u32 %s10_s4, 0x80000000 }
   0x8   : > { %s13_s6 = smov.u32 (!%p11_p0, %s12_s5), 64 ;; %p14_p1 = scmp.ge.s32 %s9_s3, %s1_s0 }
   0x9   : > { %15 = dma.hbm_to_vmem [thread:$0]  (!%p11_p0), %s2_s1, %s13_s6, %s3_s2, %s3_s2 }
   0xa   : > { %16 = sbr.rel (%p11_p0) target = $region4 }
   0xb   : > { %17 = vmatmul.mubr.bf16.mxu0 %v1_v1 }
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   : > { %v18_v1 = vld [vmem:[#allocation2]] }
  0x11   : > { %19 = vst [vmem:[#allocation2]] %v18_v1  ;;  %20 = vmatmul.mubr.bf16.mxu1 %v1_v1 }
  0x12 PF: > { %s21_s7 = sld [smem:[#allocation9]] } /* Start/End empty region 4 */
  0x13   : > { %22 = sbr.rel (!%p14_p1) target = $region2 }
  0x14   :  {}
  0x15 PF:  { %s23_s8 = sadd.s32 %s21_s7, 0 } /* Start region 3 */
"""


class FollowTest(parameterized.TestCase):
    def test_listing(self):
        run = _llo_run.follow(LISTING, {0: 4, 1: [3, -1, 7, 0]})
        times = dict(zip((b.address for b in run.bundles), run.executed, strict=True))
        self.assertEqual([times[x] for x in ("0", "0x5", "0x8", "0x13", "0x14")], [1, 4, 4, 4, 4])
        # The branch of the second iteration leaves out one bundle: six more run before it jumps.
        self.assertEqual([times[x] for x in ("0xb", "0x10", "0x11", "0x15")], [4, 4, 3, 1])
        self.assertEqual(run.mxu, 4 * (4 + 3))
        self.assertEqual(run.cycles, 5 + 4 * 12 + 3 * 4 + 4 * 3 + 1)
        self.assertEqual(run.bytes, 3 * 64 * 32)

    @parameterized.parameters(
        # The table comes from VMEM, by an address in other units, a pointer in the same bundle.
        (
            ("operand.hbm", "operand.vmem"),
            ("smov.u32 0 }", "smov.u32 0 ;; %s4_s4 = sshll.u32 %s2_s1, 4 ;; %s4_s5 = POINTER }"),
            ("POINTER", "int_to_ptr.vmem [resolvable:$true] %s4_s4"),
            ("dma.hbm_to_smem %s2_s1", "dma.vmem_to_smem %s4_s5"),
        ),
        # The first of two cores.
        (("smov.u32 0 }", "sld [smem:[#allocation0]] /* megacore core id */ }"),),
        # Nobody knows whether it is stored, and nothing depends on it.
        (("sst [smem:[#allocation9]] %s8_s3", "sst [smem:[#allocation9]] (%p9_p9), %s8_s3"),),
    )
    def test_same(self, *changes):
        listing = LISTING
        for old, new in changes:
            self.assertIn(old, listing)
            listing = listing.replace(old, new)
        operands = {0: 4, 1: [3, -1, 7, 0]}
        run, same = (_llo_run.follow(text, operands) for text in (LISTING, listing))
        self.assertEqual((run.cycles, run.bytes), (same.cycles, same.bytes))

    def test_widened_rows_take_twice_as_long(self):
        listing = LISTING.replace("mubr.bf16.mxu0", "mubr.f8e5m2.bf16.mxu0")
        run = _llo_run.follow(listing, {0: 4, 1: [3, -1, 7, 0]})
        self.assertEqual(run.mxu, 4 * (2 * 4 + 3))

    def test_old_value_and_smulhi(self):
        """A copy's size is that of the old value where the predicate is false."""
        listing = LISTING.replace("(!%p11_p0, %s12_s5)", "(%p11_p0, %s12_s5)")
        run = _llo_run.follow(listing, {0: 3, 1: [40, -1, 7]})
        self.assertEqual(run.bytes, (20 + 3) * 32)

    @parameterized.parameters(
        ("smulhi.u32 %s10_s4", "srem.s32 %s10_s4", "bundle 0x7: unknown instruction: .*srem"),
        ("scmp.ge.s32 %s9_s3", "pneg %p99_p3", "bundle 0x13: !%p14_p1 is undefined"),
        ("(!%p11_p0, %s12_s5), 64", "(%p11_p0), 64", "bundle 0x9: %s13_s6 is undefined"),
        ("  0x14   :  {}", "  0x14   :  { target? }", "not an instruction: target"),
    )
    def test_refuses(self, old, new, message):
        with self.assertRaisesRegex(ValueError, message):
            _llo_run.follow(LISTING.replace(old, new), {0: 4, 1: [3, -1, 7, 0]})

    def test_endless(self):
        with self.assertRaisesRegex(ValueError, "bundle 0x5 has run 3 times"):
            _llo_run.follow(LISTING, {0: 4, 1: [3, -1, 7, 0]}, limit=3)

    @parameterized.parameters("v7x", "v5p")
    def test_compiled_kernel(self, chip):
        """The products of a call run once for every 256 rows, as it has no boundary within them."""
        sizes = 512, 0, 768, 256
        call = _tpu_call.Call("gmm", m=1792, k=512, n=256, sizes=sizes, lhs="fp8", chip=chip)
        run, _ = _tpu_call.follow(call)
        products = {x.times for x in run.pieces() if x.mxu and x.times}
        self.assertEqual(products, {sum(call.sizes) // 256})
        self.assertEqual(run.mxu, _bench_tpu.floors(call)["mxu"])
        core = _bench_tpu.chip(chip)
        moved = core.hbm_bytes_per_cycle * _bench_tpu.floors(call)["hbm"]
        self.assertBetween(run.bytes, moved, 1.3 * moved * core.cores)


class TilingsTest(parameterized.TestCase):
    @parameterized.parameters(
        "gmm fp8 lhs, k=7168 n=2048, aligned", "tgmm both bf16, k=2048 n=7168, aligned"
    )
    def test_candidates(self, name):
        call = _bench_tpu.calls(32)[name]
        found = [_bench_tilings.shape(t) for t in _bench_tilings.tilings(call)]
        self.assertGreater(len(found), 5)
        self.assertLen(set(found), len(found))

    def test_tiles_are_taken(self):
        call = _tpu_call.Call("gmm", m=1024, k=256, n=512, sizes=(512, 512))
        chosen, *others = _bench_tilings.tilings(call)
        self.assertEqual(chosen["tn"], 512)
        tiles = next(t for t in others if t["tn"] == 256)
        run, _ = _tpu_call.follow(dataclasses.replace(call, tiles=tiles))
        products = {x.times for x in run.pieces() if x.mxu and x.times}
        self.assertEqual(products, {2 * 1024 // tiles["sub"]})

    def test_table(self):
        tiles = dict(tm=256, tn=512)
        counted = [dict(cycles=120, copies=1), dict(cycles=100, copies=110), dict(error="no")]
        rows = [
            {
                "name": "gmm",
                "mxu": 100,
                "hbm": 50,
                "tilings": [{"tiles": tiles, **x} for x in counted],
            }
        ]
        text = _bench_tilings.table(rows, bench.parse_arguments(["tpu", "--tilings"]))
        self.assertIn("gmm: the chosen one takes 1.091 of the best", text)
        self.assertRegex(text, r"256 rows, 512 columns +1\.200\n.* 1\.100\n.* no")


class BenchTest(parameterized.TestCase):
    def test_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cpu.json")
            sizes = ("--k", "128", "--n", "256", "--groups", "4", "--rows", "128")
            code, out, err = _run(
                bench.main,
                *("cpu", *sizes, "--values", "1,2", "--repetitions", "1", "--json", path),
            )
            self.assertEqual(code, 0, err)
            with open(path) as f:
                table = json.load(f)["table"]
        self.assertEqual([r["buffer_rows"] for r in table], [128, 256])
        self.assertEqual({r["how"] for r in table}, {"timed"})
        self.assertEqual(out.count("\ntimed "), 2)
        self.assertIn("repetition 1 of 1", err)
        self.assertIn(f"[{'#' * 30}] 4/4 done", err)

    def test_tpu(self):
        rows = "k=4096 n=256, 64 groups"
        code, out, err = _run(bench.main, "tpu", "--only", rows)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, rows + r" of 1 row( +[\d.]+){5} +[\d.]+ MB\n +blocks \d+/64 x 64;")

    def test_projection_table(self):
        count = lambda cycles, copies=0.0: {"cycles": cycles, "copies": copies}
        chain = lambda cycles: {"cycles": cycles, "temporaries": cycles << 10}
        parts = ("forward", "dlhs", "drhs")
        row = {
            "name": "k=128 n=256, 64 static rows",
            "ours": dict(zip(parts, (count(900), count(1000), count(800, 1100)), strict=True)),
            "tokamax": dict.fromkeys(parts, count(1000)),
            "chains": dict(
                zip((*parts, "drhs again"), map(chain, (100, 400, 1000, 2500)), strict=True)
            ),
            "temporaries": 3 << 20,
        }
        self.assertEqual(_bench_projection.ratios(row), {"drhs": 1.5, "drhs again": 2.0})
        options = bench.parse_arguments(["tpu", "--projection"])
        text = _bench_projection.table([row], options)
        self.assertRegex(text, r"ours +0\.9 +1\.0 +1\.1 +3\.0 +3\.00 MiB\n")
        self.assertRegex(text, r"dense chains, both again +0\.1 +0\.4 +2\.5 +3\.0 +2\.44 MiB\n")
        self.assertIn("chains / ours: 1.50; both again: 2.00\n", text)
        del row["tokamax"]
        self.assertNotIn("/ ours", _bench_projection.table([row], options))
        row["ours"]["dlhs"] = {"error": "no result after 1 s"}
        self.assertIn("ours, dlhs: no result", _bench_projection.table([row], options))

    def test_projection_calls(self):
        calls = _bench_projection.kernels(128, 256, 64, (32,), "tokamax")
        self.assertEqual({x.lhs for x in calls.values()}, {"fp8"})
        self.assertEqual({x.rows for x in calls.values()}, {32})
        ours = _bench_projection.kernels(128, 256, 64, (32,))
        self.assertEqual([x.lhs for x in ours.values()], ["fp8", "quantize", "fp8"])
        self.assertEqual([x.transpose for x in ours.values()], [False, True, False])

    def test_projection_chains(self):
        """They have the arguments that they are compiled for, and keep NaN in the tail there."""
        rng = np.random.default_rng(0)
        make = lambda x: jnp.asarray(rng.uniform(0.5, 1, x.shape), x.dtype)
        valid = 24
        for part, steps in _bench_projection.chains(128, 256, 32, 2).items():
            for fn, like in steps:
                args = [make(x) for x in like]
                if args[-1].dtype == jnp.int32:
                    args[-1] = jnp.array([8, 16], jnp.int32)
                dirty = [x.at[valid:].set(jnp.nan) if x.shape[0] == 32 else x for x in args]
                for x, y in zip(*map(jax.tree.leaves, (fn(*args), fn(*dirty))), strict=True):
                    rows = valid if x.shape[0] == 32 else None
                    same = np.asarray(x, np.float32)[:rows], np.asarray(y, np.float32)[:rows]
                    np.testing.assert_array_equal(*same, err_msg=part)

    def test_sweeps(self):
        def points(*argv):
            return bench._bench_cpu.points(bench.parse_arguments(["cpu", *argv]))

        self.assertEqual([p.buffer / p.rows for p in points()], [1, 2, 4, 8])
        rows = points("--sweep", "rows", "--groups", "4", "--factor", "3")
        self.assertEqual([p.rows for p in rows], [4, 32, 256, 1024, 4096])
        self.assertEqual({(p.buffer / p.rows, p.groups) for p in rows}, {(3, 4)})
        experts = points("--sweep", "experts", "--values", "8,256")
        self.assertEqual([(p.groups, p.rows) for p in experts], [(8, 1024), (256, 1024)])

    @parameterized.parameters(
        ((), "required: command"),
        (("gpu",), "gpu.*choose from.*cpu"),
        (("cpu", "--rows", "-3"), "--rows: takes a positive integer, got '-3'"),
        (("cpu", "--values", "1,x"), "--values: takes a positive integer, got 'x'"),
        (("cpu", "--sweep", "depth"), "depth.*choose from.*buffer.*rows.*experts"),
    )
    def test_refuses(self, argv, message):
        code, _, err = _run(bench.main, *argv)
        self.assertEqual(code, 2)
        self.assertRegex(err, message)


if __name__ == "__main__":
    absltest.main()
