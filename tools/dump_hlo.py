"""Prints what an operation becomes: its jaxpr, StableHLO, or the optimized HLO for a chip.

    python tools/dump_hlo.py gmm                                # optimized HLO on the CPU
    python tools/dump_hlo.py gmm --grad --stage jaxpr
    python tools/dump_hlo.py gmm --grad --target tpu7x --shape 32768,7168,2048,8 --summary

TPU programs are compiled ahead of time by libtpu (`pip install libtpu`); no TPU is needed. The
weights of gmm are quantized already, as they are once a step, so all that is shown is the
operation's own.
"""

import argparse
import dataclasses
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _hlo, _tpu

TARGETS = ("cpu", *_tpu.TOPOLOGIES)
STAGES = ("jaxpr", "stablehlo", "hlo")
BACKWARDS = ("in_kernel", "dense")
DEFAULT_SHAPE = "16384,1024,512,8"


@dataclasses.dataclass(frozen=True)
class Shape:
    """m rows of the buffer, k contraction, n output features, g groups."""

    m: int
    k: int
    n: int
    g: int

    def __str__(self):
        return f"m={self.m} k={self.k} n={self.n} g={self.g}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to look at.

    Attributes:
      fn: the function.
      args: ShapeDtypeStructs of its arguments.
      wrt: indices of the arguments that gradients are taken with respect to.
      rows: rows of the ragged buffer.
    """

    fn: object
    args: tuple
    wrt: tuple[int, ...]
    rows: int


# ---------------------------------------------------------------------------- the operations


def _gmm(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    recipe = fp8.QuantRecipe(backward=backward)

    def gmm(lhs, qvalue, scale, weight, sizes):
        # weight: what the quantized weights were made from, for its gradient; never read
        return fp8.gmm(lhs, fp8.QArray(qvalue, scale, weight), sizes, recipe=recipe)

    args = (
        _struct((s.m, s.k), jnp.bfloat16),
        _struct((s.g, s.k, s.n), jnp.float8_e4m3fn),
        _struct((s.g, 1, s.n), jnp.float32),
        _struct((s.g, s.k, s.n), jnp.bfloat16),
        _struct((s.g,), jnp.int32),
    )
    return Program(gmm, args, (0, 3), s.m)


def _tgmm_quant(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8
    from fp8moe_prims import dense, groups, primitives

    def tgmm_quant(lhs, dout, sizes):
        if backward == "in_kernel":
            return fp8.tgmm_quant(lhs, dout, sizes, dout_dtype="e5m2")
        ranges = groups.group_ranges(sizes, None, None, s.g, s.m)
        operands = primitives.TgmmOperands(lhs, dout, *ranges)
        params = primitives.TgmmParams(jnp.dtype(jnp.bfloat16), "e4m3", "e5m2")
        return dense.tgmm(operands, params)

    args = (
        _struct((s.m, s.k), jnp.bfloat16),
        _struct((s.m, s.n), jnp.bfloat16),
        _struct((s.g,), jnp.int32),
    )
    return Program(tgmm_quant, args, (0, 1), s.m)


TOP_K = 8  # experts of a token in the operations below: the buffer has TOP_K rows a token


def _ragged_gather(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    del backward  # nothing is quantized

    def ragged_gather(x, indices, end, inverse):
        return fp8.ragged_gather(x, indices, end=end, inverse=inverse, tail="undefined")

    tokens = s.m // TOP_K
    args = (
        _struct((tokens, s.k), jnp.bfloat16),
        _struct((s.m,), jnp.int32),
        _struct((), jnp.int32),
        _struct((tokens, TOP_K), jnp.int32),
    )
    return Program(ragged_gather, args, (0,), s.m)


def _ragged_gather_reduce(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    del backward

    def ragged_gather_reduce(y, weights, indices, end, inverse):
        return fp8.ragged_gather_reduce(
            y, indices, weights=weights, end=end, inverse=inverse, tail="undefined"
        )

    tokens = s.m // TOP_K
    args = (
        _struct((s.m, s.k), jnp.bfloat16),
        _struct((tokens, TOP_K), jnp.float32),
        _struct((tokens, TOP_K), jnp.int32),
        _struct((), jnp.int32),
        _struct((s.m,), jnp.int32),
    )
    return Program(ragged_gather_reduce, args, (0, 1), s.m)


def _ragged_glu(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    del backward

    def ragged_glu(h, end):
        return fp8.ragged_glu(h, end=end, tail="undefined")

    return Program(
        ragged_glu, (_struct((s.m, 2 * s.n), jnp.bfloat16), _struct((), jnp.int32)), (0,), s.m
    )


def _moe(s: Shape, backward: str) -> Program:
    """The layer on one device: m / TOP_K tokens, k features, n features of an expert, g experts."""
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    recipe = fp8.QuantRecipe(backward=backward)
    config = fp8.moe.MoEConfig(s.g, min(TOP_K, s.g), recipe=recipe)

    def moe(x, logits, w_gate, w_up, w_down):
        return fp8.moe.moe_ffn(x, logits, w_gate, w_up, w_down, config=config)[0]

    tokens = s.m // config.top_k
    args = (
        _struct((tokens, s.k), jnp.bfloat16),
        _struct((tokens, s.g), jnp.float32),
        _struct((s.g, s.k, s.n), jnp.bfloat16),
        _struct((s.g, s.k, s.n), jnp.bfloat16),
        _struct((s.g, s.n, s.k), jnp.bfloat16),
    )
    return Program(moe, args, tuple(range(5)), tokens * config.top_k)


OPS = {
    "gmm": _gmm,
    "tgmm_quant": _tgmm_quant,
    "ragged_gather": _ragged_gather,
    "ragged_gather_reduce": _ragged_gather_reduce,
    "ragged_glu": _ragged_glu,
    "moe": _moe,
}


def _struct(shape, dtype):
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------------- building, compiling


def build(op: str, shape: Shape, *, grad: bool = False, backward: str = "in_kernel") -> Program:
    """The program of an operation, or of its gradients with the cotangent as first argument."""
    program = OPS[op](shape, backward)
    if not grad:
        return program
    import jax

    def gradient(cotangent, *args):
        def fn(*operands):
            given = dict(zip(program.wrt, operands, strict=True))
            return program.fn(*(given.get(i, a) for i, a in enumerate(args)))

        return jax.vjp(fn, *(args[i] for i in program.wrt))[1](cotangent)

    gradient.__name__ = gradient.__qualname__ = f"{op}_gradient"
    cotangent = jax.tree.map(
        lambda x: _struct(x.shape, x.dtype), jax.eval_shape(program.fn, *program.args)
    )
    return dataclasses.replace(program, fn=gradient, args=(cotangent, *program.args))


def lower(program: Program, target: str):
    """``jax.jit(fn).lower(...)`` for the CPU or for one device of a TPU topology."""
    import jax

    if target == "cpu":
        return jax.jit(program.fn).lower(*program.args)
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(_tpu.devices(target)[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(program.fn).lower(*jax.tree.map(placed, program.args))


def _text(compiled) -> str:
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as e:
        if "async-update" not in str(e):
            raise
        raise SystemExit(
            f"jaxlib {jax.__version__} cannot read this program back: libtpu made an operation"
            " asynchronous in a form that it does not know. A newer jax prints it."
        ) from None


def stage_text(program: Program, stage: str, target: str) -> str:
    if stage == "jaxpr":
        import jax

        return str(jax.make_jaxpr(program.fn)(*program.args))
    lowered = lower(program, target)
    return lowered.as_text() if stage == "stablehlo" else _text(lowered.compile())


# ---------------------------------------------------------------------------------- summary


@dataclasses.dataclass(frozen=True)
class Summary:
    """One column of the table: a Report and the compiler's memory figures, in bytes."""

    report: _hlo.Report
    temporaries: int
    arguments: int
    outputs: int


