"""Compares the fused operations with the dense quantize chain around ``jax.lax.ragged_dot``.

    python tools/bench.py cpu [--json FILE] [--png FILE]
    python tools/bench.py layer [--json FILE]

`cpu` times both sides on this machine, in one run, repetition by repetition in turn. Only ratios
mean something: the absolute times are this machine's, under whatever else it was doing.

`layer` compiles the expert-parallel layer ahead of time for a TPU topology, with both backwards,
and prints the temporaries and collectives that the compiler reports. With `--target cpu` it times
the layer instead, over as many host devices, on buffers of each factor.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _bench_layer, _tpu

# ---------------------------------------------------------------------------- the dense chain


def dense_gmm():
    """The grouped matmul as frameworks quantize it today: (lhs, rhs, sizes) -> out.

    XLA ops around `ragged_dot`, each over the whole buffer: rows of no group are masked, then
    absmax, scale, clamp, convert, in forward (lhs per row, rhs per expert and channel) and backward
    (the cotangent per row for dlhs; both sides per channel for drhs). Quantized values are widened
    to float32 for the products, which XLA on CPU multiplies fastest.
    """
    import jax
    import jax.numpy as jnp

    act, grad = jnp.float8_e4m3fn, jnp.float8_e5m2
    weight_gradient = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )

    def quantize(x, dtype, axis):
        """(float32 values on the grid of dtype, scale), one scale along axis."""
        x, top = x.astype(jnp.float32), float(jnp.finfo(dtype).max)
        absmax = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
        scale = jnp.where(absmax == 0, 1.0, absmax / top)
        return jnp.clip(x / scale, -top, top).astype(dtype), scale

    def mask(x, sizes):
        return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.zeros_like(x))

    def dot(a, b, sizes):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jax.lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)

    def by_row(scale, sizes, m):
        """[m, n] of the scale [g, 1, n] of each row's expert."""
        return jnp.repeat(scale[:, 0], sizes, axis=0, total_repeat_length=m)

    @jax.custom_vjp
    def gmm(lhs, rhs, sizes):
        return forward(lhs, rhs, sizes)[0]

    def forward(lhs, rhs, sizes):
        x, x_scale = quantize(mask(lhs, sizes), act, axis=1)
        w, w_scale = quantize(rhs, act, axis=1)
        out = dot(x, w, sizes) * x_scale * by_row(w_scale, sizes, lhs.shape[0])
        return out.astype(lhs.dtype), (lhs, w, w_scale, sizes)

    def backward(saved, dout):
        lhs, w, w_scale, sizes = saved
        dout = mask(dout, sizes)
        scaled = dout.astype(jnp.float32) * by_row(w_scale, sizes, lhs.shape[0])
        d, d_scale = quantize(scaled, grad, axis=1)
        dlhs = dot(d, jnp.swapaxes(w, 1, 2), sizes) * d_scale
        x, x_scale = quantize(mask(lhs, sizes), act, axis=0)
        d, d_scale = quantize(dout, grad, axis=0)
        drhs = jax.lax.ragged_dot_general(
            x.astype(jnp.float32),
            d.astype(jnp.float32),
            sizes,
            weight_gradient,
            preferred_element_type=jnp.float32,
        )
        drhs = drhs * jnp.swapaxes(x_scale, 0, 1)[None] * d_scale[None]
        return dlhs.astype(lhs.dtype), drhs.astype(lhs.dtype), None

    gmm.defvjp(forward, backward)
    return gmm


# ------------------------------------------------------------------------------- measuring

SHORT_ROUNDS = 3  # of our side, for one of the dense chain


def forward_and_gradients(gmm):
    """jitted (lhs, rhs, sizes, dout) -> (out, dlhs, drhs)."""
    import jax

    def both(lhs, rhs, sizes, dout):
        out, vjp = jax.vjp(lambda lhs, rhs: gmm(lhs, rhs, sizes), lhs, rhs)
        return out, *vjp(dout)

    return jax.jit(both)


