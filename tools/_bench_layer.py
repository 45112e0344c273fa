"""`bench.py layer`: the expert-parallel layer, compiled for TPUs, or timed over host devices."""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _hlo, _tpu

BACKWARDS = ("in_kernel", "dense")


def layer_step(options, backward: str, factor: float):
    """(function, its ShapeDtypeStructs): the layer forward and the gradients of all five inputs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import fp8moe_prims as fp8

    devices = jax.devices() if options.target == "cpu" else _tpu.devices(options.target)
    devices = np.array(devices)
    mesh = jax.sharding.Mesh(devices.reshape(-1, options.ep), ("fsdp", "expert"))
    config = fp8.moe.MoEConfig(
        options.experts,
        options.top_k,
        ep_axis="expert",
        recipe=fp8.QuantRecipe(backward=backward),
        ragged_buffer_factor=factor,
    )

    def gathered(w):
        """The weights of this device's experts: in fp8, or as today's frameworks do in bfloat16."""
        if backward == "in_kernel":
            w = fp8.quantize(w, config.recipe.weight_dtype, channelwise_axes=(0, 2))
            return fp8.ring_all_gather(w, "fsdp", axis=2, tiled=True)
        return jax.lax.all_gather(w, "fsdp", axis=2, tiled=True)

    def layer(x, logits, *weights):
        weights = [gathered(w) for w in weights] if options.fsdp else weights
        return fp8.moe.moe_ffn(x, logits, *weights, config=config)[0]

    def local(dy, *args):
        y, pull = jax.vjp(layer, *args)
        return y, pull(dy)

    rows, experts = P(("fsdp", "expert")), P("expert", None, "fsdp" if options.fsdp else None)
    specs = (rows, rows, rows, experts, experts, experts)
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, specs[1:]))
    t, d, f, e = options.tokens * mesh.size, options.d, options.f, options.experts
    wide = jnp.bfloat16
    shapes = (
        ((t, d), wide),
        ((t, d), wide),
        ((t, e), jnp.float32),
        ((e, d, f), wide),
        ((e, d, f), wide),
        ((e, f, d), wide),
    )
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(fn), args


def compile_for_tpu(options, say):
    """One row per buffer factor and backward."""
    import jax

    rows = []
    for factor in options.factors:
        for backward in BACKWARDS:
            say(f"compiling: factor {factor:g}, backward {backward}")
            fn, args = layer_step(options, backward, factor)
            compiled = fn.lower(*args).compile()
            memory = compiled.memory_analysis()
            row = {
                "how": "compiled",
                "factor": factor,
                "backward": backward,
                "temporaries": int(memory.temp_size_in_bytes),
                "arguments": int(memory.argument_size_in_bytes),
                "outputs": int(memory.output_size_in_bytes),
            }
            try:
                text = compiled.as_text()
            except jax.errors.JaxRuntimeError:  # an older jaxlib cannot read libtpu's program back
                text = None
            if text is not None:
                row["collectives"] = _hlo.collectives(text)
                row["kernels"] = text.count('custom_call_target="tpu_custom_call"')
            rows.append(row)
    return rows


def tpu_table(rows, options) -> str:
    shape = (
        f"d={options.d} f={options.f} {options.experts} experts, top {options.top_k},"
        f" {options.tokens} tokens a device, ep {options.ep}"
        + (", weights sharded over the other devices" if options.fsdp else "")
    )
    lines = [
        f"the layer, forward and all gradients, on {options.target}: {shape}",
        "",
        f"{'factor':>8}{'backward':>12}{'temporaries':>14}{'/ dense':>9}{'kernels':>9}"
        "  collectives",
    ]
    for r in rows:
        dense = next(o for o in rows if o["factor"] == r["factor"] and o["backward"] == "dense")
        moved = "not known to this jaxlib"
        if "collectives" in r:
            found = r["collectives"].items()
            moved = ", ".join(f"{n} {kind} {b / 2**20:.1f} MiB" for kind, (n, b) in found)
        lines.append(
            f"{r['factor']:>8g}{r['backward']:>12}{r['temporaries'] / 2**30:>10.2f} GiB"
            f"{r['temporaries'] / dense['temporaries']:>9.2f}{r.get('kernels', '-'):>9}  {moved}"
        )
    lines += [
        "",
        "factor: buffer rows / balanced rows, -1 the worst case. Temporaries of one device and",
        "collectives (how many, bytes of their results on one device): the TPU compiler's own",
        "figures, ahead of time; nothing was run.",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------ on the CPU


def force_host_devices(count: int) -> None:
    """Makes the CPU look like so many devices; before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"


