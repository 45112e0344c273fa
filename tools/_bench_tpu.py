"""`bench.py tpu`: the grouped matmul kernels against the floors of a v7x core, by its compiler.

Nothing runs on a TPU. Every row has two floors, counted: what the MXU takes at its peak rate for
the valid rows, and what HBM takes for the bytes that a call must move. Against them stand

- `compute`, with --simulate: modelled, by the compiler's simulator following a call of some of the
  groups; see _tpu_sim.py for what is changed for it. Copies are left out, but for the first.
- `moved`, with --simulate: counted, the bytes that the pipeline's windows move in that call.
- `blocks`: counted, the loops of the compiled program that multiply: bundles (a cycle each) over
  the MXU's cycles for their products.
"""

import dataclasses
import re

from tools._tpu_sim import Call, simulate

SHAPES = ((7168, 2048), (2048, 7168))
FLOPS = 524288  # of bf16, per cycle of a v7x core; float8 twice
HBM = 1680  # bytes per cycle


def sizes(layout: str, groups: int, rows: int = 1024):
    """Rows of each group: equal, or of rows that choose their group at random."""
    import numpy as np

    if layout == "aligned":
        return (rows,) * groups
    counts = np.random.default_rng(0).multinomial(rows * groups, np.full(groups, 1 / groups))
    return tuple(int(x) for x in counts)


def calls(groups: int) -> dict:
    """name -> Call."""
    out = {}
    for layout in ("aligned", "random"):
        for k, n in SHAPES:
            common = dict(m=1024 * 32, k=k, n=n, sizes=sizes(layout, groups))
            for name, op, lhs, transpose in (
                ("gmm fp8 lhs", "gmm", "fp8", False),
                ("gmm bf16 lhs quantized", "gmm", "quantize", False),
                ("dlhs", "gmm", "quantize", True),
                ("gmm bf16", "gmm", "bf16", False),
                ("tgmm saved fp8", "tgmm", "fp8", False),
                ("tgmm both bf16", "tgmm", "quantize", False),
            ):
                key = f"{name}, k={k} n={n}, {layout}"
                out[key] = Call(op, lhs=lhs, transpose=transpose, **common)
    for g in (64, 512):
        for n in (256, 2048):
            one = Call("gmm", m=g, k=4096, n=n, sizes=(1,) * min(g, 64), lhs="quantize")
            out[f"gmm bf16 lhs quantized, k=4096 n={n}, {g} groups of 1 row"] = one
    call = out["gmm bf16 lhs quantized, k=7168 n=2048, aligned"]
    for m in (65536, 262144):
        out[f"gmm bf16 lhs quantized, k=7168 n=2048, m={m}"] = dataclasses.replace(
            call, m=m, expected=32768
        )
    return out


def floors(call: Call) -> dict:
    """Cycles that the MXU and HBM take at their peak rates."""
    rows, groups = call.rows, sum(x > 0 for x in call.sizes)
    mxu = 2 * rows * call.k * call.n / (FLOPS * (1 if call.lhs == "bf16" else 2))
    lhs, weights = 1 if call.lhs == "fp8" else 2, 2 if call.lhs == "bf16" else 1
    matrices = groups * call.k * call.n
    if call.op == "tgmm":
        moved = rows * (call.k * lhs + call.n * 2) + 2 * matrices
    else:
        deep, wide = (call.n, call.k) if call.transpose else (call.k, call.n)
        moved = rows * (deep * lhs + wide * 2) + weights * matrices
    return {"mxu": mxu, "hbm": moved / HBM}


def measure(options, say) -> list[dict]:
    rows = []
    for name, call in calls(options.groups).items():
        if not re.search(options.only, name):
            continue
        say(name)
        found = simulate(call, timeout=options.timeout, follow=options.simulate)
        row = {"name": name, "groups": len(call.sizes), "rows": call.rows, **floors(call), **found}
        if "cycles" in found:
            row["compute"] = found["cycles"] - found["table_stores"]
            row["moved"] = found["hbm_bytes"] / HBM
            if row["compute"] < row["mxu"]:
                row["error"] = "not followed: fewer cycles than the MXU needs"
        rows.append(row)
    return rows


def table(rows, options) -> str:
    lines = [
        "kernels on one v7x core, by its compiler: kilocycles; x: of the larger floor",
        "",
        f"{'':<58}{'MXU floor':>11}{'HBM floor':>11}{'compute':>10}{'moved':>9}{'x':>7}",
    ]
    kilo = lambda x: f"{x / 1000:.0f}"
    for r in rows:
        line = f"{r['name']:<58}{kilo(r['mxu']):>11}{kilo(r['hbm']):>11}"
        if "compute" in r and "error" not in r:
            x = max(r["compute"], r["moved"]) / max(r["mxu"], r["hbm"])
            line += f"{kilo(r['compute']):>10}{kilo(r['moved']):>9}{x:>7.2f}"
        else:
            line += f"  {r.get('error', 'not simulated')}"
        lines.append(line)
        parts = ", ".join(f"{b['bundles']}/{b['mxu']}" for b in r.get("blocks", ()))
        lines.append(f"    blocks {parts or '-'}; program of {r.get('bundles', '-')} bundles")
    lines += [
        "",
        f"Calls of {options.groups} groups (64 of one row). Floors: counted, for the valid rows.",
        "compute: modelled, without copies but the first. moved: counted, the bytes of the",
        "pipeline's windows over HBM's rate. x: the larger of both over the larger floor. blocks:",
        "bundles / MXU cycles of the loops that multiply. Nothing was run.",
    ]
    return "\n".join(lines)


def add_arguments(parser, positive) -> None:
    parser.add_argument("--groups", type=positive, default=4, help="groups that are followed")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds of one compile")
    parser.add_argument(
        "--simulate", action="store_true", help="let the compiler's simulator follow the call too"
    )
