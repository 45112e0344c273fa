"""`bench.py cpu`: ours, the dense quantize chain and plain ragged_dot, timed on this machine."""

import dataclasses
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _bench_layer

SHORT_ROUNDS = 3  # of our side, for one of the others


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table: the value that the sweep varies, and the problem that it makes."""

    value: int
    rows: int  # that are valid
    buffer: int
    groups: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is varied: its default values, the defaults of the rest, and what the axis is called."""

    values: str
    axis: str
    k: int
    groups: int
    rows: int
    factor: int = 1


SWEEPS = {
    "buffer": Sweep("1,2,4,8", "buffer rows / valid rows", 512, 16, 2048),
    "rows": Sweep("1,8,64,256,1024", "valid rows a group", 128, 16, 0, 2),
    "experts": Sweep("8,32,128,256", "experts", 128, 0, 1024, 2),
}


def points(options) -> list[Point]:
    """The problems of a sweep. Options not given are the sweep's."""
    sweep = SWEEPS[options.sweep]
    k = options.k or sweep.k
    n = options.n or k
    out = []
    for value in options.values:
        groups = value if options.sweep == "experts" else options.groups or sweep.groups
        rows = value * groups if options.sweep == "rows" else options.rows or sweep.rows
        factor = value if options.sweep == "buffer" else options.factor or sweep.factor
        out.append(Point(value, rows, rows * factor, groups, k, n))
    return out


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


def plain_gmm(lhs, rhs, sizes):
    """`ragged_dot` of the same arrays in bfloat16: nothing quantized, nothing masked."""
    import jax

    return jax.lax.ragged_dot(lhs, rhs, sizes)


# ------------------------------------------------------------------------------- measuring


def forward_and_gradients(gmm):
    """jitted (lhs, rhs, sizes, dout) -> (out, dlhs, drhs)."""
    import jax

    def both(lhs, rhs, sizes, dout):
        out, vjp = jax.vjp(lambda lhs, rhs: gmm(lhs, rhs, sizes), lhs, rhs)
        return out, *vjp(dout)

    return jax.jit(both)