def summarize(op: str, shape: Shape, *, grad: bool, backward: str, target: str) -> Summary:
    """Compiles an operation and reads what it does over the buffer's rows outside our kernels.

    On a TPU that is read from the optimized HLO. On the CPU our operations are not kernels but
    loops in the same HLO, so it is read from the jaxpr, where they are one equation each.
    """
    import jax

    program = build(op, shape, grad=grad, backward=backward)
    compiled = lower(program, target).compile()
    if target == "cpu":
        report = _hlo.report_of_jaxpr(jax.make_jaxpr(program.fn)(*program.args), program.rows)
    else:
        report = _hlo.report_of_hlo(_text(compiled), program.rows)
    memory = compiled.memory_analysis()
    return Summary(
        report,
        int(memory.temp_size_in_bytes),
        int(memory.argument_size_in_bytes),
        int(memory.output_size_in_bytes),
    )


def summary_table(op, shape, grad, target, columns: dict[str, Summary]) -> str:
    """The table of `--summary`: one column for each backward."""
    what = f"{op}, {'both gradients' if grad else 'forward'}, {shape}, {target}"
    lines = [what, "", _row("", columns)]
    reports = {name: s.report for name, s in columns.items()}
    for name in sorted(set().union(*(r.fused for r in reports.values()))):
        lines.append(_row(f"fused: {name}", [str(r.fused[name]) for r in reports.values()]))
    lines += ["", f"over the buffer's {shape.m} rows, outside these: how many, bytes of arrays"]
    kinds = {name: r.by_kind() for name, r in reports.items()}
    for kind in (*_hlo.KINDS, "other"):
        if any(kind in k for k in kinds.values()):
            cells = [k.get(kind, (0, 0)) for k in kinds.values()]
            lines.append(_row(f"  {kind}", [f"{n}, {_size(b)}" for n, b in cells]))
    counts = [(len(r.row_ops), sum(o.bytes for o in r.row_ops)) for r in reports.values()]
    lines.append(_row("  all", [f"{n}, {_size(b)}" for n, b in counts]))
    if all(r.traffic is not None for r in reports.values()):
        cells = [_size(r.traffic) for r in reports.values()]
        lines.append(_row("  read and written, fusions as one", cells))
    lines.append("")
    for field in ("temporaries", "arguments", "outputs"):
        values = [getattr(s, field) for s in columns.values()]
        lines.append(_row(f"{field} *", [_size(v) for v in values]))
    source = (
        "Counts and bytes over the rows: from the jaxpr, as traced (on the CPU our operations are"
        " loops of plain ops in the HLO)."
        if target == "cpu"
        else "Counts and bytes over the rows *: from the compiler's optimized HLO and its shapes."
    )
    lines += ["", source, "* the compiler's own figures (memory_analysis, HLO); nothing was run."]
    return "\n".join(lines)


