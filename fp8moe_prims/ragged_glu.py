"""The gated activation over the valid rows, ``fp8moe_ragged_glu``.

    out[i] = activation(h[i, :f]) * h[i, f:]        for start <= i < end, else the tail

    h  [m, 2f]          out  [m, f], or float8 [m, f] and a float32 scale [m, 1]

Its derivatives are row functions of the same kind: the tangent ``D(glu)(h) dh``, its transpose
``D(glu)(h)^T dout``, and so on. So the primitive takes a row function, built from ``Glu`` by `Jvp`
and `Transpose`, and every derivative runs over the valid rows in one pass, computed in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8moe_prims._primitive import (
    batch_leading,
    define,
    define_carrier,
    is_linear,
    result_aval,
    sum_to,
)
from fp8moe_prims.gmm import check_rows, check_tail
from fp8moe_prims.lowering import numerics
from fp8moe_prims.qarray import QArray, operand, qdtype_name
from fp8moe_prims.rows import row_range

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


# A row function maps float32 tiles [rows, in_widths[i]] to a tile [rows, out_width]. ``linear``
# holds the arguments in which it is linear. The dataclasses are static parameters of an equation.


@dataclasses.dataclass(frozen=True)
class Glu:
    """activation(h[:, :f]) * h[:, f:]."""

    activation: str
    f: int

    in_widths = property(lambda self: (2 * self.f,))
    out_width = property(lambda self: self.f)
    linear = frozenset()

    def __call__(self, h):
        return ACTIVATIONS[self.activation](h[:, : self.f]) * h[:, self.f :]


@dataclasses.dataclass(frozen=True)
class Jvp:
    """The derivative of ``fn`` in argument ``wrt``, in the direction of one more, last argument."""

    fn: Any
    wrt: int

    in_widths = property(lambda self: (*self.fn.in_widths, self.fn.in_widths[self.wrt]))
    out_width = property(lambda self: self.fn.out_width)

    @property
    def linear(self):
        return (self.fn.linear - {self.wrt}) | {len(self.fn.in_widths)}

    def __call__(self, *xs):
        *xs, dx = xs
        along = lambda x: self.fn(*xs[: self.wrt], x, *xs[self.wrt + 1 :])
        return jax.jvp(along, (xs[self.wrt],), (dx,))[1]


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The transpose of ``fn`` in argument ``wrt``; the cotangent takes its place."""

    fn: Any
    wrt: int

    @property
    def in_widths(self):
        w = self.fn.in_widths
        return (*w[: self.wrt], self.fn.out_width, *w[self.wrt + 1 :])

    out_width = property(lambda self: self.fn.in_widths[self.wrt])
    linear = property(lambda self: self.fn.linear)

    def __call__(self, *xs):
        along = lambda x: self.fn(*xs[: self.wrt], x, *xs[self.wrt + 1 :])
        ct = xs[self.wrt]
        shape = jax.ShapeDtypeStruct((ct.shape[0], self.out_width), ct.dtype)
        return jax.linear_transpose(along, shape)(ct)[0]


class RaggedGluOperands(NamedTuple):
    start: Any  # int32 [*b]
    end: Any  # int32 [*b]
    x0: Any  # [*b, m, fn.in_widths[0]], and so on
    x1: Any = None
    x2: Any = None
    x3: Any = None
    x4: Any = None


@dataclasses.dataclass(frozen=True)
class RaggedGluParams:
    """Static parameters: the row function, and what becomes of its rows.

    Attributes:
      fn: `Glu`, `Jvp` or `Transpose`.
      out_dtype: dtype of the result; of the carrier where qdtype is not None.
      qdtype: what the result is quantized to, with one scale per row, or None.
      tail: "zero" or "undefined".
      expected_rows: rows that the cost estimate counts, None for all.
    """

    fn: Any
    out_dtype: np.dtype
    qdtype: str | None = None
    tail: str = "zero"
    expected_rows: int | None = None


