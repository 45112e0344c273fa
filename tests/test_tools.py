"""The tools: what they print, what they refuse, and the checks that are made with them."""

import os
import pathlib
import subprocess
import sys

import jax
from absl.testing import absltest, parameterized

from tests.helpers import run_tool as _run
from tools import _hlo, dump_hlo

ROOT = pathlib.Path(__file__).resolve().parent.parent

HLO = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[64,256]{1,0})->f32[64]{0}}

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p.0: bf16[64,256], p.1: f32[]) -> (f8e5m2[64,256], f32[64]) {
  %p.0 = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = f32[]{:T(128)S(6)} parameter(1)
  %wide = f32[64,256]{1,0:T(8,128)} convert(%p.0), metadata={op_name="jit(f)/x"}
  %spread = f32[64,256]{1,0:T(8,128)} broadcast(%p.1), dimensions={}
  %scaled = f32[64,256]{1,0:T(8,128)} multiply(%wide, %spread)
  %narrow = f8e5m2[64,256]{1,0:T(8,128)(4,1)} convert(%scaled)
  %top = f32[64]{0:T(128)} reduce(%scaled, %p.1), dimensions={1}, to_apply=%add.1
  ROOT %both = (f8e5m2[64,256]{1,0:T(8,128)(4,1)}, /*index=1*/f32[64]{0}) tuple(%narrow, %top)
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64]{0} get-tuple-element(%state), index=1
  %y = f32[64]{0} clamp(%x, %x, %x)
  ROOT %next = (s32[], f32[64]{0}) tuple(%i, %y)
}

%condition (state.1: (s32[], f32[64])) -> pred[] {
  %state.1 = (s32[], f32[64]{0}) parameter(0)
  ROOT %more = pred[] constant(false)
}

