"""Cycles of the grouped matmul kernels on a TPU core, by the TPU compiler's own simulator.

    python tools/_tpu_sim.py CALL.json RESULT.json          (a process of its own, see `simulate`)

The kernel that is compiled is the one that users get, with these changes:

- The tables, which a user's program computes from the group sizes at run time, are written into
  scalar memory by the kernel's first step, so that the simulator knows every tile's coordinates
  and follows a whole call. A visit without rows stands before the others, for that step; what the
  stores cost (a cycle each) is subtracted.
- The window of every block in HBM is the array's first: no copy is started but the first and last
  ones, so that the cycles are those of computing. (The simulator charges some copies five times
  too much, and lets others share HBM for free.) The bytes that the real windows move are counted
  from the same tables.
- A conversion from float32 to float8, on which the simulator aborts, is a conversion to int8 of the
  same bits: one instruction of the same unit as well. The kernel is compiled once more as it is;
  `bundles` of both say how close the two programs are.
"""

import contextlib
import dataclasses
import functools
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _tpu


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel.

    Attributes:
      op: "gmm" or "tgmm".
      m, k, n: rows of the buffer, contraction and output columns of the forward product; for the
        gradients they keep these meanings.
      sizes: rows of each group, which follow each other from row 0.
      lhs: "fp8" (saved, with a row scale), "quantize" (bf16, quantized in the kernel) or "bf16".
      transpose: gmm's dlhs form: the rows have n columns and meet the weights transposed.
      quantize_dout: tgmm: whether dout is quantized.
      expected: rows expected to be valid.
    """

    op: str
    m: int
    k: int
    n: int
    sizes: tuple[int, ...]
    lhs: str = "fp8"
    transpose: bool = False
    expected: int | None = None

    @property
    def rows(self) -> int:
        return sum(self.sizes)


# ------------------------------------------------------------------------- in the parent process


def simulate(call: Call, target="tpu7x", python=sys.executable, timeout=300, follow=True) -> dict:
    """The figures of one call: cycles, hbm_bytes, bundles, blocks, temporaries; or an error too."""
    out = {}
    for mode in ("real", "simulated") if follow else ("real",):
        with tempfile.TemporaryDirectory(prefix="tpu_sim_") as folder:
            try:
                out |= _run_child(call, target, mode, folder, python, timeout)
            except subprocess.TimeoutExpired:
                return out | {"error": f"{mode}: no result after {timeout} s"}
            if mode == "real":
                out |= _blocks(os.path.join(folder, "llo"))
            else:
                out |= _profile(os.path.join(folder, "profile"))
        if "error" in out and "cycles" not in out:
            return out
    # The simulator's flag makes some compiles fail after the figure was written.
    out.pop("error", None)
    return out if "cycles" in out or not follow else out | {"error": "no figure was written"}


def _run_child(call, target, mode, folder, python, timeout) -> dict:
    """What the child process wrote, and its error if it failed."""
    job, result = os.path.join(folder, "job.json"), os.path.join(folder, "result.json")
    with open(job, "w") as f:
        json.dump({"call": dataclasses.asdict(call), "target": target, "mode": mode}, f)
    for sub in ("llo", "profile"):
        os.mkdir(os.path.join(folder, sub))
    flags = f"--xla_jf_dump_static_llo_profile_to={folder}/profile"
    if mode == "real":
        flags = (
            f"--xla_jf_dump_to={folder}/llo --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
        )
    more = {"LIBTPU_INIT_ARGS": flags, "TPU_STDERR_LOG_LEVEL": "3"}
    done = subprocess.run(
        [python, os.path.abspath(__file__), job, result],
        env=dict(os.environ, JAX_TRACEBACK_FILTERING="off", **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    out = {}
    if os.path.exists(result):
        with open(result) as f:
            out = json.load(f)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        fatal = [x for x in lines if re.match(r"(F\d{4}|[\w.]*Error)", x)] or lines[-1:]
        out["error"] = f"{mode}: {fatal[0][:300] if fatal else 'aborted'}"
    return out


_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}:)?\s*:?\s*[> ]*\{")


def _blocks(folder) -> dict:
    """Length of the kernel's program, and bundles and MXU cycles of its innermost matmul loops."""
    paths = [p for p in glob.glob(f"{folder}/*fp8moe*final_bundles.txt") if "schedule" not in p]
    if not paths:
        return {}
    multiplies, branches, begins = [], [], {}
    with open(paths[0]) as f:
        for line in f:
            if _BUNDLE.match(line):
                multiplies.append(0)
            if not multiplies:
                continue
            at = len(multiplies) - 1
            multiplies[at] += len(re.findall(r"\bvmatmul\.", line))
            for x in re.findall(r"sbr\.\w+ [^;]*?target = \$region(\d+)", line):
                branches.append((at, x))
            for x in re.findall(r"Start(?:/End empty)? region (\d+)", line):
                begins.setdefault(x, at)
    loops = {(begins[x], at + 1) for at, x in branches if begins.get(x, at + 1) <= at}
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    blocks = [
        # An issue holds one of the two MXUs for eight cycles.
        {"bundles": stop - start, "mxu": 4 * sum(multiplies[start:stop])}
        for start, stop in sorted(inner)
        if any(multiplies[start:stop])
    ]
    return {"bundles": len(multiplies), "blocks": blocks}