def ragged_glu(
    h, *, start=0, end=None, activation="silu", qdtype=None, expected_rows=None, tail="zero"
):
    """Applies a gated activation to the valid rows, quantized per row on the way out if asked.

    ``activation(h[:, :f]) * h[:, f:]`` for the rows [start, end), computed in float32.

    Args:
      h: [m, 2f], bfloat16, float16 or float32, the gate's columns first.
      start, end: integer scalars, clamped to [0, m]; end None: m.
      activation: "silu", "gelu" (the tanh form) or "relu".
      qdtype: "e4m3", "e5m2", "int8", or None for not quantized.
      expected_rows: rows expected to be valid, for the cost estimate; None: m.
      tail: "zero" or "undefined", what the rows outside [start, end) hold, and their gradient.

    Returns:
      [m, f] of h's dtype, or a QArray with a scale [m, 1].

    Raises:
      TypeError, ValueError: an argument has the wrong rank, shape, dtype or value; it is named.

    >>> import jax.numpy as jnp
    >>> import fp8moe_prims as fp8
    >>> fp8.ragged_glu(jnp.ones((2, 4)), activation="relu", end=1)
    Array([[1., 1.],
           [0., 0.]], dtype=float32)
    """
    check_tail(tail)
    values, scale, _ = operand("h", h, ("m", "2f"))
    if scale is not None:
        raise TypeError("h: takes a plain array [m, 2f], got a QArray; dequantize it first")
    m, width = values.shape
    if width % 2 or width == 0:
        raise ValueError(f"h: takes [m, 2f] with an even number of columns, got {values.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
    params = RaggedGluParams(
        fn=Glu(activation, width // 2),
        out_dtype=np.dtype(values.dtype),
        qdtype=None if qdtype is None else qdtype_name("qdtype", qdtype),
        tail=tail,
        expected_rows=check_rows("expected_rows", expected_rows),
    )
    operands = RaggedGluOperands(*row_range("ragged_glu", start, end, m), values)
    out = ragged_glu_p.call(operands, params)
    if params.qdtype is None:
        return out[0]
    return QArray(*out, ragged_glu_carrier_p.call(operands, params))


# ------------------------------------------------------------------------------------- rules


def arguments(x: RaggedGluOperands):
    """The row function's arguments."""
    return [v for v in x[2:] if v is not None]


def _carrier_result(x: RaggedGluOperands, p: RaggedGluParams):
    xs = arguments(x)
    batch = np.broadcast_shapes(x.start.shape, *(v.shape[:-2] for v in xs))
    return result_aval(xs[0], (*batch, xs[0].shape[-2], p.fn.out_width), p.out_dtype)


def _ragged_glu_abstract_eval(x: RaggedGluOperands, p: RaggedGluParams):
    wide = _carrier_result(x, p)
    if p.qdtype is None:
        return [wide]
    scale = result_aval(wide, (*wide.shape[:-1], 1), np.float32)
    return [wide.update(dtype=numerics.QDTYPES[p.qdtype]), scale]


def _ragged_glu_batch_rule(x, dims, p):
    out = ragged_glu_p.call(batch_leading(x, dims, (("start", "end"),)), p)
    return out, [0] * len(out)


def _ragged_glu_jvp_rule(x: RaggedGluOperands, t: RaggedGluOperands, p: RaggedGluParams):
    """dout = sum_i D_i fn(xs) dx_i; a quantized result's tangent is that of its carrier."""
    out = ragged_glu_p.call(x, p)
    return out, [None, None] if p.qdtype is not None else [_tangent(x, t, p)]


def _tangent(x: RaggedGluOperands, t: RaggedGluOperands, p: RaggedGluParams):
    xs, terms = arguments(x), []
    for i in range(len(xs)):
        dx = t[2 + i]
        if dx is None:
            continue
        if i in p.fn.linear:
            fn, args = p.fn, [*xs[:i], dx, *xs[i + 1 :]]
        else:
            fn, args = Jvp(p.fn, i), [*xs, dx]
        if len(args) > len(x) - 2:
            raise NotImplementedError(
                f"fp8moe_ragged_glu: derivatives above order {len(x) - 3}; write the activation"
                " with jnp operations for those."
            )
        operands = RaggedGluOperands(x.start, x.end, *args)
        terms += ragged_glu_p.call(operands, dataclasses.replace(p, fn=fn, qdtype=None))
    shape = _carrier_result(jax.tree.map(jax.typeof, x), p).shape
    terms = [jnp.broadcast_to(term, shape) for term in terms]
    return sum(terms[1:], terms[0]) if terms else None


def _ragged_glu_transpose_rule(cts, x: RaggedGluOperands, p: RaggedGluParams):
    """dx_i = (fn's transpose in argument i)(xs with dout in its place)."""
    xs = arguments(x)
    (i,) = [i for i, v in enumerate(xs) if is_linear(v)]
    aval = xs[i].aval
    operands = RaggedGluOperands(x.start, x.end, *xs[:i], cts[0], *xs[i + 1 :])
    params = dataclasses.replace(p, fn=Transpose(p.fn, i), out_dtype=np.dtype(aval.dtype))
    (dx,) = ragged_glu_p.call(operands, params)
    none = RaggedGluOperands(*(None,) * len(x))
    return none._replace(**{f"x{i}": sum_to(dx, aval.shape)})


ragged_glu_p = define(
    "fp8moe_ragged_glu",
    operands=RaggedGluOperands,
    abstract_eval=_ragged_glu_abstract_eval,
    batch=_ragged_glu_batch_rule,
    jvp=_ragged_glu_jvp_rule,
    transpose=_ragged_glu_transpose_rule,
    lowerings={
        "cpu": "xla.ragged_glu:ragged_glu",
        "cuda": "xla.ragged_glu:ragged_glu",
        "rocm": "xla.ragged_glu:ragged_glu",
        "tpu": "tpu.ragged_glu:ragged_glu",
    },
    multiple_results=True,
)

ragged_glu_carrier_p = define_carrier(
    "fp8moe_ragged_glu_carrier",
    operands=RaggedGluOperands,
    result=_carrier_result,
    ties=(("start", "end"),),
    tangent=_tangent,
)
