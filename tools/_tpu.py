"""Ahead-of-time compilation for TPU topologies, without a TPU; shared by the tools."""

import os

TOPOLOGIES = {
    "tpu7x": "tpu7x:2x2x1",
    "v6e": "v6e:2x2",
    "v5p": "v5p:2x2x1",
    "v5e": "v5e:2x2",
}


def set_environment() -> None:
    """Keeps JAX on the CPU and libtpu from looking for a TPU; before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def devices(topology: str):
    """The devices of a topology such as "tpu7x:2x2x1", or of the smallest one of a chip ("v6e").

    Raises:
      SystemExit: libtpu is missing, or does not know the topology.
    """
    from jax.experimental import topologies

    try:
        name = TOPOLOGIES.get(topology, topology)
        return topologies.get_topology_desc(name, platform="tpu").devices
    except Exception as e:
        raise SystemExit(f"{topology} needs the TPU compiler: pip install libtpu ({e})") from e
