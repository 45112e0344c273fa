"""Wheel and sdist hold everything, the import is light, the README's table is the registry's."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from absl.testing import absltest

ROOT = Path(__file__).parent.parent
LOWERING = ROOT / "lowering"


def _python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, **kwargs
    ).stdout


class PackageTest(absltest.TestCase):
    def test_sdist_and_wheel(self):
        """The wheel is built from the sdist, so that what this lacks shows."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "build", "--outdir", folder, str(ROOT)]
            subprocess.run(command, check=True, capture_output=True)
            (wheel,) = Path(folder).glob("*.whl")
            names = zipfile.ZipFile(wheel).namelist()
            modules = [str(p.relative_to(ROOT)) for p in (ROOT / "fp8moe_prims").rglob("*.py")]
            modules += [f"fp8moe_prims/{p.relative_to(ROOT)}" for p in LOWERING.rglob("*.py")]
            self.assertEqual(sorted(n for n in names if n.endswith(".py")), sorted(modules))
            self.assertIn("fp8moe_prims/py.typed", names)
            # Import from the wheel alone, away from the checkout.
            code = (
                f"import sys; sys.path.insert(0, {str(wheel)!r}); sys.modules['libtpu'] = None;"
                "import fp8moe_prims as f;"
                "import jax.numpy as jnp; assert '.whl' in f.__file__;"
                "print(f.gmm(jnp.ones((4, 8)), jnp.ones((1, 8, 2)), jnp.array([4])).sum())"
            )
            self.assertIn("64.0", _python(code, cwd=folder))

    def test_import_loads_no_pallas(self):
        code = "import sys, fp8moe_prims; print([m for m in sys.modules if 'pallas' in m])"
        self.assertEqual(_python(code, cwd=ROOT).strip(), "[]")

    def test_lowering_refuses_another_name(self):
        with self.assertRaises(subprocess.CalledProcessError) as raised:
            _python("import lowering", cwd=ROOT)
        self.assertIn("fp8moe_prims.lowering", raised.exception.stderr)

    def test_private_jax_in_one_module(self):
        users = {
            str(path.relative_to(ROOT))
            for folder in ("fp8moe_prims", "lowering")
            for path in (ROOT / folder).rglob("*.py")
            if "jax._src" in path.read_text() or "jax.interpreters" in path.read_text()
        }
        self.assertEqual(users, {"fp8moe_prims/_primitive.py"})

    def test_table_in_readme_is_the_registrys(self):
        table = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "rules_table.py")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        self.assertIn(table, (ROOT / "README.md").read_text())


if __name__ == "__main__":
    absltest.main()
