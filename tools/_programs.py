"""The programs that dump_hlo.py looks at: an operation, the layer, or a function of the user's."""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys

from tools import _tpu

BACKWARDS = ("in_kernel", "dense")
AXIS = "x"  # mesh axis of the operations that run over several devices


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
      differentiated: what gradients are taken of, if not fn.
      mesh: of all the devices that it runs over; None: one device.
      out_sharding: of its result, where there is a mesh.
    """

    fn: object
    args: tuple
    wrt: tuple[int, ...]
    rows: int
    differentiated: object = None
    mesh: object = None
    out_sharding: object = None


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


def _quantize(s: Shape, backward: str) -> Program:
    import jax.numpy as jnp

    import fp8moe_prims as fp8

    del backward

    def quantize(x):
        q = fp8.quantize(x, "e4m3", channelwise_axes=(0,))
        return q.qvalue, q.scale

    def dequantized(x):
        return fp8.quantize(x, "e4m3", channelwise_axes=(0,)).dequantize(x.dtype)

    args = (_struct((s.m, s.k), jnp.bfloat16),)
    return Program(quantize, args, (0,), s.m, differentiated=dequantized)


def _ring(name: str, gathers: bool):
    """The maker of a ring's program: m rows of k features over all devices of the target."""

    def make(s: Shape, backward: str, devices) -> Program:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import fp8moe_prims as fp8

        del backward
        if s.m % len(devices):
            raise SystemExit(f"{name}: m = {s.m} is not a multiple of the {len(devices)} devices")
        mesh = jax.sharding.Mesh(np.array(_tpu.ring_order(devices)), (AXIS,))
        split, whole = PartitionSpec(AXIS), PartitionSpec()
        before, after = (split, whole) if gathers else (whole, split)

        def ring(x):
            return getattr(fp8, name)(x, AXIS, tiled=True)

        ring.__name__ = name
        fn = jax.shard_map(ring, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
        place = lambda spec: NamedSharding(mesh, spec)
        args = (jax.ShapeDtypeStruct((s.m, s.k), jnp.bfloat16, sharding=place(before)),)
        return Program(fn, args, (0,), s.m, mesh=mesh, out_sharding=place(after))

    make.over_devices = True
    return make


OPS = {
    "gmm": _gmm,
    "tgmm_quant": _tgmm_quant,
    "ragged_gather": _ragged_gather,
    "ragged_gather_reduce": _ragged_gather_reduce,
    "ragged_glu": _ragged_glu,
    "ring_all_gather": _ring("ring_all_gather", gathers=True),
    "ring_reduce_scatter": _ring("ring_reduce_scatter", gathers=False),
    "quantize": _quantize,
    "moe": _moe,
}

QUANTIZING = ("gmm", "tgmm_quant", "moe")  # those that have a dense side

SHAPES = dict.fromkeys(OPS, Shape(16384, 1024, 512, 8)) | {
    "moe": Shape(16384, 2048, 768, 128),  # the experts of Qwen3-30B-A3B, 2048 tokens
}


def _struct(shape, dtype):
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------------- a user's function


def users_program(spec: str, backward: str | None, devices, rows: int | None) -> Program:
    """The program of "module:function" or "file.py:function", which returns (fn, args).

    The function is called with ``backward="in_kernel"`` or ``"dense"`` if it has a parameter of
    that name, and with the target's devices if it has a parameter ``devices``. Rows that are not
    given are the largest first dimension of an argument.

    Raises:
      SystemExit: there is no such function, it does not return that, or it has no ``backward``.
    """
    import jax
    import jax.numpy as jnp

    make = _users_function(spec)
    parameters = inspect.signature(make).parameters
    if backward == "dense" and "backward" not in parameters:
        raise SystemExit(f"{spec}: has no parameter named backward, so there is no dense side")
    given = {"backward": backward or "in_kernel", "devices": devices}
    made = make(**{name: value for name, value in given.items() if name in parameters})
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise SystemExit(f"{spec}: must return (fn, args), a function and a tuple of arguments")
    fn, args = made
    struct = lambda a: jax.ShapeDtypeStruct(
        jnp.shape(a), jnp.result_type(a), sharding=getattr(a, "sharding", None)
    )
    if "devices" not in parameters:
        struct = lambda a: _struct(jnp.shape(a), jnp.result_type(a))
    args = jax.tree.map(struct, tuple(args))
    leaves = jax.tree.leaves(args)
    floats = lambda a: all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(a))
    wrt = tuple(i for i, a in enumerate(args) if floats(a))
    rows = rows or max((a.shape[0] for a in leaves if a.shape), default=1)
    placed = "devices" in parameters and bool(leaves)
    mesh = getattr(leaves[0].sharding, "mesh", None) if placed else None
    return Program(fn, args, wrt, rows, mesh=mesh)


