"""One call of a grouped matmul kernel, compiled for a TPU core and followed through its bundles.

    python tools/_tpu_call.py CALL.json RESULT.json          (a process of its own, see `follow`)

The compiler writes its listings where flags say that are read once in a process: so every call is
compiled by a child process, which also computes what the kernel is given in scalar memory. The
kernel is the one that users get.
"""

import contextlib
import dataclasses
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import _llo, _llo_run, _tpu


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel.

    Attributes:
      op: "gmm" or "tgmm".
      m, k, n: rows of the buffer, contraction and output columns of the forward product; for the
        gradients they keep these meanings.
      sizes: rows of each group, which follow each other from row 0.
      lhs: "fp8" (saved, with a row scale), "quantize" (bf16, quantized in the kernel), "int8" (the
        same, all quantized values int8) or "bf16".
      transpose: gmm's dlhs form: the rows have n columns and meet the weights transposed.
      library: "ours", or "tokamax": its second TPU kernels, whose tgmm takes both operands in
        float8 ("fp8") or in bf16, and whose gmm takes a bf16 lhs ("quantize", "bf16") or one in
        float8 that has no row scale ("fp8"; transposed, neither has the weights' scale).
      chip: a name of lowering/tpu/chip.py.
      tiles: fields of the tiling to take, None for the chooser's.
    """

    op: str
    m: int
    k: int
    n: int
    sizes: tuple[int, ...]
    lhs: str = "fp8"
    transpose: bool = False
    library: str = "ours"
    chip: str = "v7x"
    tiles: dict | None = None

    @property
    def rows(self) -> int:
        return sum(self.sizes)


# ------------------------------------------------------------------------- in the parent process


def target(chip: str) -> str:
    """The topology of a chip's name."""
    return "tpu7x" if chip == "v7x" else chip


def follow(call: Call, timeout=600) -> tuple[_llo_run.Run, int]:
    """(what the call executes, bytes of the temporaries of the program around it).

    Raises:
      RuntimeError: the call does not compile, or takes longer than ``timeout`` seconds.
      ValueError: its listing cannot be followed.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_call_") as folder:
        made = _run_child(call, folder, timeout)
        paths = glob.glob(f"{folder}/*gmm*[0-9]-final_bundles.txt")
        if len(paths) != 1:
            raise RuntimeError(f"the compiler wrote {len(paths)} listings of a kernel, not one")
        with open(paths[0]) as f:
            run = _llo_run.follow(f.read(), dict(enumerate(made["operands"])))
    return run, made["temporaries"]


def _run_child(call, folder, timeout) -> dict:
    """What the child process found; the compiler's listings are in the folder."""
    job, result = os.path.join(folder, "job.json"), os.path.join(folder, "result.json")
    with open(job, "w") as f:
        json.dump(dataclasses.asdict(call), f)
    environment = _llo.dumping(folder, ".*final_bundles.*")
    environment |= {"JAX_TRACEBACK_FILTERING": "off", "TPU_STDERR_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), job, result],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"no result after {timeout} s") from e
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        fatal = [x for x in lines if re.match(r"(F\d{4}|[\w.]*Error)", x)] or lines[-1:]
        raise RuntimeError(fatal[0][:300] if fatal else "the compiler aborted")
    with open(result) as f:
        return json.load(f)


# -------------------------------------------------------------------------- in the child process


def _function(call: Call):
    """(function that makes the call, ShapeDtypeStructs of its arguments: starts, ends, arrays)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fp8moe_prims.gmm import GmmOperands, GmmParams
    from fp8moe_prims.lowering.tpu import gmm, tgmm_quant
    from fp8moe_prims.lowering.tpu.chip import CHIPS
    from fp8moe_prims.tgmm_quant import TgmmOperands, TgmmParams

    bf16, fp8, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
    chip = CHIPS[call.chip]
    struct = jax.ShapeDtypeStruct
    m, k, n, g = call.m, call.k, call.n, len(call.sizes)
    saved, plain, int8 = call.lhs == "fp8", call.lhs == "bf16", call.lhs == "int8"
    quantized = {"quantize": "e5m2" if call.transpose else "e4m3", "int8": "int8"}.get(call.lhs)
    common = dict(
        out_dtype=np.dtype(bf16),
        lhs_dtype=quantized,
        tail="undefined",
        expected_rows=call.rows,
    )
    bounds = [struct((g,), np.int32)] * 2
    lhs = struct((m, n if call.transpose else k), fp8 if saved else bf16)
    row_scale = [struct((m, 1), f32)] if saved else []
    if call.op == "gmm":
        p = GmmParams(transpose_rhs=call.transpose, **common)
        rhs = struct((g, k, n), bf16 if plain else jnp.int8 if int8 else fp8)
        args = [*bounds, lhs, rhs, *row_scale, *([] if plain else [struct((g, 1, n), f32)])]

        def fn(starts, ends, lhs, rhs, *scales):
            lhs_scale = scales[0] if saved else None
            rhs_scale = None if plain else scales[-1]
            x = GmmOperands(lhs, rhs, starts, ends, lhs_scale, rhs_scale)
            return gmm.gmm(x, p, chip=chip)

    else:
        p = TgmmParams(dout_dtype=None if plain else "int8" if int8 else "e5m2", **common)
        args = [*bounds, lhs, struct((m, n), bf16), *row_scale]

        def fn(starts, ends, lhs, dout, lhs_scale=None):
            x = TgmmOperands(lhs, dout, starts, ends, lhs_scale)
            return tgmm_quant.tgmm_quant(x, p, chip=chip)

    return fn, args


def _tokamax(call: Call):
    """(tokamax's function, ShapeDtypeStructs of its arguments: group sizes, arrays)."""
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct as struct
    from tokamax._src import config
    from tokamax._src.ops.gmm_v2 import gmm_v2, tgmm_v2

    m, k, n, g = call.m, call.k, call.n, len(call.sizes)
    bf16, fp8, f32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32
    common = dict(preferred_element_type=bf16)
    if call.op == "gmm":
        quantize, plain = call.lhs == "quantize", call.lhs == "bf16"
        e5m2 = jnp.float8_e5m2
        lhs = struct((m, n), e5m2) if call.transpose else struct((m, k), fp8)
        if call.lhs != "fp8":
            lhs = struct(lhs.shape, bf16)
        scale = [] if plain or call.transpose else [struct((g, 1, 1, n), f32)]
        args = [lhs, struct((g, k, n), bf16 if plain else fp8), *scale]
        common |= dict(maybe_quantize_lhs=quantize, zero_initialize=False)
        common |= dict(transpose_rhs=call.transpose)

        def fn(sizes, lhs, rhs, scale=None):
            return gmm_v2.gmm_v2(lhs, rhs, sizes, scale, **common)

    else:
        saved = call.lhs == "fp8"
        scale = [struct((1, 1, n), f32)] if saved else []
        args = [struct((m, x), fp8 if saved else bf16) for x in (k, n)] + scale

        def fn(sizes, lhs, dout, scale=None):
            return tgmm_v2.tgmm_v2(lhs, dout, sizes, g, rhs_scale=scale, **common)

    def one_core(*args):
        with config.disable_multi_core_mode(True):
            return fn(*args)

    return one_core, [struct((g,), jnp.int32), *args]


class _Recorded(Exception):
    """Carries what a call was about to do."""


def _recorded(module, name: str, recorder, fn, args):
    """What a recorder in place of the module's function raises while fn is traced."""
    import jax

    with mock.patch.object(module, name, recorder):
        try:
            jax.eval_shape(fn, *args)
        except _Recorded as e:
            return e.args[0]
    raise RuntimeError("the call has no kernel")


def _chooser(call: Call):
    """(module with the kernel's call, name of the function there that chooses tiles)."""
    from fp8moe_prims.lowering.tpu import gmm, tgmm_quant

    return (gmm, "choose") if call.op == "gmm" else (tgmm_quant, "choose_tiles")


def problem(call: Call):
    """(the problem that tiles are chosen for, chip); imports JAX."""

    def record(*args):
        raise _Recorded(args)

    return _recorded(*_chooser(call), record, *_function(call))


@contextlib.contextmanager
def _tiles(call: Call):
    """The call's tiles are taken."""
    if call.tiles is None:
        yield
        return
    from fp8moe_prims.lowering.tpu import gmm_tiles, tgmm_tiles

    kind = gmm_tiles.Tiles if call.op == "gmm" else tgmm_tiles.Tiles
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in call.tiles.items()}
    with mock.patch.object(*_chooser(call), lambda *_: kind(**fields)):
        yield


def _scalars(fn, call: Call, args) -> list:
    """The kernel's operands in scalar memory, in their order: run-time grid sizes, then tables."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl

    def pallas_call(body, *, grid_spec, **options):
        def record(*args):
            tables = [np.asarray(x) for x in args[: grid_spec.num_scalar_prefetch]]
            sizes = [int(x) for x in grid_spec.grid if not isinstance(x, int)]
            raise _Recorded([*sizes, *(x.view(np.int32).ravel().tolist() for x in tables)])

        return record

    ends = np.cumsum(call.sizes).astype(np.int32)
    starts = ends - np.asarray(call.sizes, np.int32)

    def run(*arrays):
        # Whatever does not depend on the arrays has its value here, and is not traced.
        with jax.ensure_compile_time_eval():
            return fn(jnp.asarray(starts), jnp.asarray(ends), *arrays)

    return _recorded(pl, "pallas_call", pallas_call, run, args[2:])


def compile_for_core(fn, args, topology="tpu7x"):
    """A function of ShapeDtypeStructs, compiled for one core."""
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(_tpu.devices(topology)[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in args]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn).lower(*args).compile()


def main() -> None:
    with open(sys.argv[1]) as f:
        job = json.load(f)
    call = Call(**job | {"sizes": tuple(job["sizes"])})
    _tpu.set_environment()
    if call.library == "tokamax":
        fn, args = _tokamax(call)
        operands = [call.sizes, [0]]  # the sizes, and the first group
    else:
        fn, args = _function(call)
    with _tiles(call):
        if call.library != "tokamax":
            operands = _scalars(fn, call, args)
        memory = compile_for_core(fn, args, target(call.chip)).memory_analysis()
    temporaries = int(memory.temp_size_in_bytes)
    with open(sys.argv[2], "w") as f:
        json.dump({"operands": operands, "temporaries": temporaries}, f)
    os._exit(0)  # libtpu's teardown has nothing to tell


if __name__ == "__main__":
    main()
