"""Trains the example's language model over and over, and compares what quantization does to it.

    python tools/train.py [--steps 500] [--json FILE] [--png FILE]

Every run starts from the same parameters and sees the same batches of real text (the Python
library's sources); the experts are spread over two host devices and nothing is ever dropped, so
that half of each device's buffer holds rows of no expert. The last run fills those rows with NaN,
values and cotangents alike: its losses must be the same, bit for bit. How far apart two runs come
by rounding alone shows a dense run whose first parameters are multiplied by 1 + 1e-6.

The exit code is 1 if a loss is not finite, an in-kernel run is more than 1% from the dense one at
an evaluation, or the NaNs change a loss.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import sys
import time
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _bench_layer

DEVICES = 2
TOLERANCE = 0.01
DENSE, PLAIN = "dense e5m2", "in_kernel e5m2"
NUDGED, POISONED = "dense e5m2, nudged", "in_kernel e5m2, NaN tail"
NUDGE = 1e-6


def recipes():
    """name -> recipe of each run, in the order of the table."""
    import fp8moe_prims as fp8

    return {
        "bf16": None,
        DENSE: fp8.QuantRecipe(backward="dense"),
        NUDGED: fp8.QuantRecipe(backward="dense"),
        PLAIN: fp8.QuantRecipe(),
        "in_kernel e4m3": fp8.QuantRecipe(grad_dtype="e4m3"),
        POISONED: fp8.QuantRecipe(),
    }


# ------------------------------------------------------------------------------- the layer


def sharded_layer(fill: float | None = None):
    """moe_ffn(x, logits, w_gate, w_up, w_down, config=) over DEVICES devices.

    fill: what the buffer's rows of no expert are filled with after each operation, and those of the
    cotangents before each operation's derivative; None: nothing.
    """
    import dataclasses

    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import fp8moe_prims as fp8

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    rows = P("expert")

    def moe(*args, config):
        config = dataclasses.replace(config, ep_axis="expert")
        local = functools.partial(fp8.moe.moe_ffn, config=config)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(rows,) * len(args), out_specs=(rows, P())
        )
        with contextlib.nullcontext() if fill is None else filled_tails(fill):
            return mapped(*args)

    return moe


@contextlib.contextmanager
def filled_tails(value: float):
    """While the layer is traced: value in every row that an operation leaves to no expert."""
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    def wrapped(name, end_of):
        operation = getattr(fp8.moe, name)

        def call(*args, **options):
            return fill_tail(operation(*args, **options), end_of(args, options), value)

        return mock.patch.object(fp8.moe, name, call)

    given = lambda args, options: options["end"]
    with (
        wrapped("ragged_gather", given),
        wrapped("ragged_glu", given),
        wrapped("gmm", lambda args, options: jnp.sum(args[2])),
    ):
        yield


def fill_tail(x, end, value: float):
    """x [m, ...] or a QArray with value in the rows from end on, and in those of its cotangent."""
    import jax
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    def fill(a, end):
        tail = jnp.arange(a.shape[0], dtype=jnp.int32) >= end
        tail = tail.reshape((-1,) + (1,) * (a.ndim - 1))
        return jnp.where(tail, jnp.full((), value, a.dtype), a)

    both = jax.custom_vjp(fill)
    both.defvjp(lambda a, end: (fill(a, end), end), lambda end, ct: (fill(ct, end), None))
    if not hasattr(x, "qvalue"):
        return both(x, end)
    qvalue, scale = (fill(jax.lax.stop_gradient(a), end) for a in (x.qvalue, x.scale))
    return fp8.QArray(qvalue, scale, None if x.carrier is None else both(x.carrier, end))


# ----------------------------------------------------------------------------------- the runs


def train_all(names, steps: int, every: int, seed: int, rate: float):
    """name -> (training losses [steps], held-out losses by step)."""
    sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    import _model
    import _text
    import train_moe

    text, held_out = _text.load()
    results = {}
    for name in names:
        results[name] = train_moe.train(
            name,
            recipes()[name],
            text,
            held_out,
            steps=steps,
            seed=seed,
            every=every,
            rate=rate,
            init=_nudged_init if name == NUDGED else _model.init,
            moe=sharded_layer(math.nan if name == POISONED else None),
        )
    return results


def _nudged_init(*args):
    import _model
    import jax
    import numpy as np

    return jax.tree.map(lambda p: p * np.float32(1 + NUDGE), _model.init(*args))


def distances(results) -> dict[str, float]:
    """name -> largest relative distance of a held-out loss from the dense run's; NaN counts."""
    reference = results[DENSE][1]
    out = {}
    for name, (_, losses) in results.items():
        apart = [abs(loss / reference[step] - 1) for step, loss in losses.items()]
        out[name] = math.nan if any(math.isnan(d) for d in apart) else max(apart)
    return out