ENTRY %main (x.1: bf16[64,256], w: bf16[8,256,16]) -> f32[64] {
  %x.1 = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[8,256,16]{2,1,0} parameter(1)
  %one = f32[] constant(1)
  %zero = s32[] constant(0)
  %small = f32[8,256,16]{2,1,0} convert(%w)
  %f = (f8e5m2[64,256]{1,0:T(8,128)(4,1)}, f32[64]{0}) fusion(%x.1, %one), calls=%fused
  %top.1 = f32[64]{0:T(128)} get-tuple-element(%f), index=1
  %k = f32[64]{0} custom-call(%top.1), custom_call_target="tpu_custom_call", config={"a": "(%"}
  %state.2 = (s32[], f32[64]{0}) tuple(%zero, %k)
  %loop = (s32[], f32[64]{0}) while(%state.2), condition=%condition, body=%body
  ROOT %out = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


class HloTest(parameterized.TestCase):
    def test_arrays(self):
        tuple_type = "(f32[8,128]{1,0:T(8,128)S(1)}, /*index=1*/s4[3]{0}, token[], f8e4m3fn[])"
        found = _hlo.arrays(tuple_type)
        self.assertEqual([a.shape for a in found], [(8, 128), (3,), ()])
        self.assertEqual([a.bytes for a in found], [4096, 2, 1])

    def test_parse(self):
        module = _hlo.parse_hlo(HLO)
        self.assertEqual(module.entry, "main")
        self.assertSameElements(
            module.computations, ["add.1", "fused", "body", "condition", "main"]
        )
        main = module.computations["main"]
        self.assertEqual(main["f"].opcode, "fusion")
        self.assertEqual(main["f"].operands, ("x.1", "one"))
        self.assertEqual(main["loop"].called("body", "condition"), ["body", "condition"])
        self.assertTrue(main["out"].root)

    def test_report(self):
        report = _hlo.report_of_hlo(HLO, rows=64)
        self.assertEqual(report.fused, {"tpu_custom_call": 1})
        wide, vector = 64 * 256 * 4, 64 * 4
        self.assertEqual(
            report.by_kind(),
            {
                "reduce": (1, wide),
                "clamp": (1, vector),
                "multiply": (1, wide),
                "convert": (2, 2 * wide),
            },
        )
        fusion = 64 * 256 * 2 + 4 + 64 * 256 + vector
        self.assertEqual(report.traffic, fusion + 4 * vector)

    def test_kernels_and_what_is_left(self):
        call = '%k.3.refs = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend={'
        call += '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}'
        text = HLO.replace("  %k = ", f"  {call}\n  %k = ").replace("%x.1 =", "%x =")
        (with_vmem, other) = _hlo.kernels(text)
        self.assertEqual(with_vmem, _hlo.Kernel("k", "k.3.refs", 4096))
        self.assertEqual(other.vmem, 0)
        report = _hlo.report_of_hlo(HLO, rows=64)
        self.assertEqual([op.opcode for op in report.narrow(64)], ["clamp"])

    def test_not_hlo(self):
        with self.assertRaisesRegex(ValueError, "ENTRY"):
            _hlo.parse_hlo("module @jit_f {\n}\n")

    @parameterized.parameters(
        ((64, 8), True), ((4, 16, 8), True), ((8, 4, 16), True), ((128, 8), False), ((), False)
    )
    def test_runs_over_rows(self, shape, expected):
        self.assertEqual(_hlo.runs_over_rows(_hlo.Array("f32", shape), 64), expected)


class DumpHloTest(parameterized.TestCase):
    @parameterized.product(op=["gmm", "tgmm_quant"], grad=(False, True), dense=(False, True))
    def test_jaxpr(self, op, grad, dense):
        flags = ["--grad"] * grad + ["--dense"] * dense
        code, out, _ = _run(
            dump_hlo.main, op, *flags, "--stage", "jaxpr", "--shape", "256,128,384,2"
        )
        self.assertEqual(code, 0)
        self.assertIn("fp8moe_", out)
        self.assertEqual("reduce_max" in out, dense and (grad or op == "tgmm_quant"))

    @parameterized.parameters(("stablehlo", "func.func public @main"), ("hlo", "ENTRY"))
    def test_stages(self, stage, expected):
        code, out, _ = _run(dump_hlo.main, "gmm", "--stage", stage, "--shape", "256,128,384,2")
        self.assertEqual(code, 0)
        self.assertIn(expected, out)
        if stage == "hlo":  # loops of plain ops, whose names say what they are of
            self.assertIn('/fp8moe_gmm/while"', out)

    def test_target(self):
        code, out, _ = _run(dump_hlo.main, "gmm", "--target", "tpu7x", "--shape", "512,256,128,2")
        self.assertEqual(code, 0)
        self.assertIn("tpu_custom_call", out)

    @parameterized.parameters("ring_all_gather", "ring_reduce_scatter", "quantize")
    def test_other_operations(self, op):
        for flags in ((), ("--grad",)):
            shape = ("--shape", "256,128,64,2", "--stage", "jaxpr")
            code, out, _ = _run(dump_hlo.main, op, *flags, *shape)
            self.assertEqual(code, 0)
            self.assertRegex(out, "fp8moe_ring" if op.startswith("ring") else "f8_e4m3fn")

    def test_ring_over_a_topology(self):
        where = ("--target", "v6e:2x2", "--shape", "256,128,64,2")
        code, out, _ = _run(dump_hlo.main, "ring_all_gather", *where, "--stage", "stablehlo")
        self.assertEqual(code, 0)
        self.assertIn("mhlo.num_partitions = 4", out)
        self.assertIn('kernel_name = "fp8moe_ring_all_gather"', out)

    def test_cuda(self):
        where = ("--target", "cuda", "--shape", "256,128,64,2", "--stage", "stablehlo")
        code, out, _ = _run(dump_hlo.main, "gmm", *where)
        self.assertEqual(code, 0)
        self.assertIn("func.func public @main", out)

    def test_mosaic(self):
        where = ("--target", "tpu7x", "--shape", "512,256,128,2", "--stage", "mosaic")
        code, out, _ = _run(dump_hlo.main, "gmm", "--grad", *where)
        self.assertEqual(code, 0)
        for name in ("fp8moe_gmm", "fp8moe_tgmm_quant"):
            self.assertIn(f"// kernel {name}", out)
        self.assertIn("tpu.matmul", out)

    def test_compare_prints_both(self):
        flags = ("--compare", "dense", "--stage", "jaxpr", "--shape", "256,128,64,2")
        code, out, _ = _run(dump_hlo.main, "gmm", "--grad", *flags)
        self.assertEqual(code, 0)
        ours, dense = out.split("#" * 30 + " dense")
        self.assertNotIn("reduce_max", ours)
        self.assertIn("reduce_max", dense)

    @parameterized.parameters(
        (("gnn",), "gnn.*choose from.*gmm"),
        (("gmm", "--target", "h100"), "h100.*choose from.*cpu.*tpu7x"),
        (("gmm", "--target", "cuda"), "cuda: up to --stage stablehlo"),
        (("gmm", "--stage", "llo"), "llo: the CPU has no kernels"),
        (("ragged_glu", "--compare", "dense"), "ragged_glu quantizes nothing"),
        (("my.module:make", "--shape", "8,8,8,8"), "--shape is for the operations by name"),
        (("gmm", "--shape", "12,7"), "--shape.*four integers m,k,n,g.*'12,7'"),
        (("gmm", "--shape", "a,b,c,d"), "--shape.*four integers m,k,n,g.*'a,b,c,d'"),
        (("gmm", "--shape", "0,8,8,1"), "--shape.*at least 1.*'0,8,8,1'"),
        (("gmm", "--summary", "--dense"), "--summary.*drop --dense"),
        (("gmm", "--summary", "--shape", "512,512,128,2"), "--summary: .*512 also appears as k of"),
        (("gmm", "--html", "x", "--shape", "1024,512,256,4"), "--html: .* 1024 .*as g . n of"),
        (
            ("gmm", "--summary", "--target", "tpu7x", "--shape", "1024,256,384,2"),
            "1024 also appears as the size to which XLA pads.*another m, such as 1032",
        ),
    )
    def test_refuses(self, argv, message):
        code, _, err = _run(dump_hlo.main, *argv)
        self.assertEqual(code, 2)
        self.assertRegex(err, message)

    def test_help_as_a_script(self):
        for tool in ("dump_hlo.py", "bench.py", "train.py"):
            done = subprocess.run(
                [sys.executable, str(ROOT / "tools" / tool), "--help"],
                check=True,
                capture_output=True,
                text=True,
                cwd=os.path.dirname(ROOT),
            )
            self.assertIn("usage: " + tool, done.stdout)

    @parameterized.parameters("cpu", "tpu7x")
    def test_summary(self, target):
        code, out, _ = _run(
            dump_hlo.main,
            *("gmm", "--grad", "--summary", "--target", target, "--shape", "200,256,384,2"),
        )
        self.assertEqual(code, 0)
        self.assertRegex(out, r"in_kernel +dense")
        self.assertRegex(out, r"convert +0, 0 B +[1-9]")
        self.assertRegex(out, r"temporaries \* ")
        self.assertRegex(out, rf"{'equation' if target == 'cpu' else 'kernel'}: fp8moe_gmm.* [12]")


QUANTIZING = ("reduce", "clamp", "multiply", "convert")


class NoDenseOpsTest(parameterized.TestCase):
    """The backward pass quantizes in its kernels: nothing runs over the buffer's rows outside."""

    @parameterized.parameters("gmm", "tgmm_quant")
    def test_jaxpr_of_the_gradient(self, op):
        """As traced, before any dead code is removed."""
        reports = {}
        for backward in dump_hlo.BACKWARDS:
            shape = dump_hlo.Shape(2048, 256, 384, 2)
            program = dump_hlo.build(op, shape, grad=True, backward=backward)
            jaxpr = jax.make_jaxpr(program.fn)(*program.args)
            reports[backward] = _hlo.report_of_jaxpr(jaxpr, program.rows)
            self.assertGreater(reports[backward].fused.total(), 0)
        self.assertEqual(reports["in_kernel"].row_ops, [])
        self.assertContainsSubset(QUANTIZING, reports["dense"].by_kind())

    @parameterized.parameters("ragged_gather", "ragged_gather_reduce", "ragged_glu", "moe")
    def test_jaxpr_moves_no_rows_outside(self, op):
        """What is left over the buffer's rows is a few integers and weights a row, no features."""
        shape = dump_hlo.Shape(2048, 256, 384, 16)
        program = dump_hlo.build(op, shape, grad=True)
        report = _hlo.report_of_jaxpr(jax.make_jaxpr(program.fn)(*program.args), program.rows)
        self.assertGreater(report.fused.total(), 0)
        self.assertLessEqual(max([op.bytes for op in report.row_ops], default=0), 2048 * 4 * 16)

    def test_v7x_program_of_both_gradients(self):
        """At a layer's size, in the optimized HLO; and next to no temporary memory."""
        shape = dump_hlo.Shape(32768, 7168, 2048, 8)
        summary = dump_hlo.summarize("gmm", shape, grad=True, backward="in_kernel", target="tpu7x")
        self.assertEqual(summary.report.fused["tpu_custom_call"], 2)
        self.assertNoCommonElements(QUANTIZING, summary.report.by_kind())
        self.assertLess(summary.temporaries, 0.05 * 2 * shape.m * shape.k)


if __name__ == "__main__":
    absltest.main()
