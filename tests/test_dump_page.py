"""dump_hlo.py: functions of the user's, the page to browse, and the machine code."""

import html.parser
import json
import os
import pathlib
import re
import tempfile

from absl.testing import absltest, parameterized

from tests.helpers import run_tool as _run
from tools import _html, _llo, _tpu, dump_hlo

USERS = """
import jax.numpy as jnp
import fp8moe_prims as fp8

def make(backward):
    recipe = fp8.QuantRecipe(backward=backward)
    args = jnp.ones((300, 128)), jnp.ones((2, 128, 64)), jnp.ones(2, jnp.int32)
    return lambda *a: fp8.gmm(*a, recipe=recipe), args

def one_sided():
    return jnp.sin, (jnp.ones(3),)

def wrong():
    return jnp.sin

def of_1024_rows():
    return jnp.sin, (jnp.ones((1024, 8)),)
"""


class UsersFunctionTest(absltest.TestCase):
    def setUp(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.file = os.path.join(folder, "mine.py")
        pathlib.Path(self.file).write_text(USERS)

    def test_summary_of_both_sides(self):
        flags = ("--grad", "--compare", "dense", "--summary")
        code, out, err = _run(dump_hlo.main, f"{self.file}:make", *flags)
        self.assertEqual(code, 0, err)
        self.assertIn("over the buffer's 300 rows", out)
        self.assertRegex(out, r"equation: fp8moe_tgmm_quant +1 +1")
        self.assertIn(f"{self.file}:make, gradients, cpu\n", out)
        self.assertEqual(err, "")

    def test_rows_that_tables_are_padded_to(self):
        code, out, err = _run(
            dump_hlo.main, f"{self.file}:of_1024_rows", "--summary", "--target", "v5e"
        )
        self.assertEqual(code, 0, err)
        self.assertIn(f"{self.file}:of_1024_rows, v5e\n", out)
        self.assertRegex(err, "warning: .*1024 also appears as the size to which XLA pads")

    def test_refuses(self):
        for name, flags, message in (
            ("one_sided", ("--compare", "dense"), "no parameter named backward"),
            ("wrong", (), r"must return \(fn, args\)"),
            ("absent", (), r"mine.py has no function 'absent'"),
        ):
            _, _, err = _run(dump_hlo.main, f"{self.file}:{name}", "--stage", "jaxpr", *flags)
            self.assertRegex(err, message)

    def test_modules_that_are_not_found(self):
        _, _, err = _run(dump_hlo.main, "no.mine:make", "--stage", "jaxpr")
        self.assertIn("no module named 'no.mine'; give a path, no/mine.py:make", err)
        pathlib.Path(self.file).write_text("import absent_one")
        _, _, err = _run(dump_hlo.main, f"{self.file}:make", "--stage", "jaxpr")
        self.assertRegex(err, r"mine.py:make: No module named 'absent_one'\n")

    def test_topology_that_libtpu_does_not_know(self):
        self.assertTrue(_tpu.is_topology("tpu7x:4x4x4"))
        _, _, err = _run(dump_hlo.main, "gmm", "--target", "v6e:3x5x7")
        self.assertRegex(err, "v6e:3x5x7: libtpu knows no such topology")


class PageParser(html.parser.HTMLParser):
    """Counts what a page has."""

    def __init__(self, text):
        super().__init__()
        self.sides, self.nodes, self.ids, self.links, self.open = [], [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [(tag, k) for k in attrs if k in ("src", "href", "action", "data", "poster")]
        self.ids.add(attrs.get("id"))
        if "data-side" in attrs:
            self.sides.append(attrs["data-side"])
        if "data-node" in attrs:
            self.nodes.append((attrs["data-node"], attrs["class"].split()[1]))
        if tag not in ("meta", "path", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "path", "rect"):
            assert self.open.pop() == tag, tag


class PageTest(parameterized.TestCase):
    @parameterized.parameters("cpu", "tpu7x")
    def test_page(self, target):
        path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "page.html")
        flags = ("--grad", "--compare", "dense", "--html", path, "--target", target)
        code, _, err = _run(dump_hlo.main, "gmm", *flags, "--shape", "200,256,384,2")
        self.assertEqual(code, 0, err)
        text = pathlib.Path(path).read_text()
        page = PageParser(text)
        self.assertEqual(page.sides, ["in_kernel", "dense"])
        self.assertEqual(page.open, [])
        # Nothing from elsewhere: no link, no address, and a policy that forbids both.
        self.assertEqual(page.links, [])
        self.assertNotRegex(text, r"https?://|@import|url\(")
        self.assertIn("default-src 'none'", text)
        for side in ("s0", "s1"):
            kinds = [kind for name, kind in page.nodes if name.startswith(side)]
            self.assertEqual(kinds.count("ours"), 2)
            self.assertEqual("dense" in kinds, side == "s1")
        # What the script shows of a box, and, of a kernel, its line in the HLO.
        details = json.loads(re.search(r'id="details">(.*?)</script>', text)[1])
        self.assertEqual(set(details), {name for name, _ in page.nodes})
        if target == "tpu7x":
            self.assertContainsSubset([n for n, kind in page.nodes if kind == "ours"], page.ids)

    def test_clean(self):
        line = '%k = f32[8] call(%x), metadata={op_name="a}{"}, backend_config={"a":{"b":1}}, c=1'
        self.assertEqual(_html.clean(line), "%k = f32[8] call(%x), c=1")


class LloTest(absltest.TestCase):
    def test_loops_and_use(self):
        bundles = """
0x1 : { %a = x }
0x2 LB: > { %b = y } /* Start region 5 */
0x3 : > { %c = z }
0x4 LE: > { sbr.rel (%p) target = $region5 }
0x5 : { %d = w }
"""
        row = "{} 0 0 {} 0 0 0 0 0 0 0\n"
        use = "== CAPACTIY:\n2 2 2 4 2 1 3 3 2 2 2\n== UTILIZATION:\n"
        use += "".join(row.format(*x) for x in ((0, 0), (2, 4), (2, 0), (0, 0), (0, 0)))
        code = _llo.parse("fp8moe_gmm.1", bundles, use)
        whole, loop = code.loops
        self.assertEqual((whole.bundles, loop.bundles, loop.depth), (2, 3, 1))
        self.assertEqual((loop.first, loop.last), ("0x2", "0x4"))
        self.assertAlmostEqual(loop.use["MXU"], 2 / 3)
        self.assertAlmostEqual(loop.use["VALU"], 1 / 3)
        self.assertIn("fp8moe_gmm.1: 5 bundles", _llo.table([code]))

    def test_of_a_kernel(self):
        where = ("--target", "tpu7x", "--shape", "256,128,128,2", "--stage", "llo")
        code, out, err = _run(dump_hlo.main, "gmm", *where)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"fp8moe_gmm\S*: [1-9]\d* bundles")
        self.assertRegex(out, r"loop +cycles +MXU +VALU")
        self.assertIn("vmatmul", out)


if __name__ == "__main__":
    absltest.main()
