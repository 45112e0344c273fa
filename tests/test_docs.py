"""The code blocks of the README and of docs/ run; each public operation has its page."""

import pathlib
import re

from absl.testing import absltest, parameterized

import fp8moe_prims as fp8

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


class DocsTest(parameterized.TestCase):
    @parameterized.named_parameters((str(p.relative_to(ROOT)), p) for p in PAGES)
    def test_code_runs(self, page):
        names = {}
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            exec(compile(block, page.name, "exec"), names)

    @parameterized.named_parameters((str(p.relative_to(ROOT)), p) for p in PAGES)
    def test_links_lead_somewhere(self, page):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                self.assertTrue((page.parent / link).exists(), f"{page.name}: {link}")

    def test_every_public_name_is_on_a_page(self):
        text = "".join(p.read_text() for p in PAGES if p.parent.name == "docs")
        names = [n for n in dir(fp8) if callable(getattr(fp8, n)) and not n.startswith("_")]
        self.assertEqual([n for n in names if not re.search(rf"\b{n}\b", text)], [])


if __name__ == "__main__":
    absltest.main()