def _profile(folder) -> dict:
    for path in glob.glob(f"{folder}/*_static_llo_profile.textproto"):
        with open(path) as f:
            for name, cycles in re.findall(
                r'hlo_op_name: "([^"]*)".*?estimated_cycles: (\d+)', f.read(), re.S
            ):
                if "fp8moe" in name:
                    return {"cycles": int(cycles)}
    return {}


# -------------------------------------------------------------------------- in the child process


def _function(call: Call, target: str):
    """(function of starts, ends and arrays that makes the call, the arrays' ShapeDtypeStructs)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fp8moe_prims.gmm import GmmOperands, GmmParams
    from fp8moe_prims.lowering.tpu import gmm, tgmm_quant
    from fp8moe_prims.lowering.tpu.chip import CHIPS
    from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams

    bf16, fp8, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
    chip = CHIPS["v7x" if target == "tpu7x" else target]
    struct = jax.ShapeDtypeStruct
    m, k, n, g = call.m, call.k, call.n, len(call.sizes)
    saved, plain = call.lhs == "fp8", call.lhs == "bf16"
    quantized = {"quantize": "e5m2" if call.transpose else "e4m3"}.get(call.lhs)
    common = dict(
        out_dtype=np.dtype(bf16),
        lhs_dtype=quantized,
        tail="undefined",
        expected_rows=call.expected or call.rows,
    )
    lhs = struct((m, n if call.transpose else k), fp8 if saved else bf16)
    row_scale = [struct((m, 1), f32)] if saved else []
    if call.op == "gmm":
        p = GmmParams(transpose_rhs=call.transpose, **common)
        rhs = struct((g, k, n), bf16 if plain else fp8)
        args = [lhs, rhs, *row_scale, *([] if plain else [struct((g, 1, n), f32)])]

        def fn(starts, ends, lhs, rhs, *scales):
            lhs_scale = scales[0] if saved else None
            rhs_scale = None if plain else scales[-1]
            x = GmmOperands(lhs, rhs, starts, ends, lhs_scale, rhs_scale)
            return gmm.gmm(x, p, chip=chip)

    else:
        p = TgmmParams(dout_dtype=None if plain else "e5m2", **common)
        args = [lhs, struct((m, n), bf16), *row_scale]

        def fn(starts, ends, lhs, dout, lhs_scale=None):
            x = TgmmOperands(lhs, dout, starts, ends, lhs_scale)
            return tgmm_quant.tgmm_quant(x, p, chip=chip)

    return fn, args


def _bounds(call: Call):
    """starts, ends: int32 [g]."""
    import numpy as np

    ends = np.cumsum(call.sizes).astype(np.int32)
    return ends - np.asarray(call.sizes, np.int32), ends


@contextlib.contextmanager
def _empty_visit():
    """The tables of both kernels with a visit before the others that has no rows."""
    import jax.numpy as jnp
    import numpy as np

    from fp8moe_prims.lowering.tpu import gmm, tgmm_quant

    make, most, make_tgmm = gmm.make_visits, gmm.max_visits, tgmm_quant.make_tables

    def visits(*args, **kwargs):
        v = make(*args, **kwargs)
        return dataclasses.replace(
            v,
            group=jnp.concatenate([jnp.zeros((1,), np.int32), v.group]),
            shift=v.shift.at[1:].add(-1),
            stop=v.stop.at[1:].add(1),
            count=v.count + np.int32(1),
        )

    @functools.cache
    def once():
        return []

    def tables(*args):
        """Of tgmm: the first group is empty; one of its visits, one per output tile, is enough."""
        if not once():
            once().append(first(*args))
        return once()[0]

    def first(*args):
        total, columns = make_tgmm(*args)
        unit, code, slot, *holds = (np.asarray(x) for x in columns)
        keep = np.arange(len(unit)) < int(total) + 1
        extra = (unit == 0) & (code >> 18 > 0)
        keep &= ~extra
        drop = int(extra.sum())
        holds = [np.maximum(x[keep] - drop, 0).astype(np.int32) for x in holds]
        columns = (unit[keep], code[keep], slot[keep], *holds)
        return total - np.int32(drop), tuple(jnp.asarray(x) for x in columns)

    with (
        mock.patch.object(gmm, "make_visits", visits),
        mock.patch.object(gmm, "max_visits", lambda *a: most(*a) + 1),
        mock.patch.object(tgmm_quant, "make_tables", tables),
    ):
        yield


def _moved(spec, array, grid, tables) -> int:
    """Bytes that the pipeline moves for an operand: its block, whenever its coordinates change."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    steps = jnp.asarray(np.indices(grid, np.int32).reshape(len(grid), -1))
    tables = [jnp.asarray(x) for x in tables]
    to_arrays = lambda *ids: [jnp.asarray(i, np.int32) for i in spec.index_map(*ids, *tables)]
    index = np.stack(jax.vmap(to_arrays)(*steps))
    changes = 1 + int((np.diff(index, axis=1) != 0).any(0).sum())
    size = lambda d: 1 if d is None else getattr(d, "block_size", d)
    block = int(np.prod([size(d) for d in spec.block_shape]))
    return changes * block * np.dtype(array.dtype).itemsize


