"""`bench.py tpu`: the grouped matmul kernels against the floors of a TPU core, by its compiler.

Nothing runs on a TPU. Every row is a whole call, with two floors: what the MXU takes at its peak
rate for the valid rows, and what HBM takes for the bytes that a call must move. Against them stand,
counted by following the compiled kernel's scalar code through the call (_llo_run.py),

- `cycles`: the bundles that are executed, a straight piece of them at least the MXU's time for its
  products. What a branch costs and what the schedule does not foresee is not in it.
- `copies`: the bytes of the copies that are started, at HBM's peak rate.
"""

import dataclasses
import importlib.util
import re

from tools import _tpu_call
from tools._tpu_call import Call

SHAPES = ((7168, 2048), (2048, 7168))
CHIPS = ("v7x", "v6e", "v5p", "v5e")  # as lowering/tpu/chip.py has them


def chip(name: str):
    """The Chip, see lowering/tpu/chip.py; imports JAX."""
    from fp8moe_prims.lowering.tpu.chip import CHIPS

    return CHIPS[name]


def sizes(layout: str, groups: int, rows: int = 1024):
    """Rows of each group: equal, or of rows that choose their group at random."""
    import numpy as np

    if layout == "aligned":
        return (rows,) * groups
    counts = np.random.default_rng(0).multinomial(rows * groups, np.full(groups, 1 / groups))
    return tuple(int(x) for x in counts)


def calls(groups: int, name="v7x") -> dict:
    """name -> Call, on a chip of this name."""
    out = {}
    int8 = [
        ("gmm bf16 lhs quantized, int8", "gmm", "int8", False),
        ("dlhs, int8", "gmm", "int8", True),
        ("tgmm both bf16, int8", "tgmm", "int8", False),
    ]
    for layout in ("aligned", "random"):
        for k, n in SHAPES:
            common = dict(m=1024 * groups, k=k, n=n, sizes=sizes(layout, groups), chip=name)
            for kind, op, lhs, transpose in (
                ("gmm fp8 lhs", "gmm", "fp8", False),
                ("gmm bf16 lhs quantized", "gmm", "quantize", False),
                ("dlhs", "gmm", "quantize", True),
                ("gmm bf16", "gmm", "bf16", False),
                ("tgmm saved fp8", "tgmm", "fp8", False),
                ("tgmm both bf16", "tgmm", "quantize", False),
                *(int8 if chip(name).native_int8 else ()),
            ):
                key = f"{kind}, k={k} n={n}, {layout}"
                out[key] = Call(op, lhs=lhs, transpose=transpose, **common)
    call = out["gmm bf16 lhs quantized, k=7168 n=2048, aligned"]
    for factor in (2, 8):
        key = f"gmm bf16 lhs quantized, k=7168 n=2048, {factor}x buffer"
        out[key] = dataclasses.replace(call, m=factor * call.m)
    for g in (64, 512):
        for n in (256, 2048):
            one = Call("gmm", m=g, k=4096, n=n, sizes=(1,) * g, lhs="quantize", chip=name)
            out[f"gmm bf16 lhs quantized, k=4096 n={n}, {g} groups of 1 row"] = one
    if name == "v7x" and importlib.util.find_spec("tokamax"):
        out |= _tokamax_calls(out)
    return out


def _tokamax_calls(ours: dict) -> dict:
    """The calls that tokamax has a TPU kernel for, and its tgmm of two float8 operands."""
    out = {}
    for name, call in ours.items():
        if call.op == "gmm" and call.lhs != "fp8" and not call.transpose:
            out[f"tokamax {name}"] = dataclasses.replace(call, library="tokamax")
        elif call.op == "tgmm":
            fp8 = call.lhs == "fp8"
            kind = "both fp8" if fp8 else "bf16"
            other = dataclasses.replace(call, library="tokamax", lhs="fp8" if fp8 else "bf16")
            out[f"tokamax tgmm {kind}, {name.split(', ', 1)[1]}"] = other
    return out