def _row(label, cells) -> str:
    return f"{label:<34}" + "".join(f"{c:>24}" for c in cells)


def _size(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"


# ------------------------------------------------------------------------------ command line


def parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(x) for x in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"takes four integers m,k,n,g, such as {DEFAULT_SHAPE}; got {text!r}"
        ) from None
    if min(dataclasses.astuple(shape)) < 1:
        raise argparse.ArgumentTypeError(f"m, k, n and g must be at least 1; got {text!r}")
    return shape


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dump_hlo.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", metavar="OP", choices=OPS, help=f"one of: {', '.join(OPS)}")
    parser.add_argument(
        "--grad", action="store_true", help="the gradients with respect to both operands instead"
    )
    parser.add_argument(
        "--dense", action="store_true", help='quantize around the kernels: backward="dense"'
    )
    parser.add_argument("--stage", choices=STAGES, default="hlo", help="default: %(default)s")
    parser.add_argument(
        "--target", choices=TARGETS, default="cpu", help="what to compile for (default: cpu)"
    )
    parser.add_argument(
        "--shape",
        type=parse_shape,
        default=DEFAULT_SHAPE,
        metavar="m,k,n,g",
        help="rows of the buffer, contraction, output features, groups (default: %(default)s)",
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="a table instead: fused operations, operations over the buffer's rows outside of them,"
        " and temporaries, for both backward settings side by side",
    )
    options = parser.parse_args(argv)
    s = options.shape
    if options.summary and (options.dense or options.stage != "hlo"):
        parser.error("--summary always compiles, for both backwards: drop --dense and --stage")
    if options.summary and s.m in (s.k, s.n, s.g, s.g * s.k, s.g * s.n, s.k * s.n):
        parser.error(
            f"--summary finds the buffer's rows by their number, but m = {s.m} is also a dimension"
            f" of the weights ({s}); choose another m"
        )
    return options


def main(argv=None) -> None:
    options = parse_arguments(argv)
    _tpu.set_environment()
    op, shape, grad, target = options.op, options.shape, options.grad, options.target
    if options.summary:
        columns = {b: summarize(op, shape, grad=grad, backward=b, target=target) for b in BACKWARDS}
        print(summary_table(op, shape, grad, target, columns))
    else:
        program = build(op, shape, grad=grad, backward=BACKWARDS[options.dense])
        print(stage_text(program, options.stage, target))


if __name__ == "__main__":
    main()
