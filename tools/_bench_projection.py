"""`bench.py tpu --projection`: one projection of the experts, forward and both gradients.

Tokens saved in float8 with a row scale, on buffers of 1, 2 and 8 times the valid rows. Ours is
three kernels, which quantize the cotangent themselves. Beside them: float8 kernels that take what
was quantized before (tokamax's, where it is installed), and the dense chains around these, plain
XLA operations over the whole buffer:

- `forward`, `dlhs`: a kernel without row scales leaves them to its result;
- `dlhs`: the cotangent times the weights' scales, quantized per row;
- `drhs`: the cotangent times the tokens' row scales, quantized per channel, the tail masked. With
  `drhs again` the tokens are dequantized and both operands quantized per channel.

Kernels are counted as in _bench_tpu.py, the larger of cycles and copies. Of the chains only the
bytes are known that XLA's fusions read and write: at HBM's peak rate, a lower bound. They compute
in the cotangent's dtype, and what a chain reads again is read from HBM.
"""

import importlib.util
import re

from tools import _bench_tpu, _hlo, _programs, _tpu_call
from tools._tpu_call import Call

FACTORS = (1, 2, 8)  # static rows / valid rows
PARTS = ("forward", "dlhs", "drhs")


def kernels(k: int, n: int, m: int, sizes, library="ours") -> dict:
    """part -> Call; ours quantizes the cotangent, tokamax's has it in float8."""
    common = dict(m=m, k=k, n=n, sizes=sizes, library=library)
    cotangent = "quantize" if library == "ours" else "fp8"
    return {
        "forward": Call("gmm", lhs="fp8", **common),
        "dlhs": Call("gmm", lhs=cotangent, transpose=True, **common),
        "drhs": Call("tgmm", lhs="fp8", **common),
    }


# ------------------------------------------------------------------------------ the dense chains


def rescale(out, row_scale):
    """The result [m, n] of a kernel that has no row scales, times these [m, 1]."""
    return out * row_scale.astype(out.dtype)


def quantize_for_dlhs(dout, weight_scale, sizes):
    """(dout [m, n] times its group's scales [g, n] in float8, scale [m, 1])."""
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    rows, ends = jnp.arange(dout.shape[0])[:, None], jnp.cumsum(sizes)[None]
    group = (rows >= ends).sum(1)
    scale = jnp.take(weight_scale.astype(dout.dtype), group, axis=0, mode="clip")
    q = fp8.quantize(dout * scale, "e5m2", channelwise_axes=(0,))
    return q.qvalue, q.scale


def quantize_for_drhs(dout, row_scale, sizes):
    """(dout [m, n] times the tokens' row scale in float8, scale [1, n])."""
    return _per_channel(dout * row_scale.astype(dout.dtype), sizes, "e5m2")


def quantize_again_for_drhs(tokens, row_scale, dout, sizes):
    """(tokens [m, k] and dout [m, n] in float8, each with a scale per channel)."""
    wide = tokens.astype(dout.dtype) * row_scale.astype(dout.dtype)
    return _per_channel(wide, sizes, "e4m3"), _per_channel(dout, sizes, "e5m2")


def _per_channel(x, sizes, dtype):
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    valid = jnp.arange(x.shape[0])[:, None] < sizes.sum()
    q = fp8.quantize(jnp.where(valid, x, 0), dtype, channelwise_axes=(1,))
    return q.qvalue, q.scale


def chains(k: int, n: int, m: int, groups: int) -> dict:
    """part -> [(function, ShapeDtypeStructs)]."""
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as struct

    out, dlhs = (struct((m, x), jnp.bfloat16) for x in (n, k))
    tokens, row_scale = struct((m, k), jnp.float8_e4m3fn), struct((m, 1), jnp.float32)
    weight_scale = struct((groups, n), jnp.float32)
    sizes = struct((groups,), jnp.int32)
    return {
        "forward": [(rescale, (out, row_scale))],
        "dlhs": [(quantize_for_dlhs, (out, weight_scale, sizes)), (rescale, (dlhs, row_scale))],
        "drhs": [(quantize_for_drhs, (out, row_scale, sizes))],
        "drhs again": [(quantize_again_for_drhs, (tokens, row_scale, out, sizes))],
    }


def _chain(steps, rows: int) -> dict:
    """Cycles that its bytes take, and bytes of temporaries with what is handed to the kernel."""
    traffic, made = 0, 0
    for fn, args in steps:
        compiled = _tpu_call.compile_for_core(fn, args)
        traffic += _hlo.report_of_hlo(_programs.text_of(compiled), rows).traffic
        memory = compiled.memory_analysis()
        if fn is not rescale:  # whose result is the projection's
            made = int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    return {"cycles": traffic / _bench_tpu.chip("v7x").hbm_bytes_per_cycle, "temporaries": made}


# ------------------------------------------------------------------------------------- ours


