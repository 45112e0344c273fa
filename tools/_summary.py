"""dump_hlo.py --summary: what a program does over the buffer's rows, one column a backward."""

import dataclasses
import textwrap
from collections import Counter

from tools import _hlo, _programs


@dataclasses.dataclass(frozen=True)
class Summary:
    """One column of the table, in bytes where it says nothing else.

    Attributes:
      report: what runs over the buffer's rows outside our kernels.
      rows: the buffer's rows.
      temporaries, arguments, outputs: the compiler's memory analysis, of one device.
      collectives: kind -> (how many, bytes), or None where the program's text can't be read.
      kernels: our kernels, on a TPU.
    """

    report: _hlo.Report
    rows: int
    temporaries: int
    arguments: int
    outputs: int
    collectives: dict[str, tuple[int, int]]
    kernels: list[_hlo.Kernel]


def summarize(op: str, shape=None, *, grad: bool, backward: str, target: str, rows=None) -> Summary:
    """Compiles an operation and reads what it does over the buffer's rows outside our kernels.

    On a TPU that is read from the optimized HLO. On the CPU our operations are not kernels but
    loops in the same HLO, so it is read from the jaxpr, where they are one equation each.
    """
    program = _programs.build(op, shape, grad=grad, backward=backward, target=target, rows=rows)
    compiled = _programs.lower(program, target).compile()
    return summary_of(program, compiled, target)


def summary_of(program, compiled, target: str) -> Summary:
    import jax

    text = _programs.text_of(compiled)
    if target == "cpu":
        report = _hlo.report_of_jaxpr(jax.make_jaxpr(program.fn)(*program.args), program.rows)
    else:
        report = _hlo.report_of_hlo(text, program.rows)
    memory = compiled.memory_analysis()
    return Summary(
        report,
        program.rows,
        int(memory.temp_size_in_bytes),
        int(memory.argument_size_in_bytes),
        int(memory.output_size_in_bytes),
        _hlo.collectives(text),
        _hlo.kernels(text),
    )


# ---------------------------------------------------------------------------------- the table


def table(what: str, target: str, columns: dict[str, Summary]) -> str:
    """The table of `--summary`: one column for each backward."""
    summaries = list(columns.values())
    lines = [what, "", _row("", columns)]
    lines += (
        _ours(summaries, "equation" if target == "cpu" else "custom call")
        + [""]
        + _over_rows(summaries, next(iter(columns)))
        + [""]
        + _memory(summaries)
    )
    source = (
        "Counts and bytes over the rows: from the jaxpr, as traced (on the CPU our operations are"
        " loops of plain ops in the HLO)."
        if target == "cpu"
        else "Counts and bytes over the rows *: from the compiler's optimized HLO and its shapes."
    )
    lines += ["", source, "* the compiler's own figures (memory_analysis, HLO); nothing was run."]
    return "\n".join(lines)


def _ours(summaries, what: str) -> list[str]:
    """Rows of our operations: on a TPU the kernels by name, with the VMEM that each uses."""
    if not any(s.kernels for s in summaries):
        names = sorted(set().union(*(s.report.fused for s in summaries)))
        return [_row(f"{what}: {n}", [str(s.report.fused[n]) for s in summaries]) for n in names]
    lines = []
    for name in sorted({k.name for s in summaries for k in s.kernels}):
        cells = []
        for s in summaries:
            vmem = [k.vmem for k in s.kernels if k.name == name]
            cells.append(f"{len(vmem)}, VMEM {size(max(vmem))}" if vmem else "0")
        lines.append(_row(f"kernel: {name} *", cells))
    return lines


def _over_rows(summaries, first) -> list[str]:
    rows = summaries[0].rows
    lines = [f"over the buffer's {rows} rows, outside these: how many, bytes of arrays"]
    reports = [s.report for s in summaries]
    kinds = [r.by_kind() for r in reports]
    for kind in (*_hlo.KINDS, "other"):
        if any(kind in k for k in kinds):
            lines.append(_counted(f"  {kind}", [k.get(kind, (0, 0)) for k in kinds]))
    total = lambda ops: (len(ops), sum(o.bytes for o in ops))
    narrow = [total(r.narrow(rows)) for r in reports]
    everything = [total(r.row_ops) for r in reports]
    lines.append(_counted("  all", everything))
    lines.append(_counted("  of them a number or two a row", narrow))
    wide = [(a - b, c - d) for (a, c), (b, d) in zip(everything, narrow, strict=True)]
    lines.append(_counted("  of them wider: rows of features", wide))
    if all(r.traffic is not None for r in reports):
        lines.append(_row("  read and written, fusions as one", [size(r.traffic) for r in reports]))
    needed = Counter(op.opcode for op in reports[0].narrow(rows))
    if needed:
        listed = ", ".join(f"{name} {n}" for name, n in sorted(needed.items()))
        text = f"  a number or two a row, {first}: {listed}"
        lines += textwrap.wrap(text, 100, subsequent_indent="    ", initial_indent="  ")
    return lines


def _memory(summaries) -> list[str]:
    lines = []
    for kind in sorted(set().union(*(s.collectives for s in summaries))):
        cells = [s.collectives.get(kind, (0, 0)) for s in summaries]
        lines.append(_counted(f"{kind} *", cells))
    for field in ("temporaries", "arguments", "outputs"):
        label = "peak temporaries *" if field == "temporaries" else f"{field} *"
        lines.append(_row(label, [size(getattr(s, field)) for s in summaries]))
    return lines


def _counted(label, pairs) -> str:
    return _row(label, [f"{n}, {size(b)}" for n, b in pairs])


def _row(label, cells) -> str:
    return f"{label:<36}" + "".join(f"{c:>24}" for c in cells)


def size(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"
