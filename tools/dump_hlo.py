"""Prints what an operation becomes: its jaxpr, StableHLO, optimized HLO, or machine code.

    python tools/dump_hlo.py gmm                                # optimized HLO on the CPU
    python tools/dump_hlo.py gmm --grad --stage jaxpr
    python tools/dump_hlo.py gmm --target tpu7x --stage llo     # cycles per loop, and the bundles
    python tools/dump_hlo.py moe --grad --target tpu7x --compare dense --summary
    python tools/dump_hlo.py moe --grad --target tpu7x --compare dense --html moe.html
    python tools/dump_hlo.py my/file.py:function --target v6e --summary

TPU programs are compiled ahead of time by libtpu (`.venv/bin/pip install '.[tpu]'`); no TPU is
needed. The weights of gmm are quantized already, as they are once a step, so all that is shown is
the operation's own.

Stages: jaxpr, stablehlo, hlo (optimized, for the target), mosaic (the MLIR of each kernel) and llo
(bundles, one a cycle). A function of yours returns (fn, args); it is called with backward="dense"
for the dense side if it has a parameter of that name, and with the target's devices if it has one
named devices (its arguments then say where they lie).
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _html, _llo, _programs, _summary, _tpu
from tools._programs import BACKWARDS, OPS, SHAPES, Shape, build, lower
from tools._summary import summarize

__all__ = ["BACKWARDS", "OPS", "Shape", "build", "lower", "main", "summarize"]

STAGES = ("jaxpr", "stablehlo", "hlo", "mosaic", "llo")
EXAMPLE_SHAPE = "16384,1024,512,8"
USERS_FUNCTION = "my/file.py:function, or module:function where the module is importable"
HOST_DEVICES = 8  # of the cpu and cuda targets, for the operations over several devices


# ------------------------------------------------------------------------------------ stages


def stage_text(program, stage: str, target: str) -> str:
    """The text of a stage; not llo's, which `llo_text` has."""
    if stage == "jaxpr":
        import jax

        return str(jax.make_jaxpr(program.fn)(*program.args))
    lowered = lower(program, target)
    if stage == "hlo":
        return _programs.text_of(lowered.compile())
    if stage == "stablehlo":
        return lowered.as_text()
    kernels = _llo.mosaic(lowered.as_text())
    return "\n".join(f"// kernel {name}\n{text}" for name, text in kernels) or "// no kernels"