def problem(factor, options):
    """(lhs, rhs, sizes, dout) on a buffer of factor * valid rows, the tail holding large values."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    m, k, n, g = factor * options.rows, options.k, options.n, options.groups
    sizes = rng.multinomial(options.rows, np.full(g, 1 / g)).astype(np.int32)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    rhs = make(g, k, n)
    lhs, dout = make(options.rows, k), make(options.rows, n)
    tail = lambda x: jnp.concatenate(
        [x, jnp.full((m - options.rows, x.shape[1]), 1e30, x.dtype)], axis=0
    )
    return tail(lhs), rhs, jnp.asarray(sizes), tail(dout)


def check_equal(ours, dense):
    """Raises RuntimeError unless both sides computed the same, to the precision of float8."""
    import numpy as np

    for name, a, b in zip(("out", "dlhs", "drhs"), ours, dense, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not error < 0.15:
            raise RuntimeError(f"the two sides disagree on {name}: relative distance {error:.3g}")


def measure_cpu(options, say):
    """One row per buffer: minima and medians, in seconds, of ours, the dense chain and filling."""
    import jax

    import fp8moe_prims as fp8

    recipe = fp8.QuantRecipe()
    ours = forward_and_gradients(lambda *a: fp8.gmm(*a, recipe=recipe))
    dense = forward_and_gradients(dense_gmm())
    sides, times = {}, {}
    for factor in options.buffers:
        args = problem(factor, options)
        say(f"compiling for a buffer of {factor} * {options.rows} rows")
        a, b = ours(*args), dense(*args)
        check_equal(a, b)
        zeros = _bench_layer.fill(a)
        jax.block_until_ready(zeros())
        sides[factor] = {
            "ours": lambda args=args: ours(*args),
            "fill": zeros,
            "dense": lambda args=args: dense(*args),
        }
        times[factor] = {side: [] for side in sides[factor]}
        del a, b

    def take(factor, side):
        start = time.perf_counter()
        jax.block_until_ready(sides[factor][side]())
        times[factor][side].append(time.perf_counter() - start)

    for repetition in range(options.repetitions):
        for factor in options.buffers:
            say(f"repetition {repetition + 1} of {options.repetitions}, buffer {factor}")
            take(factor, "dense")
            # The short ones often, all buffers in turn: what else the machine does then falls on
            # each of them alike.
            for _ in range(SHORT_ROUNDS):
                for other in options.buffers:
                    take(other, "ours")
                    take(other, "fill")
    return [_cpu_row(factor, options, times) for factor in options.buffers]


def _cpu_row(factor, options, times):
    row = {"how": "timed", "buffer": factor, "buffer_rows": factor * options.rows}
    base = times[options.buffers[0]]
    for name, pick in (("min", min), ("median", statistics.median)):
        t = {side: pick(values) for side, values in times[factor].items()}
        work = t["ours"] - t["fill"]
        first = pick(base["ours"]) - pick(base["fill"])
        row[name] = {
            "seconds": t,
            "dense / ours": t["dense"] / t["ours"],
            "ours less fill, growth": work / first,
            "dense, growth": t["dense"] / pick(base["dense"]),
        }
    return row


# --------------------------------------------------------------------------------- reporting


def cpu_table(rows, options) -> str:
    """The rows as text. Every figure is a ratio: of the minima; of the medians."""
    first = options.buffers[0]
    lines = [
        f"gmm, forward and both gradients, bfloat16, k={options.k} n={options.n},"
        f" {options.groups} groups, {options.rows} valid rows, on this CPU",
        "",
        f"{'':<8}{'buffer':>8}{'rows':>8}{'dense / ours':>22}{'ours less filling':>24}"
        f"{'dense':>12}",
        f"{'':<8}{'':>8}{'':>8}{'(min; median)':>22}{f'/ that at {first} (min; med)':>24}"
        f"{f'/ at {first}':>12}",
    ]
    for r in rows:
        low, mid = r["min"], r["median"]
        pair = lambda key, low=low, mid=mid: f"{low[key]:.2f}; {mid[key]:.2f}"
        lines.append(
            f"{r['how']:<8}{r['buffer']:>8}{r['buffer_rows']:>8}{pair('dense / ours'):>22}"
            f"{pair('ours less fill, growth'):>24}{low['dense, growth']:>12.2f}"
        )
    lines += [
        "",
        "dense: absmax, scale, clamp, convert over the whole buffer around jax.lax.ragged_dot.",
        "filling: the time that zeros of the same outputs take, subtracted from ours.",
        "Only the ratios mean something.",
    ]
    return "\n".join(lines)


def write_png(rows, path) -> None:
    """A picture of the table: time against the buffer's size, both in units of the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    unit = rows[0]["median"]["seconds"]["ours"]
    x = [r["buffer"] for r in rows]
    for side, label in (
        ("dense", "dense quantize chain"),
        ("ours", "fp8moe_prims"),
        ("fill", "filling the outputs with zeros"),
    ):
        y = [r["median"]["seconds"][side] / unit for r in rows]
        axes.plot(x, y, marker="o", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xticks=x,
        xticklabels=[str(v) for v in x],
        xlabel="buffer rows / valid rows",
        ylabel=f"time / ours at {x[0]}, timed on a CPU",
        title="gmm, forward and both gradients",
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------------------ command line


def run_cpu(options) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("bench: --png needs matplotlib: pip install 'fp8moe_prims[plots]'")
    say = lambda text: print(text, file=sys.stderr, flush=True)
    rows = measure_cpu(options, say)
    print(cpu_table(rows, options))
    if options.json:
        import jax

        settings = ("k", "n", "groups", "rows", "repetitions")
        with open(options.json, "w") as f:
            json.dump(
                {
                    "benchmark": "cpu",
                    "jax": jax.__version__,
                    **{s: getattr(options, s) for s in settings},
                    "table": rows,
                },
                f,
                indent=2,
            )
    if options.png:
        write_png(rows, options.png)


def _add_cpu(commands) -> None:
    cpu = commands.add_parser(
        "cpu",
        help="time ours against the dense chain on this machine's CPU",
        description="Times ours against the dense quantize chain on this machine's CPU, forward and"
        " both gradients, on buffers of growing size with the same valid rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cpu.set_defaults(run=run_cpu)
    cpu.add_argument("--k", type=_positive, default=512, help="contraction")
    cpu.add_argument("--n", type=_positive, default=512, help="output features")
    cpu.add_argument("--groups", type=_positive, default=16, help="experts")
    cpu.add_argument("--rows", type=_positive, default=2048, help="valid rows")
    cpu.add_argument(
        "--buffers",
        type=_factors,
        default="1,2,4,8",
        metavar="F,F,...",
        help="buffer rows as multiples of the valid rows; growth is relative to the first",
    )
    cpu.add_argument("--repetitions", type=_positive, default=3, help="of everything, in turn")
    _add_outputs(cpu)


def run_layer(options) -> None:
    on_cpu = options.target == "cpu"
    if on_cpu:
        _bench_layer.force_host_devices(options.ep)
    else:
        _tpu.set_environment()
    measure = _bench_layer.time_on_cpu if on_cpu else _bench_layer.compile_for_tpu
    rows = measure(options, lambda text: print(text, file=sys.stderr, flush=True))
    print((_bench_layer.cpu_table if on_cpu else _bench_layer.tpu_table)(rows, options))
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"benchmark": "layer", "target": options.target, "table": rows}, f, indent=2)


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
    layer.add_argument("--json", metavar="FILE", help="write all figures there")


def _add_outputs(parser) -> None:
    """Options that every subcommand has."""
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--png", metavar="FILE", help="write a picture there (extra: plots)")


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
    for add in (_add_cpu, _add_layer):
        add(commands)
    return parser.parse_args(argv)


def main(argv=None) -> None:
    options = parse_arguments(argv)
    options.run(options)


if __name__ == "__main__":
    main()