def faults(results) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    found = []
    for name, (training, held_out) in results.items():
        if not all(math.isfinite(x) for x in (*training, *held_out.values())):
            found.append(f"{name}: a loss is not finite")
    if DENSE in results:
        for name, distance in distances(results).items():
            if name.startswith("in_kernel") and not distance <= TOLERANCE:
                found.append(f"{name}: {distance:.2%} from {DENSE}")
    if PLAIN in results and POISONED in results:
        same = list(results[PLAIN][0]) == list(results[POISONED][0])
        if not same or results[PLAIN][1] != results[POISONED][1]:
            found.append(f"the losses of {POISONED} are not those of {PLAIN}")
    return found


# -------------------------------------------------------------------------------- the reports


def table(results) -> str:
    """Markdown: held-out loss of each run at each evaluation, and the largest distance."""
    names = list(results)
    lines = ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for step in next(iter(results.values()))[1]:
        cells = [f"{results[n][1][step]:.4f}" for n in names]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    if DENSE in results:
        cells = [f"{d:.2%}" for d in distances(results).values()]
        lines.append(f"| largest distance from {DENSE} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_png(results, path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, (_, losses)), style in zip(
        results.items(), ("-", "--", (0, (5, 5)), "-.", (0, (3, 1, 1, 1)), ":"), strict=False
    ):
        left.plot(list(losses), list(losses.values()), linestyle=style, label=name)
        if DENSE in results:
            apart = [100 * (x / results[DENSE][1][step] - 1) for step, x in losses.items()]
            right.plot(list(losses), apart, linestyle=style)
    left.set(xlabel="step", ylabel="held-out loss, nats per byte")
    right.set(xlabel="step", ylabel=f"distance from {DENSE}, %", ylim=(-1.2, 1.2))
    right.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, alpha=0.1, color="gray")
    left.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def parse_arguments(argv=None) -> argparse.Namespace:
    names = ("bf16", DENSE, NUDGED, PLAIN, "in_kernel e4m3", POISONED)
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of each run (%(default)s)")
    parser.add_argument(
        "--every", type=int, default=50, help="steps to an evaluation (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--rate", type=float, default=5e-4, help="highest learning rate (%(default)s)"
    )
    parser.add_argument(
        "--runs",
        default=";".join(names),
        help="some of these, separated by semicolons (default: all): %(default)s",
    )
    parser.add_argument("--json", metavar="FILE", help="write every loss there")
    parser.add_argument("--png", metavar="FILE", help="write a picture there (extra: plots)")
    options = parser.parse_args(argv)
    options.runs = [name.strip() for name in options.runs.split(";")]
    if unknown := [name for name in options.runs if name not in names]:
        parser.error(f"--runs: takes some of {'; '.join(names)}, got {'; '.join(unknown)}")
    if min(options.steps, options.every) < 1:
        parser.error("--steps and --every must be at least 1")
    return options


def main(argv=None) -> int:
    options = parse_arguments(argv)
    _bench_layer.force_host_devices(DEVICES)
    start = time.perf_counter()
    results = train_all(options.runs, options.steps, options.every, options.seed, options.rate)
    seconds = time.perf_counter() - start
    print(f"\nheld-out loss, seed {options.seed}, rate {options.rate:g}; {seconds:.0f} s\n")
    print(table(results))
    wrong = faults(results)
    print("\n" + "\n".join(f"Failed: {w}" for w in wrong) if wrong else "\nAll as it should be.")
    if options.json:
        runs = {n: {"training": list(t), "held_out": h} for n, (t, h) in results.items()}
        with open(options.json, "w") as f:
            json.dump(
                {"steps": options.steps, "seed": options.seed, "rate": options.rate, "runs": runs},
                f,
                indent=1,
            )
    if options.png:
        write_png(results, options.png)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
