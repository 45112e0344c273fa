"""`bench.py tpu --tilings`: the chosen tiles of a call beside others, counted as in _bench_tpu.py.

The others: of gmm, tiles of 1024, 512 and 256 rows with all, half and a quarter of the columns; of
tgmm_quant, for either role of the operands and each width of S's tiles the tiling with the best
estimate, of these the best six. All must fit VMEM.
"""

import dataclasses
import re

from tools import _bench_tpu, _tpu_call

OTHERS = 6


def tilings(call: _tpu_call.Call) -> list[dict]:
    """Fields of the chosen tiling, and of the others."""
    from fp8moe_prims.lowering.tpu import gmm_tiles, tgmm_tiles

    problem, chip = _tpu_call.problem(call)
    if call.op == "gmm":
        columns = [problem.n // parts for parts in (1, 2, 4)]
        found = [gmm_tiles.choose(problem, chip)]
        for t in gmm_tiles.fitting(problem, chip, problem.k):
            if t.tm in (1024, 512, 256) and t.tn in columns:
                found.append(t)
    else:
        best = {}
        for t in tgmm_tiles.fitting(problem, chip):
            best.setdefault((t.resident_b, t.ts), t)
        found = list(best.values())[: OTHERS + 1]
    return list(map(dataclasses.asdict, dict.fromkeys(found)))


def measure(options, say) -> list[dict]:
    rows = []
    for name, call in _bench_tpu.calls(options.groups, options.chip).items():
        if call.library == "ours" and re.search(options.only, name):
            row = {"name": name, **_bench_tpu.floors(call), "tilings": []}
            rows.append(row)
            for tiles in tilings(call):
                say(f"{name}: {shape(tiles)}")
                one = dataclasses.replace(call, tiles=tiles)
                counted = _bench_tpu.counted(one, options.timeout)
                row["tilings"].append({"tiles": tiles, **counted})
    return rows


def shape(tiles: dict) -> str:
    """The sizes that tell a tiling from the others."""
    if "tm" in tiles:
        return "{tm} rows, {tn} columns".format(**tiles)
    return "{} resident, S {ts}, R {tr}".format("b" if tiles["resident_b"] else "a", **tiles)


def table(rows, options) -> str:
    lines = [f"tilings on one {options.chip} core, by its compiler: x of the larger floor", ""]
    for row in rows:
        floor = max(row["mxu"], row["hbm"])
        times = [max(t["cycles"], t["copies"]) if "cycles" in t else None for t in row["tilings"]]
        known = [t for t in times if t]
        chosen = f"{times[0] / min(known):.3f} of the best" if times[0] else "not counted"
        lines.append(f"{row['name']}: the chosen one takes {chosen}")
        for tiling, time in zip(row["tilings"], times, strict=True):
            x = f"{time / floor:.3f}" if time else tiling["error"]
            lines.append(f"    {shape(tiling['tiles']):<34}{x}")
    lines += ["", "The first one is the chosen one. Nothing was run on a TPU."]
    return "\n".join(lines)