def projection(k: int, n: int, m: int, groups: int, valid: int):
    """(the forward pass and both gradients as a user calls them, ShapeDtypeStructs)."""
    import jax
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as struct

    import fp8moe_prims as fp8

    def step(tokens, row_scale, wide_tokens, weights, weight_scale, wide_weights, sizes, dout):
        # The wide arrays are what the others were made from, for the gradients; never read.
        def forward(wide_tokens, wide_weights):
            return fp8.gmm(
                fp8.QArray(tokens, row_scale, wide_tokens),
                fp8.QArray(weights, weight_scale, wide_weights),
                sizes,
                recipe=fp8.QuantRecipe(),
                tail="undefined",
                expected_rows=valid,
            )

        out, pull = jax.vjp(forward, wide_tokens, wide_weights)
        return out, pull(dout)

    wide, narrow, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
    args = [struct((m, k), narrow), struct((m, 1), f32), struct((m, k), wide)]
    matrices = (groups, k, n)
    args += [struct(matrices, narrow), struct((groups, 1, n), f32), struct(matrices, wide)]
    return step, [*args, struct((groups,), jnp.int32), struct((m, n), wide)]


def measure(options, say) -> list[dict]:
    rows, groups = [], options.groups
    libraries = ("ours", *(["tokamax"] if importlib.util.find_spec("tokamax") else []))
    sizes = _bench_tpu.sizes("aligned", groups)
    for k, n in _bench_tpu.SHAPES:
        for m in (factor * sum(sizes) for factor in FACTORS):
            name = f"k={k} n={n}, {m} static rows"
            if not re.search(options.only, name):
                continue
            row = {"name": name, "groups": groups, "rows": sum(sizes), "static_rows": m}
            for library in libraries:
                row[library] = {}
                for part, call in kernels(k, n, m, sizes, library).items():
                    say(f"{name}: {library}, {part}")
                    row[library][part] = _bench_tpu.counted(call, options.timeout)
            say(f"{name}: chains")
            row["chains"] = {x: _chain(steps, m) for x, steps in chains(k, n, m, groups).items()}
            say(f"{name}: the whole program")
            compiled = _tpu_call.compile_for_core(*projection(k, n, m, groups, sum(sizes)))
            row["temporaries"] = int(compiled.memory_analysis().temp_size_in_bytes)
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------------ the table


def kernel_cycles(row, library: str) -> list[float]:
    """Of each part.

    Raises:
      ValueError: one was not counted.
    """
    for part in PARTS:
        if "error" in row[library][part]:
            raise ValueError(f"{library}, {part}: {row[library][part]['error']}")
    return [max(row[library][part][x] for x in ("cycles", "copies")) for part in PARTS]


def ratios(row) -> dict:
    """Cycles of tokamax's kernels and the chains / ours, for both ways to quantize for drhs."""
    ours, peer = (sum(kernel_cycles(row, library)) for library in ("ours", "tokamax"))
    chains = {part: chain["cycles"] for part, chain in row["chains"].items()}
    rest = peer + chains["forward"] + chains["dlhs"]
    return {part: (rest + chains[part]) / ours for part in ("drhs", "drhs again")}


def table(rows, options) -> str:
    lines = [
        "one projection on one v7x core, forward and both gradients, tokens saved in float8:"
        " kilocycles",
        "",
        f"{'':<26}{''.join(f'{x:>10}' for x in (*PARTS, 'all'))}{'temporaries':>16}",
    ]

    def line(label, cycles, temporaries=None):
        cells = "".join(f"{x / 1000:>10.1f}" for x in (*cycles, sum(cycles)))
        end = "" if temporaries is None else f"{temporaries / 2**20:>12.2f} MiB"
        lines.append(f"{'  ' + label:<26}{cells}{end}")

    for row in rows:
        lines.append(row["name"])
        try:
            line("ours", kernel_cycles(row, "ours"), row["temporaries"])
            if "tokamax" in row:
                line("tokamax's kernels", kernel_cycles(row, "tokamax"))
        except ValueError as e:
            lines.append(f"  {e}")
            continue
        for last in ("drhs", "drhs again"):
            taken = [row["chains"][part] for part in ("forward", "dlhs", last)]
            label = "dense chains" + (", both again" if last != "drhs" else "")
            most = max(x["temporaries"] for x in taken)
            line(label, [x["cycles"] for x in taken], most)
        if "tokamax" in row:
            x = ratios(row)
            lines.append(
                f"  kernels and chains / ours: {x['drhs']:.2f}; both again: {x['drhs again']:.2f}"
            )
    lines += [
        "",
        f"{options.groups} groups of 1024 rows. Kernels: larger of cycles and copies, as without",
        "--projection. Chains: what XLA's fusions read and write, over HBM's rate, a lower bound;",
        "both again: the tokens are dequantized, and quantized again for drhs. Temporaries: ours",
        "of the whole program; a chain's largest, with what it makes for its kernel. Nothing was",
        "run on a TPU.",
    ]
    return "\n".join(lines)
