"""Ahead-of-time compilation for TPU topologies, without a TPU; shared by the tools."""

import os
import re

TOPOLOGIES = {
    "tpu7x": "tpu7x:2x2x1",
    "v6e": "v6e:2x2",
    "v5p": "v5p:2x2x1",
    "v5e": "v5e:2x2",
    "v4": "v4:2x2x1",
}


def is_topology(text: str) -> bool:
    """Whether it is the name of a chip, or looks like that of a topology."""
    return text in TOPOLOGIES or re.fullmatch(r"\w+:\d+(x\d+)+", text) is not None


def set_environment(host_devices: int | None = None) -> None:
    """Keeps JAX on the CPU and libtpu from looking for a TPU; before jax is imported.

    host_devices: how many devices the CPU looks like, unless XLA_FLAGS says something.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if host_devices:
        count = f"--xla_force_host_platform_device_count={host_devices}"
        os.environ.setdefault("XLA_FLAGS", count)
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
        if "INVALID_ARGUMENT" in str(e):
            raise SystemExit(f"{topology}: libtpu knows no such topology ({e})") from e
        raise SystemExit(
            f"{topology} needs the TPU compiler: .venv/bin/pip install '.[tpu]' ({e})"
        ) from e


def ring_order(devices) -> list:
    """TPU devices in an order in which each is next to the one before: there and back again.

    Where the last one is next to the first, that is a ring: with wrap-around links, or two rows.
    """
    if any(getattr(d, "coords", None) is None for d in devices):
        return list(devices)

    def place(d):
        x, y, z = d.coords
        row = y if z % 2 == 0 else -y
        return z, row, x if (y + z) % 2 == 0 else -x, getattr(d, "core_on_chip", 0)

    return sorted(devices, key=place)
