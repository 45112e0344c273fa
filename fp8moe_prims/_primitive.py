"""``define``: one call registers a primitive with every rule it has.

Everything of JAX that is not stable API (``jax._src``, ``jax.interpreters``, differences between
versions) is used in this module and nowhere else.

Rules are written over *operands*: a NamedTuple with one field per operand, ``None`` where an
optional operand is absent. A primitive's equation carries the names of the operands that are
present, a frozen dataclass of static parameters, and the lowering chosen where it was bound:

    out = fp8moe_gmm[lowering=auto operands=('lhs', 'rhs', ...) params=GmmParams(...)] a b ...
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config, core, dispatch, effects
from jax._src.callback import _OrderedIOEffect
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import lax as lax_internal
from jax._src.sharding_impls import ShardingContext

# Taken once, when the package is imported: quantization libraries replace jax.lax.dot_general
# while they trace a model, and must not reach into a lowering.
dot_general = lax.dot_general

LOWERINGS = ("auto", "mosaic", "xla", "interpret")
_lowering_choice = jax.make_user_context("auto")


def use_lowering(name: str):
    """Context manager that chooses what the primitives bound inside it are lowered to.

    Args:
      name: "auto": by the platform compiled for (Mosaic kernels on tpu, XLA on cpu, cuda and rocm);
        "mosaic": the TPU kernels (an error for another platform);
        "xla": the XLA lowering everywhere, TPU included;
        "interpret": the TPU kernels in Pallas's TPU interpreter, on the CPU.

    The choice is part of jit's cache key, and derivatives keep the choice of their operation.

    Raises:
      ValueError: name is none of these.

    >>> import fp8moe_prims as fp8
    >>> with fp8.use_lowering("xla"):
    ...     pass
    """
    if name not in LOWERINGS:
        raise ValueError(f"use_lowering: name must be one of {LOWERINGS}, got {name!r}")
    return _lowering_choice(name)


def _current_lowering() -> str:
    choice = _lowering_choice.value
    if choice == "mosaic" and config.pallas_tpu_interpret_mode_context_manager.value:
        return "interpret"  # pltpu.force_tpu_interpret_mode
    return choice


def wait_for_callbacks(ignore_errors: bool) -> None:
    """Waits for the host callbacks that are still running.

    Args:
      ignore_errors: a callback that raised leaves a failed token behind, which would raise again at
        every later wait and at exit: forget it.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        if not ignore_errors:
            raise
        dispatch.runtime_tokens.clear()


# ------------------------------------------------------------------------------------ effects


class _InterpretEffect(effects.Effect):
    """Orders interpreted kernels: the interpreter simulates one device memory for all of them.

    An effect of our own, because the one that its callbacks have is refused inside checkpoint.
    """

    __str__ = lambda self: "fp8moe_interpret"