def problem(p: Point):
    """(lhs, rhs, sizes, dout) on the buffer, the tail holding large values."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = rng.multinomial(p.rows, np.full(p.groups, 1 / p.groups)).astype(np.int32)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    rhs = make(p.groups, p.k, p.n)
    lhs, dout = make(p.rows, p.k), make(p.rows, p.n)
    tail = lambda x: jnp.concatenate(
        [x, jnp.full((p.buffer - p.rows, x.shape[1]), 1e30, x.dtype)], axis=0
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


def sides_of(p: Point) -> dict:
    """name -> a call without arguments, compiled and run once: ours, fill, dense, ragged_dot."""
    import jax

    import fp8moe_prims as fp8

    recipe = fp8.QuantRecipe()
    ours = forward_and_gradients(lambda *a: fp8.gmm(*a, recipe=recipe))
    dense, plain = forward_and_gradients(dense_gmm()), forward_and_gradients(plain_gmm)
    args = problem(p)
    results = ours(*args)
    check_equal(results, dense(*args))
    zeros = _bench_layer.fill(results)
    jax.block_until_ready((zeros(), plain(*args)))
    return {
        "ours": lambda: ours(*args),
        "fill": zeros,
        "dense": lambda: dense(*args),
        "ragged_dot": lambda: plain(*args),
    }


def measure(options, progress) -> list[dict]:
    """One row a point: minima and medians, in seconds, of each side."""
    import jax

    all_points = points(options)
    sides, times = {}, {}
    progress.total = len(all_points) * (1 + options.repetitions)
    for p in all_points:
        progress(f"compiling {options.sweep} {p.value}")
        sides[p] = sides_of(p)
        times[p] = {name: [] for name in sides[p]}

    def take(p, side):
        start = time.perf_counter()
        jax.block_until_ready(sides[p][side]())
        times[p][side].append(time.perf_counter() - start)

    for repetition in range(options.repetitions):
        for p in all_points:
            progress(
                f"repetition {repetition + 1} of {options.repetitions}, {options.sweep} {p.value}"
            )
            take(p, "dense")
            take(p, "ragged_dot")
            # The short ones often, all points in turn: what else the machine does then falls on
            # each of them alike.
            for _ in range(SHORT_ROUNDS):
                for other in all_points:
                    take(other, "ours")
                    take(other, "fill")
    progress.end()
    return [_row(p, times[p], times[all_points[0]]) for p in all_points]


def _row(p: Point, times, base) -> dict:
    row = {
        "how": "timed",
        "value": p.value,
        "buffer_rows": p.buffer,
        "point": dataclasses.asdict(p),
    }
    for name, pick in (("min", min), ("median", statistics.median)):
        t = {side: pick(values) for side, values in times.items()}
        first = {side: pick(values) for side, values in base.items()}
        row[name] = {
            "seconds": t,
            "dense / ours": t["dense"] / t["ours"],
            "ragged_dot / ours": t["ragged_dot"] / t["ours"],
            "ours less fill, growth": (t["ours"] - t["fill"]) / (first["ours"] - first["fill"]),
            "dense, growth": t["dense"] / first["dense"],
        }
    return row


# --------------------------------------------------------------------------------- reporting


def table(rows, options) -> str:
    """The rows as text. Every figure is a ratio: of the minima; of the medians."""
    first = rows[0]["value"]
    p = Point(**rows[0]["point"])
    fixed = {"k": p.k, "n": p.n, "groups": p.groups, "valid rows": p.rows}
    varied = {"buffer": (), "rows": ("valid rows",), "experts": ("groups",)}[options.sweep]
    said = ", ".join(f"{name} {v}" for name, v in fixed.items() if name not in varied)
    if options.sweep != "buffer":
        said += f", buffer {p.buffer // p.rows} times the valid rows"
    lines = [
        f"gmm, forward and both gradients, bfloat16, {said}; on this CPU",
        "",
        f"{'':<8}{options.sweep:>8}{'rows':>8}{'dense / ours':>20}{'ragged_dot / ours':>20}"
        f"{'ours less filling':>20}{'dense':>10}",
        f"{'':<8}{'':>8}{'':>8}{'(min; median)':>20}{'(min; median)':>20}"
        f"{f'/ that at {first}':>20}{f'/ at {first}':>10}",
    ]
    for r in rows:
        low, mid = r["min"], r["median"]
        pair = lambda key, low=low, mid=mid: f"{low[key]:.2f}; {mid[key]:.2f}"
        lines.append(
            f"{r['how']:<8}{r['value']:>8}{r['buffer_rows']:>8}{pair('dense / ours'):>20}"
            f"{pair('ragged_dot / ours'):>20}{pair('ours less fill, growth'):>20}"
            f"{low['dense, growth']:>10.2f}"
        )
    lines += [
        "",
        "dense: absmax, scale, clamp, convert over the whole buffer around jax.lax.ragged_dot.",
        "ragged_dot: of the bfloat16 arrays, nothing quantized.",
        "filling: the time that zeros of the same outputs take, subtracted from ours.",
        "Only the ratios mean something.",
    ]
    return "\n".join(lines)


def write_png(rows, options, path) -> None:
    """A picture of the table: time against the varied value, in units of our first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    seconds = [r["min"]["seconds"] for r in rows]
    less = lambda t: t["ours"] - t["fill"]
    unit = less(seconds[0])
    x = [r["value"] for r in rows]
    for label, of, style in (
        ("dense quantize chain", lambda t: t["dense"], "o-"),
        ("ragged_dot, unquantized", lambda t: t["ragged_dot"], "s--"),
        ("fp8moe_prims", lambda t: t["ours"], "o-"),
        ("fp8moe_prims, less zero filling", less, "s--"),
    ):
        axes.plot(x, [of(t) / unit for t in seconds], style, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xticks=x,
        xticklabels=[str(v) for v in x],
        xlabel=SWEEPS[options.sweep].axis,
        ylabel=f"time / ours at {x[0]}, timed on a CPU",
        title="gmm, forward and both gradients",
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=100)
