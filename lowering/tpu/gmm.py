"""Grouped matmul on a TPU core: out[r] = lhs[r] @ rhs[e] for the rows r of group e.

Everything that quantization adds happens in the kernel: the lhs is quantized tile by tile in VMEM,
and every scale is applied to a value that is there anyway. Only tiles with rows of a group are
read and multiplied, so the cost follows the valid rows and not the size of the buffer.

The tiles are chosen in gmm_tiles.py, the kernel is in gmm_kernel.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering import numerics
from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.gmm_kernel import (
    BATCH,
    END,
    LHS,
    RHS,
    SCALE,
    SHIFT,
    START,
    STOP,
    Spec,
    Table,
    kernel,
)
from fp8moe_prims.lowering.tpu.gmm_tiles import MAX_TABLE, Problem, choose, table_length
from fp8moe_prims.lowering.tpu.layout import LANES, flat_map
from fp8moe_prims.lowering.tpu.visits import make_visits, max_visits

_I = np.int32


# ---- operands --------------------------------------------------------------------------------


def _scale_form(shape, k: int, n: int, transpose: bool):
    """How an rhs scale [.., s1, s2] is applied, and the contraction elements of one block.

    "column": constant along the contraction, multiplies the output's columns.
    "fold":   one value per contraction element, multiplies the lhs before it is quantized.
    "blocks": blocks of a multiple of 128 along the contraction, multiplies the partial products.
    "full":   anything else, multiplies the rhs itself.
    """
    deep, wide = (shape[-1], shape[-2]) if transpose else (shape[-2], shape[-1])
    if deep == 1:
        return "column", k
    if deep == k and wide == 1:
        return "fold", 1
    if (k // deep) % LANES == 0:
        return "blocks", k // deep
    return "full", k // deep


def _stretch(x, axis: int, size: int):
    """A block-wise scale with ``size`` values along ``axis``."""
    have = x.shape[axis]
    if have == size:
        return x
    if have == 1:
        shape = list(x.shape)
        shape[axis] = size
        return jnp.broadcast_to(x, shape)
    return jnp.repeat(x, size // have, axis=axis, total_repeat_length=size)


def _shaped_scale(scale, form: str, k: int, n: int, transpose: bool):
    """The rhs scale as the kernel reads it: [S, 1, n], [S, 1, k], [S, blocks, n] or rhs's shape."""
    scale = scale.astype(jnp.float32)
    scale = scale.reshape((-1,) + scale.shape[-2:])
    if form == "full":
        first, second = (n, k) if transpose else (k, n)
        return _stretch(_stretch(scale, -2, first), -1, second)
    if form == "fold":
        return scale.reshape(scale.shape[0], 1, k)
    if transpose:
        scale = jnp.swapaxes(scale, -1, -2)
    return _stretch(scale, -1, n)


def _leads(x):
    """(leading dims of each operand by name, their broadcast)."""
    leads = {"lhs": x.lhs.shape[:-2], "rhs": x.rhs.shape[:-3], "rows": x.starts.shape[:-1]}
    leads["ends"] = x.ends.shape[:-1]
    if x.lhs_scale is not None:
        leads["lhs_scale"] = x.lhs_scale.shape[:-2]
    if x.rhs_scale is not None:
        leads["rhs_scale"] = x.rhs_scale.shape[:-3]
    return leads, np.broadcast_shapes(*leads.values())


# ---- the call --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Operands:
    lhs: jax.Array
    lhs_scale: jax.Array | None
    rhs: jax.Array
    rhs_scale: jax.Array | None
    starts: jax.Array
    ends: jax.Array


def _halves(x, full):
    """x cut in two along its first batch dim of more than one element: (axis, [operands] * 2)."""
    axis = next(i for i, d in enumerate(full) if d > 1)
    half = full[axis] // 2

    def cut(a, lo, hi):
        if a is None or a.shape[axis] == 1:
            return a
        return jax.lax.slice_in_dim(a, lo, hi, axis=axis)

    values = [getattr(x, f.name) for f in dataclasses.fields(_Operands)]
    ranges = (0, half), (half, full[axis])
    return axis, [_Operands(*(cut(a, lo, hi) for a in values)) for lo, hi in ranges]


