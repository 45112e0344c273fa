"""Trains the layer of sharded_moe.py with several processes, under jax.distributed.

    python examples/multihost_moe.py          # two processes of four CPU devices on this machine
    python examples/multihost_moe.py --pod    # on each host of a TPU pod, at the same time

The first form starts both processes (collectives by gloo), then the same training in one process
with eight devices, and exits with an error unless the losses are the same.
"""

import argparse
import os
import socket
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def train_here() -> list[float]:
    """The losses, on all devices of all processes."""
    import jax
    import numpy as np
    import sharded_moe
    from jax.sharding import NamedSharding

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("expert",))
    forward, param_specs, row_spec = sharded_moe.over(mesh)
    params, x, target = sharded_moe.init()  # the same on every process; each keeps its shards

    def place(value, spec):
        value = np.asarray(value)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    params = jax.tree.map(place, params, param_specs)
    return sharded_moe.train(forward, params, place(x, row_spec), place(target, row_spec))


def run_process(process: int | None, count: int, port: int) -> None:
    """One of ``count`` processes; or all of it in one, where process is None."""
    devices = 8 if process is None else 8 // count
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    if process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, process)
    losses = train_here()
    if process in (None, 0):
        print("losses", *(f"{loss:.6f}" for loss in losses))


def compare(count: int = 2) -> None:
    """Starts the processes, then one alone, and compares their losses."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    start = lambda process: subprocess.Popen(
        [sys.executable, __file__, "--process", str(process), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    many = [start(process) for process in range(count)]
    outputs = [p.communicate()[0] for p in many]
    one = start("one")
    outputs.append(one.communicate()[0])
    if any(p.returncode for p in (*many, one)):
        raise SystemExit("a process failed")

    def losses(output):  # gloo prints on the same stream
        line = next(line for line in output.splitlines() if line.startswith("losses "))
        return [float(x) for x in line.split()[1:]]

    several, alone = losses(outputs[0]), losses(outputs[-1])
    print(f"step   {count} processes   1 process")
    for step in sorted({*range(0, len(alone), 4), len(alone) - 1}):
        print(f"{step:4d}   {several[step]:11.5f}   {alone[step]:9.5f}")
    if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(several, alone, strict=True)):
        raise SystemExit("the losses differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pod", action="store_true", help="this host is one of a TPU pod")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pod:
        import jax

        jax.distributed.initialize()
        losses = train_here()
        if jax.process_index() == 0:
            print("losses", *(f"{loss:.6f}" for loss in losses))
    elif options.process is None:
        compare()
    else:
        process = None if options.process == "one" else int(options.process)
        run_process(process, 2, options.port)


if __name__ == "__main__":
    main()