def llo_text(argv) -> str:
    """The table of loops and the bundles of each kernel; compiles in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        # The last of an option given twice counts.
        _llo.dump([os.path.abspath(__file__), *argv, "--stage", "hlo", "--discard"], folder)
        codes = _llo.read(folder, ["fp8moe"]) or _llo.read(folder, [""])
    bundles = "\n".join(f"\n==== {code.name}\n{code.text}" for code in codes)
    return f"{_llo.table(codes)}\n{bundles}"


def show(options, backward: str, argv) -> None:
    if options.stage == "llo":
        print(llo_text([*argv, "--dense"] if backward == "dense" else argv))
        return
    text = stage_text(_build(options, backward), options.stage, options.target)
    if not options.discard:
        print(text)


def _build(options, backward: str):
    return build(
        options.op,
        options.shape,
        grad=options.grad,
        backward=backward,
        target=options.target,
        rows=options.rows,
    )


def title(options) -> str:
    forward = "forward" if options.op in OPS else ""  # a user's function may be anything
    what = "gradients" if options.grad else forward
    return ", ".join(filter(None, (options.op, what, str(options.shape or ""), options.target)))


def compare(options) -> None:
    """--summary and --html: compiles each side once, and writes either or both."""
    columns, sides = {}, []
    programs = {backward: _build(options, backward) for backward in options.sides}
    rows = next(iter(programs.values())).rows
    if options.op not in OPS and (where := _where_else(rows, None, options.target)):
        print(f"warning: {_ambiguous(rows, where)}; take other rows", file=sys.stderr)
    lowered = [lower(p, options.target) for p in programs.values()]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # the compiler uses one core each
        all_compiled = list(pool.map(lambda x: x.compile(), lowered))
    for (backward, program), compiled in zip(programs.items(), all_compiled, strict=True):
        columns[backward] = _summary.summary_of(program, compiled, options.target)
        if options.html:
            sides.append(_html.side(backward, program, compiled, options.target))
    table = _summary.table(title(options), options.target, columns)
    if options.summary:
        print(table)
    if options.html:
        with open(options.html, "w") as f:
            f.write(_html.page(title(options), table, sides))
        print(f"wrote {options.html}", file=sys.stderr)


# ------------------------------------------------------------------------------ command line


def parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(x) for x in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"takes four integers m,k,n,g, such as {EXAMPLE_SHAPE}; got {text!r}"
        ) from None
    if min(dataclasses.astuple(shape)) < 1:
        raise argparse.ArgumentTypeError(f"m, k, n and g must be at least 1; got {text!r}")
    return shape


def parse_op(text: str) -> str:
    if text not in OPS and ":" not in text:
        names = ", ".join(OPS)
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {names}, or give {USERS_FUNCTION})"
        )
    return text


def parse_target(text: str) -> str:
    if text in ("cpu", "cuda") or _tpu.is_topology(text):
        return text
    raise argparse.ArgumentTypeError(
        f"invalid choice: {text!r} (choose from cpu, cuda, {', '.join(_tpu.TOPOLOGIES)}, or a full"
        " topology such as tpu7x:4x4x4)"
    )


PADDED_TABLE = 1024  # XLA pads small tables of integers to a tile of so many


def _where_else(rows: int, shape: Shape | None, target: str) -> str | None:
    """Where the number of rows stands in the program for something else, None: nowhere known."""
    named = {}
    if shape is not None:
        k, n, g = shape.k, shape.n, shape.g
        named = {"g * k": g * k, "g * n": g * n, "k * n": k * n, "g": g, "n": n, "k": k}
    name = {number: name for name, number in named.items()}.get(rows)
    if name is not None:
        return f"as {name} of the weights ({shape})"
    if rows == PADDED_TABLE and target not in ("cpu", "cuda"):
        return "as the size to which XLA pads small tables of integers"
    return None


def _ambiguous(rows: int, where: str) -> str:
    return (
        "the table and the page find the buffer's rows by their number, and"
        f" {rows} also appears {where}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dump_hlo.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", metavar="OP", type=parse_op, help=f"{', '.join(OPS)}, or {USERS_FUNCTION}")
    add("--grad", action="store_true", help="the gradients of all wide operands instead")
    add("--dense", action="store_true", help='quantize around the kernels: backward="dense"')
    add("--compare", choices=("dense",), help="show the dense chain beside it")
    add("--stage", choices=STAGES, default="hlo", help="default: %(default)s")
    add(
        "--target",
        type=parse_target,
        default="cpu",
        help=f"cpu, cuda (up to stablehlo), {', '.join(_tpu.TOPOLOGIES)}, or a topology of libtpu's"
        " such as tpu7x:4x4x4 (default: cpu)",
    )
    add(
        "--shape",
        type=parse_shape,
        metavar="m,k,n,g",
        help=f"rows of the buffer, contraction, output features, groups (default: {SHAPES['gmm']};"
        f" of moe: {SHAPES['moe']})",
    )
    add("--rows", type=int, help="rows of the buffer, for a function of yours")
    add(
        "--summary",
        action="store_true",
        help="a table instead: our operations, those over the buffer's rows outside of them,"
        " collectives, temporaries and VMEM; both backward settings side by side for an operation"
        " by name, with --compare dense for a function of yours",
    )
    add("--html", metavar="FILE", help="write a page to browse: graph and HLO; see --compare")
    add("--discard", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    ours = options.op in OPS
    if not ours and options.shape:
        parser.error("--shape is for the operations by name; a function has its own arguments")
    options.shape = options.shape or SHAPES.get(options.op)
    s = options.shape
    compiles = "--summary" if options.summary else "--html" if options.html else None
    if options.summary and (options.dense or options.stage != "hlo"):
        parser.error("--summary always compiles, for both backwards: drop --dense and --stage")
    if compiles and s and (where := _where_else(s.m, s, options.target)):
        other = next(
            m for m in itertools.count(s.m + 8, 8) if not _where_else(m, s, options.target)
        )
        parser.error(f"{compiles}: {_ambiguous(s.m, where)}; choose another m, such as {other}")
    if options.target == "cuda" and (compiles or options.stage not in ("jaxpr", "stablehlo")):
        parser.error("--target cuda: up to --stage stablehlo; there is no compiler for it here")
    if options.stage in ("mosaic", "llo") and options.target == "cpu":
        parser.error(f"--stage {options.stage}: the CPU has no kernels; give a TPU as --target")
    options.sides = [BACKWARDS[options.dense]]
    has_dense = options.op in _programs.QUANTIZING or not ours
    if (options.compare or options.dense) and not has_dense:
        parser.error(f"{options.op} quantizes nothing in its backward pass: it has no dense side")
    both = options.compare or (options.summary and ours and has_dense)
    if both and not options.discard:
        options.sides = list(BACKWARDS)
    return options


def main(argv=None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse_arguments(argv)
    _tpu.set_environment(HOST_DEVICES)
    if options.summary or options.html:
        compare(options)
        return
    for backward in options.sides:
        if len(options.sides) > 1:
            print(f"{'#' * 30} {backward}")
        show(options, backward, argv)


if __name__ == "__main__":
    main()