def _problem(x, p, batches: int) -> Problem:
    """What the tiles depend on."""
    m, k = x.lhs.shape[-2:]
    n = x.rhs.shape[-2] if p.transpose_rhs else x.rhs.shape[-1]
    form, scale_block = None, 0
    if x.rhs_scale is not None:
        form, scale_block = _scale_form(x.rhs_scale.shape, k, n, p.transpose_rhs)
    qdtype = None if p.lhs_dtype is None else numerics.QDTYPES[p.lhs_dtype]
    per_block = qdtype is not None and p.lhs_bound is None
    return Problem(
        m=m,
        k=k,
        n=n,
        g=x.rhs.shape[-3],
        lhs_dtype=np.dtype(x.lhs.dtype),
        rhs_dtype=np.dtype(x.rhs.dtype),
        out_dtype=np.dtype(p.out_dtype),
        qdtype=qdtype,
        block_k=p.block_k if per_block else None,
        scale_form=form,
        scale_block=scale_block if form == "blocks" else 0,
        transpose_rhs=p.transpose_rhs,
        batches=batches,
        rows=None if p.expected_rows is None else -(-p.expected_rows // batches),
    )


@dataclasses.dataclass(frozen=True)
class _Maps:
    """Which element of an operand a batch index (or a group of it) reads, int32 NumPy arrays."""

    lhs: np.ndarray  # [B]
    lhs_scale: np.ndarray | None  # [B]
    rhs: np.ndarray  # [B, g]
    rhs_scale: np.ndarray  # [B, g]


def _maps(x, leads, full) -> _Maps:
    g = x.rhs.shape[-3]
    group = np.arange(g, dtype=np.int32)[None, :]
    of = {name: flat_map(lead, full) for name, lead in leads.items()}
    rhs_scale = np.zeros((math.prod(full), g), np.int32)
    if x.rhs_scale is not None:
        per = x.rhs_scale.shape[-3]
        rhs_scale = of["rhs_scale"][:, None] * _I(per) + group * _I(per > 1)
    rhs = of["rhs"][:, None] * _I(g) + group
    return _Maps(of["lhs"], of.get("lhs_scale"), rhs, rhs_scale)


def _table(spec: Spec, starts, ends, maps: _Maps):
    """(the int32 table that `Table` reads, the number of visits)."""
    q = spec.q
    visits = make_visits(starts, ends, m=q.m, tm=spec.t.tm, gaps=spec.tail == "zero")

    def column(values, first):
        """One entry per group, after that of group 0, which stands for none."""
        values = jnp.broadcast_to(values, (q.batches, q.g)).reshape(-1).astype(jnp.int32)
        return jnp.concatenate([jnp.full((1,), first, jnp.int32), values])

    batch = np.arange(q.batches, dtype=np.int32)[:, None]
    columns = {
        BATCH: column(batch, 0),
        START: column(starts, 0),
        END: column(ends, 0),
        LHS: column(maps.lhs[:, None], 0),
        RHS: column(maps.rhs, -1),  # no group: its weights are of none
        SCALE: column(maps.rhs_scale, 0),
        SHIFT: visits.shift,
        STOP: visits.stop,
    }
    return jnp.concatenate([visits.group, *(columns[f] for f in sorted(columns))]), visits.count


def _blocks(spec: Spec, x, maps: _Maps):
    """name -> (operand, its pipelined BlockSpec)."""
    q, t = spec.q, spec.t
    out = {}

    def add(name, array, block, index):
        """``index(table, n tile, visit, group, k tile)``."""

        def index_map(j, v, kt, ref, *_):
            tab = Table(spec, ref)
            group = tab.group(v)
            return index(tab, j, v, group, tab.k_tile(kt, v, group))

        out[name] = array, pl.BlockSpec(block, index_map)

    def of(tab, field, group):
        return jnp.maximum(tab.get(field, group), _I(0))

    add(
        "lhs",
        x.lhs.reshape(-1, q.m, q.k),
        (None, t.tm, t.tk),
        lambda tab, j, v, e, kt: (of(tab, LHS, e), tab.lhs_tile(v, e), kt),
    )
    rhs_block = (None, *spec.rhs_tile)
    if q.transpose_rhs:
        rhs_index = lambda i, j, kt: (i, j, kt)
    else:
        rhs_index = lambda i, j, kt: (i, kt, j)
    add(
        "rhs",
        x.rhs.reshape((-1,) + x.rhs.shape[-2:]),
        rhs_block,
        lambda tab, j, v, e, kt: rhs_index(of(tab, RHS, e), j, kt),
    )
    if q.scale_form is not None:
        scale = _shaped_scale(x.rhs_scale, q.scale_form, q.k, q.n, q.transpose_rhs)
        if q.scale_form == "full":
            block, index = rhs_block, rhs_index
        elif q.scale_form == "fold":
            block, index = (None, 1, t.tk), lambda i, j, kt: (i, _I(0), kt)
        else:
            block, index = (None, scale.shape[1], t.tn), lambda i, j, kt: (i, _I(0), j)
        add("rhs_scale", scale, block, lambda tab, j, v, e, kt: index(of(tab, SCALE, e), j, kt))
    if spec.row_scale:
        # [tiles, 1, tm] takes 4 bytes a row; [m, 1] would be padded to a line of 128 values.
        scale = x.lhs_scale.astype(jnp.float32).reshape(-1, q.m)
        scale = jnp.pad(scale, ((0, 0), (0, spec.tiles * t.tm - q.m)))
        direct = np.array_equal(maps.lhs_scale, maps.lhs)
        if not direct:  # batched otherwise than lhs: one scale per batch index
            scale = jnp.take(scale, maps.lhs_scale, axis=0)
        field = LHS if direct else BATCH
        add(
            "row_scale",
            scale.reshape(-1, spec.tiles, 1, t.tm),
            (None, None, 1, t.tm),
            lambda tab, j, v, e, kt: (of(tab, field, e), tab.lhs_tile(v, e), _I(0), _I(0)),
        )
    return out


def _scratch(spec: Spec):
    """name -> VMEM buffer, see gmm_kernel.py."""
    q, t = spec.q, spec.t
    out = {"kept": pltpu.VMEM((t.sub, t.tn), q.out_dtype)}
    if spec.makes_lhs:
        out["ready"] = pltpu.VMEM((t.sub, t.tk), spec.dtypes[0])
    if spec.block_k is not None:
        blocks = -(-t.tk // spec.block_k)
        out["steps"] = pltpu.VMEM((blocks, t.sub, LANES), jnp.float32)
    if spec.makes_rhs:
        out["weights"] = pltpu.VMEM(spec.rhs_tile, spec.dtypes[1])
    if spec.row_scale:
        out["row_column"] = pltpu.VMEM((t.tm, 1), jnp.float32)
    if spec.acc_columns:
        out["acc"] = pltpu.VMEM((t.sub, spec.acc_columns), jnp.float32)
    return out


def _cost_estimate(x, p, q: Problem):
    expected = q.batches * q.m if p.expected_rows is None else p.expected_rows
    used = min(q.batches * q.g, math.prod(x.rhs.shape[:-2]), max(expected, 1))
    moved = expected * (q.k * x.lhs.dtype.itemsize + q.n * q.out_dtype.itemsize)
    moved += used * q.k * q.n * x.rhs.dtype.itemsize
    return pl.CostEstimate(flops=2 * expected * q.k * q.n, transcendentals=0, bytes_accessed=moved)


def gmm(x, p, *, chip: Chip, interpret=False) -> jax.Array:
    """out[b, r] = lhs[b, r] @ rhs[b, e] for the rows r in [starts[b, e], ends[b, e]).

    Args:
      x: GmmOperands: lhs [*B, m, k], lhs_scale None | f32 [*B, m | 1, 1], rhs [*B, g, k, n] or
        [*B, g, n, k], rhs_scale None | f32 [*B, 1 | g, s1, s2], starts and ends int32 [*B, g].
        Leading dims broadcast.
      p: GmmParams.
      chip: the target.
      interpret: False, or pltpu.InterpretParams().

    Returns:
      p.out_dtype [*B, m, n].
    """
    # Not every chip has float16 arithmetic or conversions; float32 holds its values exactly.
    wide = lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a
    x = _Operands(wide(x.lhs), x.lhs_scale, wide(x.rhs), x.rhs_scale, x.starts, x.ends)
    leads, full = _leads(x)
    batches = math.prod(full)
    q = _problem(x, p, batches)
    if q.m == 0 or batches == 0 or q.g == 0:
        return jnp.zeros(full + (q.m, q.n), q.out_dtype)
    if batches > 1 and table_length(q, 256) > MAX_TABLE // 2:
        # The tables of so many batches do not fit SMEM together.
        axis, halves = _halves(x, full)
        parts = [gmm(h, p, chip=chip, interpret=interpret) for h in halves]
        return jnp.concatenate(parts, axis=axis)

    t = choose(q, chip)
    flat = x.lhs_scale is not None and math.prod(x.lhs_scale.shape[-2:]) == 1
    spec = Spec(
        q=q,
        t=t,
        chip=chip,
        tail=p.tail,
        bound=p.lhs_bound,
        row_scale=x.lhs_scale is not None and not flat,
        flat_scale=flat,
        visits=max_visits(batches, q.m, q.g, t.tm),
    )
    maps = _maps(x, leads, full)
    starts, ends = (jnp.broadcast_to(a, full + (q.g,)).reshape(-1, q.g) for a in (x.starts, x.ends))
    table, visits = _table(spec, starts, ends, maps)
    scalars = {"table": table}
    if flat:
        flat_scale = x.lhs_scale.astype(jnp.float32).reshape(-1)
        scalars["flat_scale"] = jnp.take(flat_scale, maps.lhs_scale, axis=0)
    blocks, scratch = _blocks(spec, x, maps), _scratch(spec)

    def out_index(j, v, kt, ref, *_):
        tab = Table(spec, ref)
        return (*tab.split(tab.unit(v, tab.group(v))), j)

    call = pl.pallas_call(
        functools.partial(kernel, spec, [*scalars, *blocks, "out", *scratch]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(-(-q.n // t.tn), visits, spec.k_tiles),
            in_specs=[block for _, block in blocks.values()],
            out_specs=pl.BlockSpec((None, t.tm, t.tn), out_index),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct((batches, q.m, q.n), q.out_dtype),
        compiler_params=pltpu.CompilerParams(
            # The cores of a device share the tiles of columns.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes,
        ),
        cost_estimate=_cost_estimate(x, p, q),
        interpret=interpret,
        name="fp8moe_gmm",
    )
    operands = [array for array, _ in blocks.values()]
    return call(*scalars.values(), *operands).reshape(full + (q.m, q.n))
