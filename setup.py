"""Packaging. ``lowering/`` lies at the top of the checkout and inside the package in a wheel."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'"(.+)"', (ROOT / "fp8moe_prims" / "version.py").read_text()).group(1)

LOWERING = ["fp8moe_prims.lowering"] + [
    f"fp8moe_prims.lowering.{name}" for name in find_packages(ROOT / "lowering")
]

setup(
    name="fp8moe_prims",
    version=VERSION,
    description="fp8 mixture-of-experts training in JAX: its operations as real primitives",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    install_requires=["jax>=0.10.2", "jaxlib>=0.10.2", "numpy", "ml_dtypes", "absl-py"],
    extras_require={
        # pytest-xdist: both cores; hypothesis: the fuzzer; libtpu: ahead-of-time compilation;
        # flatbuffers: jax.export; build: the wheel
        "test": ["pytest", "pytest-xdist", "hypothesis", "libtpu", "flatbuffers", "build"],
        # to hold our drop-in forms against those libraries; they need Python 3.12
        "interop": [f"{name}; python_version >= '3.12'" for name in ("qwix", "tokamax==0.0.17")],
        "tpu": ["libtpu"],  # to compile for TPU
        "plots": ["matplotlib"],  # the examples' and benchmarks' pictures
    },
    packages=["fp8moe_prims", "fp8moe_prims.compat", *LOWERING],
    package_dir={"fp8moe_prims": "fp8moe_prims", "fp8moe_prims.lowering": "lowering"},
    package_data={"fp8moe_prims": ["py.typed"]},
)