def floors(call: Call) -> dict:
    """Cycles that the MXU and HBM take at their peak rates."""
    core, rows, groups = chip(call.chip), call.rows, sum(x > 0 for x in call.sizes)
    mxu = 2 * rows * call.k * call.n / (core.mxu_flops_per_cycle * core.cores)
    if core.native_int8 if call.lhs == "int8" else core.native_fp8 and call.lhs != "bf16":
        mxu /= 2
    lhs, weights = 1 if call.lhs == "fp8" else 2, 2 if call.lhs == "bf16" else 1
    matrices = groups * call.k * call.n
    if call.op == "tgmm":
        dout = 1 if call.lhs == "fp8" and call.library == "tokamax" else 2
        moved = rows * (call.k * lhs + call.n * dout) + 2 * matrices
    else:
        deep, wide = (call.n, call.k) if call.transpose else (call.k, call.n)
        moved = rows * (deep * lhs + wide * 2) + weights * matrices
    return {"mxu": mxu, "hbm": moved / (core.hbm_bytes_per_cycle * core.cores)}


def measure(options, say) -> list[dict]:
    rows = []
    for name, call in calls(options.groups, options.chip).items():
        if re.search(options.only, name):
            say(name)
            row = {"name": name, "groups": len(call.sizes), "rows": call.rows, **floors(call)}
            rows.append(row | counted(call, options.timeout))
    return rows


def counted(call: Call, timeout: int) -> dict:
    """What a call executes, or why that is not known."""
    try:
        run, temporaries = _tpu_call.follow(call, timeout=timeout)
    except (RuntimeError, ValueError) as e:
        return {"error": str(e)}
    floor = floors(call)["mxu"]
    if run.mxu < floor:  # of the device, which has at most that of its first core
        return {"error": f"not followed: products of {run.mxu} cycles, the rows need {floor}"}
    blocks = [x for x in run.pieces() if x.mxu and x.times]
    blocks.sort(key=lambda x: -x.cycles)
    return {
        "cycles": run.cycles,
        "copies": run.bytes / chip(call.chip).hbm_bytes_per_cycle,
        "executed_mxu": run.mxu,
        "bundles": len(run.bundles),
        "blocks": [dataclasses.asdict(x) for x in blocks],
        "temporaries": temporaries,
    }


def table(rows, options) -> str:
    heads = ("MXU floor", "HBM floor", "cycles", "copies", "x", "temporaries")
    width = max([len(r["name"]) for r in rows], default=0)
    lines = [
        f"calls of kernels on one {options.chip} core, by its compiler: kilocycles;"
        " x: of the larger floor",
        "",
        " " * width + "".join(f"{h:>12}" for h in heads),
    ]
    kilo = lambda x: f"{x / 1000:>12.1f}"
    for r in rows:
        line = f"{r['name']:<{width}}{kilo(r['mxu'])}{kilo(r['hbm'])}"
        if "error" in r:
            lines.append(f"{line}  {r['error']}")
            continue
        x = max(r["cycles"], r["copies"]) / max(r["mxu"], r["hbm"])
        line += f"{kilo(r['cycles'])}{kilo(r['copies'])}{x:>12.2f}{r['temporaries'] / 1e6:>9.2f} MB"
        parts = [f"{b['bundles']}/{b['mxu']} x {b['times']}" for b in r["blocks"][:3]]
        lines += [line, f"    blocks {', '.join(parts)}; program of {r['bundles']} bundles"]
    lines += [
        "",
        f"Calls of {options.groups} groups of 1024 rows on average. Floors: for the valid rows.",
        "cycles: executed bundles, a block of products at least its MXU time; without the cost of",
        "branches and stalls. copies: their bytes over HBM's rate. x: the larger of both over the",
        "larger floor. blocks: bundles / MXU cycles x times executed. Nothing was run on a TPU.",
    ]
    return "\n".join(lines)


def add_arguments(parser, positive) -> None:
    text = "a projection's forward and both gradients, beside float8 kernels and dense chains"
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--projection", action="store_true", help=text)
    text = "each call with the chosen tiles and with others"
    other.add_argument("--tilings", action="store_true", help=text)
    parser.add_argument("--groups", type=positive, default=32, help="of 1024 rows on average")
    parser.add_argument("--chip", default="v7x", choices=CHIPS, help="not with --projection")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds of one compile")
