"""Compares the fused operations with the dense quantize chain around ``jax.lax.ragged_dot``.

    python tools/bench.py cpu [--sweep buffer|rows|experts] [--json FILE] [--png FILE]
    python tools/bench.py layer [--json FILE]
    python tools/bench.py tpu [--chip NAME] [--tilings | --projection] [--json FILE]

`cpu` times ours, the dense chain and an unquantized ragged_dot on this machine, in one run,
repetition by repetition in turn. Only ratios mean something: the absolute times are this machine's,
under whatever else it was doing.

`layer` compiles the expert-parallel layer ahead of time for a TPU topology, with both backwards,
and prints the temporaries and collectives that the compiler reports. With `--target cpu` it times
the layer instead, over as many host devices, on buffers of each factor.

`tpu` compiles the grouped matmul kernels for a v7x core (or `--chip`), counts the cycles of whole
calls in the compiler's schedule and compares them with the floors of the MXU and of HBM. With
`--tilings` it counts each call with other tiles than the chosen ones too; with `--projection` it
compares a whole projection, forward and both gradients, with the dense chains around such kernels.
"""

import argparse
import importlib.util
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _bench_cpu, _bench_layer, _bench_projection, _bench_tilings, _bench_tpu, _tpu

# ------------------------------------------------------------------------------ command line


class Progress:
    """A bar on standard error, rewritten in place; plain lines where that is no terminal."""

    def __init__(self):
        self.done, self.total, self.live = 0, 1, sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Says what begins now."""
        filled = 30 * self.done // self.total
        bar = f"[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total} {text}"
        end = "" if self.live else "\n"
        print(("\r\033[K" if self.live else "") + bar, end=end, file=sys.stderr, flush=True)
        self.done += 1

    def end(self) -> None:
        self("done")
        if self.live:
            print(file=sys.stderr)


def run_cpu(options) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("bench: --png needs matplotlib: .venv/bin/pip install '.[plots]'")
    rows = _bench_cpu.measure(options, Progress())
    print(_bench_cpu.table(rows, options))
    if options.json:
        import jax

        head = {"benchmark": "cpu", "sweep": options.sweep, "repetitions": options.repetitions}
        _write_json(options, head | {"jax": jax.__version__, "table": rows})
    if options.png:
        _bench_cpu.write_png(rows, options, options.png)


def _add_cpu(commands) -> None:
    cpu = commands.add_parser(
        "cpu",
        help="time ours against the dense chain and ragged_dot on this machine's CPU",
        description="Times ours against the dense quantize chain and unquantized ragged_dot on this"
        " machine's CPU, forward and both gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cpu.set_defaults(run=run_cpu)
    sweeps = _bench_cpu.SWEEPS
    cpu.add_argument("--sweep", choices=sweeps, default="buffer", help="what is varied")
    cpu.add_argument(
        "--values",
        type=_factors,
        metavar="V,V,...",
        help="its values; growth is relative to the first. Defaults: "
        + "; ".join(f"{name} {s.values}" for name, s in sweeps.items()),
    )
    for name, text in (
        ("k", "contraction"),
        ("n", "output features; default: k"),
        ("groups", "experts"),
        ("rows", "valid rows"),
        ("factor", "buffer rows / valid rows"),
    ):
        cpu.add_argument(f"--{name}", type=_positive, help=f"{text}; by default the sweep's")
    cpu.add_argument("--repetitions", type=_positive, default=3, help="of everything, in turn")
    _add_json(cpu)
    cpu.add_argument("--png", metavar="FILE", help="write a picture there (extra: plots)")


def run_layer(options) -> None:
    on_cpu = options.target == "cpu"
    if on_cpu:
        _bench_layer.force_host_devices(options.ep)
    else:
        _tpu.set_environment()
    measure = _bench_layer.time_on_cpu if on_cpu else _bench_layer.compile_for_tpu
    rows = measure(options, _say)
    print((_bench_layer.cpu_table if on_cpu else _bench_layer.tpu_table)(rows, options))
    _write_json(options, {"benchmark": "layer", "target": options.target, "table": rows})


def _add_layer(commands) -> None:
    layer = commands.add_parser(
        "layer",
        help="memory of the expert-parallel layer, compiled for TPUs",
        description="Compiles the expert-parallel layer, forward and all gradients, for a TPU"
        " topology, with both backwards; or times it over host devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    layer.set_defaults(run=run_layer)
    _bench_layer.add_arguments(layer, _positive)
    _add_json(layer)


def run_tpu(options) -> None:
    _tpu.set_environment()
    name, bench = "tpu", _bench_tpu
    if options.projection:
        name, bench = "projection", _bench_projection
    elif options.tilings:
        name, bench = "tilings", _bench_tilings
    rows = bench.measure(options, _say)
    print(bench.table(rows, options))
    _write_json(options, {"benchmark": name, "table": rows})


def _add_tpu(commands) -> None:
    tpu = commands.add_parser(
        "tpu",
        help="cycles of the kernels on a TPU core, by its compiler",
        description="Compares calls of the grouped matmul kernels with the floors of the MXU and of"
        " HBM, by following the TPU compiler's program; nothing is run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    tpu.set_defaults(run=run_tpu)
    _bench_tpu.add_arguments(tpu, _positive)
    _add_json(tpu)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def _write_json(options, content: dict) -> None:
    if options.json:
        with open(options.json, "w") as f:
            json.dump(content, f, indent=2)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"takes a positive integer, got {text!r}")
    return value


def _factors(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="benchmarks", dest="command", required=True)
    for add in (_add_cpu, _add_layer, _add_tpu):
        add(commands)
    options = parser.parse_args(argv)
    if options.command == "cpu" and options.values is None:
        options.values = _factors(_bench_cpu.SWEEPS[options.sweep].values)
    return options


def main(argv=None) -> None:
    options = parse_arguments(argv)
    options.run(options)


if __name__ == "__main__":
    main()