def fill(like):
    """jitted function of no arguments that makes zeros like these arrays (or ShapeDtypeStructs)."""
    import jax
    import jax.numpy as jnp

    # Zeros that are arguments: equal constants would be merged, and one filled array copied.
    zeros = [jnp.zeros((), x.dtype) for x in like]
    fn = jax.jit(lambda *z: [jnp.broadcast_to(v, x.shape) for v, x in zip(z, like, strict=True)])
    return lambda: fn(*zeros)


def buffers(fn, args, rows: int):
    """The results of our operations that have the buffer's rows: what the CPU fills with zeros."""
    import jax

    found, pending = [], [jax.make_jaxpr(fn)(*args).jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            if eqn.primitive.name.startswith("fp8moe_"):
                found += [v.aval for v in eqn.outvars if v.aval.shape[:1] == (rows,)]
            pending += [j for value in eqn.params.values() for j in _hlo.jaxprs(value)]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]


def time_on_cpu(options, say):
    """One row per factor: seconds of the layer and of filling its buffers, in turn."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fp8moe_prims.moe import buffer_rows

    sides = {}
    for factor in options.factors:
        say(f"compiling: factor {factor:g}")
        fn, args = layer_step(options, "in_kernel", factor)
        rng = np.random.default_rng(0)
        make = lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype)  # noqa: B023
        values = [jax.device_put(make(a), a.sharding) for a in args]
        total = options.tokens * options.ep * options.top_k
        worst = min(options.top_k, options.experts // options.ep) * options.tokens * options.ep
        m = buffer_rows(total, total // options.ep, worst, factor)
        # One device's buffers, ep times: so much memory is filled in all.
        zeros = fill(buffers(fn, args, m) * options.ep)
        run = lambda fn=fn, values=values: fn(*values)
        for side in (run, zeros):
            jax.block_until_ready(side())
        sides[factor] = m, run, zeros, [], []
    for repetition in range(options.repetitions):
        say(f"repetition {repetition + 1} of {options.repetitions}")
        for _, run, zeros, ours, filling in sides.values():
            for side, times in ((run, ours), (zeros, filling)):
                start = time.perf_counter()
                jax.block_until_ready(side())
                times.append(time.perf_counter() - start)
    rows = []
    for factor, (m, _, _, ours, filling) in sides.items():
        row = {"how": "timed", "factor": factor, "buffer_rows": m}
        for name, pick in (("min", min), ("median", statistics.median)):
            row[name] = {"ours": pick(ours), "fill": pick(filling)}
        rows.append(row)
    return rows


def cpu_table(rows, options) -> str:
    first = rows[0]
    work = lambda r, name: r[name]["ours"] - r[name]["fill"]
    head = f"less filling / at {first['factor']:g}"
    lines = [
        f"the layer, forward and all gradients, over {options.ep} host devices: d={options.d}"
        f" f={options.f} {options.experts} experts, top {options.top_k}, {options.tokens} tokens"
        " a device",
        "",
        f"{'':<8}{'factor':>8}{'rows':>10}{head:>28}{'with it':>10}{'filling':>10}",
    ]
    for r in rows:
        pair = "; ".join(f"{work(r, n) / work(first, n):.2f}" for n in ("min", "median"))
        whole = r["min"]["ours"] / first["min"]["ours"]
        share = r["min"]["fill"] / r["min"]["ours"]
        lines.append(
            f"{r['how']:<8}{r['factor']:>8g}{r['buffer_rows']:>10}{pair:>28}{whole:>10.2f}"
            f"{share:>10.0%}"
        )
    lines += [
        "",
        "Ratios of minima; of medians. Filling: the zeros of the buffers that our operations make",
        "on a CPU, subtracted. Only the ratios mean something.",
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser, positive) -> None:
    """The defaults are DeepSeek-V3's layer."""
    integers = {
        "tokens": (4096, "tokens of a device"),
        "d": (7168, "features"),
        "f": (2048, "features of an expert"),
        "experts": (256, "of all devices"),
        "top-k": (8, "experts of a token"),
        "ep": (8, "devices that share the experts"),
    }
    for name, (default, text) in integers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="shard the weights over the devices beyond ep too; in_kernel gathers them in fp8,"
        " dense in bfloat16",
    )
    parser.add_argument("--target", default="tpu7x:2x2x1", help="TPU topology, or cpu")
    parser.add_argument("--repetitions", type=positive, default=5, help="with --target cpu")
    parser.add_argument(
        "--factors",
        type=lambda text: [float(x) for x in text.split(",")],
        default="-1,1",
        metavar="F,F,...",
        help="ragged_buffer_factor of the layer; <= 0: nothing is ever dropped",
    )