def _users_function(spec: str):
    module, _, name = spec.rpartition(":")
    try:
        if module.endswith(".py"):
            file = importlib.util.spec_from_file_location("users_module", module)
            loaded = importlib.util.module_from_spec(file)
            sys.modules["users_module"] = loaded
            file.loader.exec_module(loaded)
        else:
            sys.path.insert(0, os.getcwd())
            loaded = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if module != e.name and not module.startswith(f"{e.name}."):  # one that the user's imports
            raise SystemExit(f"{spec}: {e}") from e
        path = f"{module.replace('.', '/')}.py:{name}"
        raise SystemExit(f"{spec}: no module named {module!r}; give a path, {path}") from e
    except (ImportError, OSError) as e:
        raise SystemExit(f"{spec}: {e}") from e
    if not hasattr(loaded, name):
        raise SystemExit(f"{module} has no function {name!r}")
    return getattr(loaded, name)


# ------------------------------------------------------------------------- building, lowering


def build(
    op: str,
    shape: Shape | None = None,
    *,
    grad: bool = False,
    backward: str = "in_kernel",
    target: str = "cpu",
    rows: int | None = None,
) -> Program:
    """The program of an operation, or of its gradients with the cotangent as first argument.

    op is a name in OPS, or what `users_program` takes.
    """
    if op not in OPS:
        program = users_program(op, backward, _devices(target), rows)
    elif getattr(OPS[op], "over_devices", False):
        program = OPS[op](shape or SHAPES[op], backward, _devices(target))
    else:
        program = OPS[op](shape or SHAPES[op], backward)
    return _gradient(op, program) if grad else program


def _gradient(op: str, program: Program) -> Program:
    import jax

    function = program.differentiated or program.fn

    def gradient(cotangent, *args):
        def fn(*operands):
            given = dict(zip(program.wrt, operands, strict=True))
            return function(*(given.get(i, a) for i, a in enumerate(args)))

        return jax.vjp(fn, *(args[i] for i in program.wrt))[1](cotangent)

    gradient.__name__ = gradient.__qualname__ = f"{op.rpartition(':')[2]}_gradient"
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=program.out_sharding)
    cotangent = jax.tree.map(struct, jax.eval_shape(function, *program.args))
    return dataclasses.replace(program, fn=gradient, args=(cotangent, *program.args))


def _devices(target: str):
    import jax

    return jax.devices() if target in ("cpu", "cuda") else _tpu.devices(target)


def lower(program: Program, target: str):
    """``jax.jit(fn).lower(...)`` for the CPU, for CUDA, or for a TPU topology.

    A program that is not over several devices of its own is placed on one of the topology's.
    """
    import jax

    if target == "cuda":
        return jax.jit(program.fn).trace(*program.args).lower(lowering_platforms=("cuda",))
    if target == "cpu":
        return jax.jit(program.fn).lower(*program.args)
    import numpy as np

    mesh = program.mesh or jax.sharding.Mesh(np.array(_devices(target)[:1]), (AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or sharding)
    args = jax.tree.map(placed, program.args)
    if program.mesh is not None:
        return jax.jit(program.fn).lower(*args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(program.fn).lower(*args)


def text_of(compiled) -> str:
    """The optimized HLO of a compiled program."""
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as e:
        if "async-update" not in str(e):
            raise
        raise SystemExit(
            f"jaxlib {jax.__version__} cannot read this program back: libtpu made an operation"
            " asynchronous in a form that it does not know. jax 0.12, which needs Python 3.12,"
            " prints it."
        ) from None