class _Recorded(Exception):
    """Carries a pallas_call's tables and grid, with their values."""


def _tables_of(fn, starts, ends, args):
    """The tables, NumPy arrays, and the grid of the one pallas_call in fn(starts, ends, *args)."""
    import jax
    import numpy as np
    from jax.experimental import pallas as pl

    def pallas_call(body, *, grid_spec, **options):
        def call(*args):
            tables = [np.asarray(x) for x in args[: grid_spec.num_scalar_prefetch]]
            raise _Recorded(tables, tuple(int(x) for x in grid_spec.grid))

        return call

    def run(*arrays):
        # Whatever does not depend on the arrays has its value here, and is not traced.
        with jax.ensure_compile_time_eval():
            return fn(*map(jax.numpy.asarray, (starts, ends)), *arrays)

    with mock.patch.object(pl, "pallas_call", pallas_call):
        try:
            jax.eval_shape(run, *args)
        except _Recorded as e:
            return e.args
    raise RuntimeError("the call has no kernel")


def _constant_tables(tables, grid, figures):
    """A stand-in for pl.pallas_call, see the module docstring; fills in the dict ``figures``."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl

    real = pl.pallas_call

    def pallas_call(body, *, grid_spec, out_shape, **options):
        def call(*args):
            count = grid_spec.num_scalar_prefetch
            specs = [*grid_spec.in_specs, grid_spec.out_specs]
            arrays = [*args[count:], out_shape]
            with jax.ensure_compile_time_eval():
                moved = [_moved(s, a, grid, tables) for s, a in zip(specs, arrays, strict=True)]
            stores = sum(x.size for x in tables) + 1
            figures.update(hbm_bytes=sum(moved), table_stores=stores, grid=grid)

            def first_window(spec):
                def index_map(*ids_and_refs):
                    index = spec.index_map(*ids_and_refs[:-1])
                    return tuple(i * ids_and_refs[-1][0] for i in index)

                return pl.BlockSpec(spec.block_shape, index_map)

            def with_tables(*refs):
                at_start = functools.reduce(
                    jnp.logical_and, [pl.program_id(i) == 0 for i in range(len(grid))]
                )

                @pl.when(at_start)
                def _write():
                    refs[count][0] = np.int32(0)
                    for ref, values in zip(refs[:count], tables, strict=True):
                        for i, value in enumerate(values):
                            ref[i] = value

                body(*refs[:count], *refs[count + 1 :])

            spec = type(grid_spec)(
                num_scalar_prefetch=count + 1,
                grid=grid,
                in_specs=[first_window(s) for s in grid_spec.in_specs],
                out_specs=first_window(grid_spec.out_specs),
                scratch_shapes=grid_spec.scratch_shapes,
            )
            changed = real(with_tables, grid_spec=spec, out_shape=out_shape, **options)
            return changed(*args[:count], jnp.zeros((1,), np.int32), *args[count:])

        return call

    return mock.patch.object(pl, "pallas_call", pallas_call)


def _float8_by_bits():
    """float32 to float8 by one integer conversion: of the same cost, and of no meaning."""
    import jax.numpy as jnp
    from jax import lax

    from fp8moe_prims.lowering.tpu import dots

    def to_float8(x, dtype):
        bits = lax.bitcast_convert_type(x, jnp.int32).astype(jnp.int8)
        return lax.bitcast_convert_type(bits, dtype)

    return mock.patch.object(dots, "to_float8", to_float8)


def _compile(call: Call, target: str, mode: str, figures: dict, save) -> None:
    """Compiles the call and adds to the figures; ``save()`` writes those known so far."""
    import jax
    import numpy as np

    fn, args = _function(call, target)
    starts, ends = _bounds(call)
    with contextlib.ExitStack() as stack:
        if mode == "simulated":
            if call.op == "tgmm":
                starts, ends = (np.concatenate([[0], x]).astype(np.int32) for x in (starts, ends))
            stack.enter_context(_empty_visit())
            run = functools.partial(fn, starts, ends)
            tables = _tables_of(fn, starts, ends, args)
            stack.enter_context(_constant_tables(*tables, figures))
            stack.enter_context(_float8_by_bits())
        else:
            args = [jax.ShapeDtypeStruct(starts.shape, np.int32)] * 2 + args
            run = fn
        mesh = jax.sharding.Mesh(np.array(_tpu.devices(target)[:1]), ("x",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in args]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(run).lower(*args)
            save()
            compiled = lowered.compile()
    if mode == "real":
        figures["temporaries"] = int(compiled.memory_analysis().temp_size_in_bytes)
        save()


def main() -> None:
    with open(sys.argv[1]) as f:
        job = json.load(f)
    call = Call(**job["call"] | {"sizes": tuple(job["call"]["sizes"])})
    _tpu.set_environment()
    figures = {}

    def save():
        with open(sys.argv[2], "w") as f:
            json.dump(figures, f)

    _compile(call, job["target"], job["mode"], figures, save)
    sys.stdout.flush()
    os._exit(0)  # libtpu's teardown has nothing to tell


if __name__ == "__main__":
    main()