_interpret_effect = _InterpretEffect()
for _registry in (
    effects.ordered_effects,
    effects.shardable_ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _registry.add_type(_InterpretEffect)


# ---------------------------------------------------------------------------------- the primitive


class OperandPrimitive(core.Primitive):
    """A primitive whose operands are a NamedTuple and whose parameters are one frozen dataclass."""

    operands_type: type
    collective: bool = False

    def call(self, operands: NamedTuple, params: Any):
        """Binds the operands that are not None, brought to one set of varying mesh axes."""
        names = tuple(f for f, v in zip(operands._fields, operands, strict=True) if v is not None)
        present = _vary_alike([getattr(operands, f) for f in names])
        return self.bind(*present, operands=names, params=params, lowering=_current_lowering())

    def _pack(self, names, values):
        """The operands tuple with ``values`` at ``names`` and None elsewhere."""
        absent = dict.fromkeys(self.operands_type._fields)
        return self.operands_type(**absent | dict(zip(names, values, strict=True)))


def _vary_alike(arrays):
    """Casts arrays to one set of varying manual axes, inside shard_map.

    The transpose of the cast sums over the axes, which is what makes the gradient of a replicated
    weight right.
    """
    axes = [jax.typeof(x).mat.varying for x in arrays]
    union = frozenset().union(*axes)

    def cast(x, own):
        missing = tuple(sorted(union - own, key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x, own) for x, own in zip(arrays, axes, strict=True)]


def vary_over(x, axis):
    """Casts x to vary over a mesh axis, where shard_map checks that, as JAX's collectives do."""
    if not config._check_vma.value or axis in jax.typeof(x).mat.varying:
        return x
    return lax.pcast(x, axis, to="varying")


def unsupported(why: str) -> Callable:
    """A rule that cannot exist: raises NotImplementedError, which says why and what to do."""

    def rule(*_, **__):
        raise NotImplementedError(why)

    rule.reason = why
    return rule


registry: dict[str, "OperandPrimitive"] = {}


def define(
    name: str,
    *,
    operands: type,
    abstract_eval: Callable,
    batch: Callable,
    jvp: Callable,
    transpose: Callable,
    lowerings: Mapping[str, str],
    multiple_results: bool = False,
    collective: bool = False,
) -> OperandPrimitive:
    """Registers a primitive with all its rules; each is required, see ``unsupported``.

    Args:
      name: what shows in a jaxpr, "fp8moe_<op>".
      operands: NamedTuple type; a field that may be absent is None.
      abstract_eval: (operands of avals, params) -> aval, made from an operand's with `result_aval`.
      batch: (operands, dims, params) -> (out, out_dim); dims holds None where not batched.
      jvp: (primals, tangents, params) -> (out, tangent or None); tangents holds None for zeros.
      transpose: (cotangent, operands, params) -> operands of cotangents; a linear operand is one
        for which `is_linear` holds, and has an `aval`.
      lowerings: platform -> "<xla|tpu>.<module>:<function>" below fp8moe_prims.lowering, resolved
        when needed.  The function takes (operands, params, platform=...) for xla and (operands,
        params, chip=..., interpret=...) for tpu.
      multiple_results: whether out is a sequence.
      collective: whether it speaks with the other devices along the mesh axis ``params.axis``. Its
        lowerings see the mesh axes, and a tpu one takes (..., mesh=..., forced=...) too: the mesh,
        or None where not all its axes are manual, and whether kernels were asked for by name.
    """
    p = OperandPrimitive(name)
    p.operands_type = operands
    p.multiple_results = multiple_results
    p.collective = collective
    p.rules = dict(batch=batch, jvp=jvp, transpose=transpose)
    p.lowerings = dict(lowerings)
    p.def_impl(functools.partial(dispatch.apply_primitive, p))
    p.def_effectful_abstract_eval(functools.partial(_abstract_eval, p, abstract_eval))
    if collective:
        batching.fancy_primitive_batchers[p] = functools.partial(_batch_collective, p, batch)
    else:
        batching.primitive_batchers[p] = functools.partial(_batch, p, batch)
    ad.primitive_jvps[p] = functools.partial(_jvp, p, jvp)
    ad.primitive_transposes[p] = functools.partial(_transpose, p, transpose)
    dispatch.prim_requires_devices_during_lowering.add(p)  # jit says for which chip, and how many
    for platform in lowerings:
        rule = functools.partial(_lower, p, platform)
        mlir.register_lowering(p, rule, platform=platform)
    registry[name] = p
    return p


def define_carrier(name: str, *, operands: type, result: Callable, ties=(), tangent: Callable):
    """A primitive that makes the carrier of a quantized result (see qarray.py).

    Its value is never read: zeros. Its tangent is that of the dequantized result. It is apart from
    the operation that makes the quantized values, so that a rematerialized program which has saved
    those does not run the operation again for the carrier.

    Args:
      name: "fp8moe_<op>_carrier".
      operands: as in `define`.
      result: (operands of avals, params) -> aval.
      ties: as in `batch_leading`.
      tangent: (primals, tangents, params) -> tangent or None.
    """
    p = OperandPrimitive(name)
    p.operands_type = operands
    p.def_impl(functools.partial(dispatch.apply_primitive, p))
    p.def_effectful_abstract_eval(functools.partial(_abstract_eval, p, result))
    batch = lambda x, dims, params: (p.call(batch_leading(x, dims, ties), params), 0)
    batching.primitive_batchers[p] = functools.partial(_batch, p, batch)
    jvp = lambda x, t, params: (p.call(x, params), tangent(x, t, params))
    ad.primitive_jvps[p] = functools.partial(_jvp, p, jvp)

    def lower(ctx, *args, **params):
        del args, params
        (aval,) = ctx.avals_out
        zero = lambda: jnp.zeros(aval.shape, aval.dtype)
        with config._check_vma(False):
            out = mlir.lower_fun(zero, multiple_results=False)(
                ctx.replace(avals_in=(), tokens_out=None)
            )
        ctx.set_tokens_out(ctx.tokens_in)
        return out

    mlir.register_lowering(p, lower)
    return p


@contextlib.contextmanager
def _keep_lowering(lowering):
    """Binds made by a rule keep the lowering of the equation that the rule is for."""
    with _lowering_choice(lowering):
        yield


def _abstract_eval(p, rule, *avals, operands, params, lowering):
    core.standard_vma_rule(p.name, *avals)
    for name, aval in zip(operands, avals, strict=True):
        if any(axis is not None for axis in aval.sharding.spec):
            raise TypeError(
                f"{p.name}: {name} is sharded as {aval.sharding.spec} over explicit mesh axes; the"
                " operation takes local arrays: call it inside jax.shard_map."
            )
    out = rule(p._pack(operands, avals), params)
    return out, ({_interpret_effect} if lowering == "interpret" else set())


def _batch(p, rule, args, dims, *, operands, params, lowering):
    with _keep_lowering(lowering):
        return rule(p._pack(operands, args), p._pack(operands, dims), params)


def _batch_collective(p, rule, axis, args, dims, *, operands, params, lowering):
    """Batches; over its own axis, vmap(axis_name=...), it is what jax.lax makes of it."""
    if axis.name == params.axis:
        spread = lambda x, d: jnp.broadcast_to(x, (axis.size, *x.shape)) if d is None else x
        args = [spread(x, d) for x, d in zip(args, dims, strict=True)]
        fn = _array_function(p.lowerings["cpu"])
        local = lambda *xs: fn(p._pack(operands, xs), params, platform="cpu")
        in_axes = tuple(0 if d is None else d for d in dims)
        out = jax.vmap(local, in_axes, axis_name=axis.name, axis_size=axis.size)(*args)
        return out, [0] * len(out) if p.multiple_results else 0
    if all(d is None for d in dims):
        out = p.bind(*args, operands=operands, params=params, lowering=lowering)
        return out, [None] * len(out) if p.multiple_results else None
    return _batch(p, rule, args, dims, operands=operands, params=params, lowering=lowering)


def _jvp(p, rule, primals, tangents, *, operands, params, lowering):
    tangents = [
        None if isinstance(t, ad.Zero) or t.dtype == jax.dtypes.float0 else t for t in tangents
    ]
    with _keep_lowering(lowering):
        out, tangent = rule(p._pack(operands, primals), p._pack(operands, tangents), params)
    zero = lambda o, t: ad.Zero(jax.typeof(o).to_tangent_aval()) if t is None else t
    if p.multiple_results:
        return out, [zero(o, t) for o, t in zip(out, tangent, strict=True)]
    return out, zero(out, tangent)


def _transpose(p, rule, ct, *args, operands, params, lowering):
    cts = [None if isinstance(c, ad.Zero) else c for c in (ct if p.multiple_results else [ct])]
    if all(c is None for c in cts):
        return [None] * len(args)
    with _keep_lowering(lowering):
        out = rule(cts if p.multiple_results else cts[0], p._pack(operands, args), params)
    return [getattr(out, f) for f in operands]


def is_linear(operand) -> bool:
    """Whether the transpose is taken with respect to this operand."""
    return ad.is_undefined_primal(operand)


# ---------------------------------------------------------------------------------- lowering


def _lower(p, platform, ctx, *args, operands, params, lowering):
    kind = _device_kind(ctx) if platform == "tpu" else None
    options = {}
    if p.collective:
        options = dict(mesh=_manual_mesh(ctx), forced=lowering != "auto")
    fn = functools.partial(_body, p, platform, lowering, kind, options)
    # The body sees plain local arrays: it makes constants and loops of its own, which carry no
    # mesh axes (those of a collective it may name), and is written for 32-bit integers.
    avals = [a.update(sharding=None, manual_axis_type=core.empty_mat) for a in ctx.avals_in]
    flat = lambda *xs: fn(p._pack(operands, xs), params)
    mesh = _mesh_of(kind, keep_axes=p.collective)
    if (devices := _automatic_mesh(ctx)) and platform == "tpu" and lowering != "xla":
        # XLA can't cut a kernel: each device gathers the operands and runs all of it.
        flat = jax.shard_map(
            flat, mesh=devices, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
        mesh = devices.abstract_mesh
    inner = ctx.replace(avals_in=avals, tokens_out=None)
    if lowering == "interpret":  # our ordering token, under the name that the callbacks ask for
        token = ctx.tokens_in.get(_interpret_effect)
        inner = inner.replace(tokens_in=mlir.TokenSet({_OrderedIOEffect: token}))
    with (
        config._check_vma(False),
        jax.enable_x64(False),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        out = mlir.lower_fun(flat, multiple_results=p.multiple_results)(inner, *args)
    if lowering == "interpret":
        token = inner.tokens_out.get(_OrderedIOEffect)
        ctx.set_tokens_out(mlir.TokenSet({_interpret_effect: token}))
    return out


def _automatic_mesh(ctx) -> jax.sharding.Mesh | None:
    """One axis over the devices of a jit that XLA partitions; None where there is one device, or
    the axes are manual already."""
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None)
    exported = ctx.module_context.lowering_parameters.for_export
    if exported or not isinstance(context, ShardingContext) or not devices or len(devices) == 1:
        return None
    return jax.sharding.Mesh(np.array(devices), ("fp8moe_whole",))


def _array_function(where: str) -> Callable:
    """The function that "<xla|tpu>.<module>:<function>" names."""
    module, _, function = where.partition(":")
    return getattr(importlib.import_module("fp8moe_prims.lowering." + module), function)


def _body(p, platform, lowering, device_kind, options, operands, params):
    """Calls the array function that ``lowering`` names for this platform."""
    use_tpu = platform == "tpu" if lowering == "auto" else lowering in ("mosaic", "interpret")
    if lowering == "mosaic" and platform != "tpu":
        raise ValueError(
            f"{p.name}: use_lowering('mosaic') makes TPU kernels, but the program is compiled for"
            f" {platform}; use 'auto', or 'interpret' to simulate them."
        )
    where = p.lowerings["tpu"] if use_tpu else p.lowerings[platform if platform != "tpu" else "cpu"]
    fn = _array_function(where)
    if where.startswith("xla."):  # some primitives have no kernel and are XLA on TPU too
        with jax.named_scope(p.name):  # in the names of the ops that XLA shows
            return fn(operands, params, platform=platform)
    from fp8moe_prims.lowering.tpu.chip import chip_of

    interpret = False
    if lowering == "interpret":
        from jax.experimental.pallas import tpu as pltpu

        forced = config.pallas_tpu_interpret_mode_context_manager.value
        interpret = forced or pltpu.InterpretParams()
        device_kind = device_kind or "TPU7x"
    return fn(operands, params, chip=chip_of(device_kind), interpret=interpret, **options)


def _device_kind(ctx) -> str | None:
    """The TPU that is compiled for, or None where nothing says (export from a CPU host)."""
    axis_context = ctx.module_context.axis_context
    devices = getattr(axis_context, "device_assignment", None)
    if devices is None and isinstance(
        mesh := getattr(axis_context, "mesh", None), jax.sharding.Mesh
    ):
        devices = mesh.devices.flat
    if ctx.module_context.lowering_parameters.for_export:
        devices = None  # those of this host; the export runs elsewhere
    for device in devices or ():
        if device.platform == "tpu":
            return device.device_kind
    for mesh in (getattr(axis_context, "mesh", None), jax.sharding.get_abstract_mesh()):
        if (device := getattr(mesh, "abstract_device", None)) is not None:
            return device.device_kind
    return None


def _mesh_of(device_kind, keep_axes):
    """An abstract mesh that tells Pallas the chip; it would ask the default device, a CPU.

    It has no axes, or those of the shard_map that is lowered.
    """
    if device_kind is None:
        device_kind = "TPU7x"
    device = jax.sharding.AbstractDevice(device_kind, 1, "tpu")
    if keep_axes:
        return jax.sharding.get_abstract_mesh().update(abstract_device=device)
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


def _manual_mesh(ctx):
    """The mesh of the shard_map that is lowered, or None unless all its axes are manual."""
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None or set(axis_context.manual_axes) != set(mesh.axis_names):
        return None
    return mesh


# ------------------------------------------------------------- float8 values saved by a checkpoint


def _reduce_precision(ctx, operand, *, exponent_bits, mantissa_bits):
    """Lowers reduce_precision of a float8 array to its own precision as what it is: nothing.

    jax.checkpoint puts one on each value that it saves, with the number of exponent bits of the
    dtype. XLA takes the largest exponent for infinity, but float8_e4m3fn has numbers there, so a
    saved value above 240 would come back as NaN.
    """
    (aval,) = ctx.avals_in
    if aval.dtype.itemsize == 1:
        info = jnp.finfo(aval.dtype)
        if (exponent_bits, mantissa_bits) == (info.nexp, info.nmant):
            return [operand]
    return lax_internal._reduce_precision_lower(
        ctx, operand, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits
    )


mlir.register_lowering(lax.reduce_precision_p, _reduce_precision)


# ---------------------------------------------------------------------------- helpers for rules


def result_aval(like, shape, dtype):
    """The type of a result: that of an operand (mesh axes included), with this shape and dtype."""
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    return like.update(
        shape=shape, dtype=dtype, weak_type=False, sharding=like.sharding.update(spec=spec)
    )


def batch_leading(operands, dims, ties=()):
    """The operands of a batched call: one more leading dimension for each, 1 where not batched.

    Args:
      operands, dims: as a batch rule gets them.
      ties: groups of fields whose leading dimensions must be the same (a value and its scale);
        where only some are batched, the others are repeated.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    out = {}
    for field, x, d in zip(operands._fields, operands, dims, strict=True):
        if x is not None:
            out[field] = x[None] if d is None else jnp.moveaxis(x, d, 0)
    for tie in ties:
        present = [f for f in tie if f in out]
        if any(getattr(dims, f) is not None for f in present):
            for f in present:
                out[f] = jnp.broadcast_to(out[f], (size, *out[f].shape[1:]))
    return operands._replace(**out)


def sum_to(x, shape):
    """Sums x, in float32, over the leading dimensions that are 1 in ``shape``."""
    axes = tuple(i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    if not axes:
        return x
    return jnp.sum(x, axis=axes, keepdims=True, dtype=jnp.float32).astype(x.dtype)


# ------------------------------------------------------------------ steps of the MXU (Pallas, TPU)


@functools.cache
def mxu_steps():
    """(multiply(address, rows, mxu, register), pop(address, shape, dtype, mxu)) for TPU kernels.

    jax 0.10 has them in pallas.tpu. jax 0.12 has accumulator references there in place of
    addresses, which ask the host for its TPU and so cannot be made ahead of time; Mosaic's
    operations, which these two make, still take addresses.
    """
    from jax.experimental.pallas import tpu as pltpu

    if "mxu_index" in inspect.signature(pltpu.matmul_acc_lhs).parameters:
        return pltpu.matmul_acc_lhs, pltpu.matmul_pop

    from jax._src.pallas.mosaic import lowering
    from jax._src.pallas.mosaic.primitives import mxu_effect

    multiply_p = core.Primitive("fp8moe_mxu_multiply")
    multiply_p.multiple_results = True
    pop_p = core.Primitive("fp8moe_mxu_pop")

    @multiply_p.def_effectful_abstract_eval
    def _(rows, **params):
        return [], {mxu_effect}

    @pop_p.def_effectful_abstract_eval
    def _(*, shape, dtype, **params):
        return core.ShapedArray(shape, dtype), {mxu_effect}

    @lowering.register_lowering_rule(multiply_p)
    def _(ctx, rows, *, address, mxu, register):
        lowering.tpu.matmul_acc_lhs(address, rows, mxu, load_staged_rhs=register)
        return []

    @lowering.register_lowering_rule(pop_p)
    def _(ctx, *, address, shape, dtype, mxu):
        element = mlir.dtype_to_ir_type(dtype)
        return lowering.tpu.matmul_pop(mlir.ir.VectorType.get(shape, element), address, mxu)

    def multiply(address, rows, mxu, register):
        multiply_p.bind(rows, address=address, mxu=mxu, register=register)

    def pop(address, shape, dtype, mxu):
        return pop_p.bind(address=address, shape=shape, dtype=np.dtype(dtype), mxu=mxu)

    return multiply, pop
