"""The example runs from end to end: a few steps of a smaller model, the table, the picture."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


class TrainMoeTest(absltest.TestCase):
    def setUp(self):
        with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
            import _model
            import train_moe

        self.example = train_moe
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for module, name, value in (
            (_model, "LAYERS", 1),  # most of a short run is compilation
            (train_moe, "LENGTH", 32),
            (train_moe, "EVALUATION_BATCHES", 2),
        ):
            self.enterContext(mock.patch.object(module, name, value))

    def run_main(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = self.example.main([*arguments, "--out", str(self.folder / "new" / "loss.png")])
        return code, out.getvalue()

    def test_short_run(self):
        runs = ("in_kernel", "bf16")
        code, out = self.run_main("--steps", "4", "--seed", "3", "--runs", ",".join(runs))
        self.assertEqual(code, 0, out)
        for name in runs:
            row = re.search(rf"^{name} +([\d.]+) +\S+% +([\d.]+) +\S+%$", out, re.MULTILINE)
            self.assertIsNotNone(row, f"no row for {name} in:\n{out}")
            self.assertTrue(all(0 < float(loss) < 8 for loss in row.groups()), out)
        if importlib.util.find_spec("matplotlib"):
            self.assertGreater((self.folder / "new" / "loss.png").stat().st_size, 1000)
        else:
            self.assertIn("matplotlib is not installed", out)

    def test_verdict(self):
        def verdict(**losses):
            results = {name: (np.full(3, loss), loss) for name, loss in losses.items()}
            with contextlib.redirect_stdout(io.StringIO()):
                return self.example.report(results)

        self.assertTrue(verdict(in_kernel=2.019, bf16=2.0))
        self.assertTrue(verdict(in_kernel=2.0))
        self.assertFalse(verdict(in_kernel=2.021, bf16=2.0))
        self.assertFalse(verdict(in_kernel=1.979, bf16=2.0))
        self.assertFalse(verdict(in_kernel=np.nan, bf16=2.0))
        self.assertFalse(verdict(in_kernel=np.inf))
        self.assertFalse(verdict(in_kernel=2.0, bf16=np.nan))

    def test_unknown_run(self):
        with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
            self.run_main("--runs", "bf16,fp4")
        self.assertIn("fp4", err.getvalue())


class MultihostTest(absltest.TestCase):
    def test_two_processes_equal_one(self):
        """Four devices each, collectives by gloo; the example compares the losses itself."""
        out = subprocess.run(
            [sys.executable, str(EXAMPLES / "multihost_moe.py")],
            env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
        )
        self.assertEqual(out.returncode, 0, out.stderr[-2000:])
        self.assertIn("2 processes", out.stdout)


if __name__ == "__main__":
    absltest.main()
