"""The signatures of tokamax 0.0.17's ``ragged_dot`` and ``ragged_dot_general``.

    from fp8moe_prims.compat import tokamax          # instead of: import tokamax
    out = tokamax.ragged_dot(lhs, rhs, group_sizes)

Arrays are multiplied as they are; a QArray (ours or Qwix's) keeps its scales, which go into the
kernel. Rows of no group are zero. To quantize inside the kernel call `fp8moe_prims.gmm`.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8moe_prims._primitive import vary_over
from fp8moe_prims.gmm import gmm
from fp8moe_prims.ragged_glu import ragged_glu
from fp8moe_prims.tgmm_quant import tgmm_quant

_GATED = {"silu": "silu", "gelu_tanh": "gelu"}  # tokamax's names, and ours
_IMPLEMENTATIONS = ("mosaic", "mosaic_tpu", "mosaic_tpu_v2", "mosaic_gpu", "triton", "xla")

# (contraction, ragged dimension, group dimension) of the forms that we have.
_GMM = (((1,), (1,)), (0,), (0,))
_GMM_TRANSPOSED = (((1,), (2,)), (0,), (0,))
_TGMM = (((0,), (0,)), (0,), ())


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    activation: Callable | None = None,
    manual_axis_type=None,
    *,
    implementation=None,
    bypass_device_check: bool | None = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
):
    """``out[r] = lhs[r] @ rhs[e]`` for the rows r of group e: `fp8moe_prims.gmm`.

    Args:
      lhs: [m, k], wide, or a QArray with a scale [m, 1] or [1, 1].
      rhs: [g, k, n], wide, or a QArray with a scale [1|g, 1, 1|n] or blocked along k.
      group_sizes: integers [G], a sequence of integers, or a tokamax ``GroupSizes``.
      precision: a ``jax.lax.Precision``, its name, or a pair of them; always met, since float32
        operands are multiplied in float32 and every sum is in float32.
      preferred_element_type: dtype of the result; None: as `fp8moe_prims.gmm`.
      group_offset: index of the first local group, shape () or (1,).
      activation: applied to the float32 result, over all m rows.
      manual_axis_type: mesh axes over which the result is to vary; it varies over those of the
        operands in any case.
      implementation: one of tokamax's names, or several; of no effect, as the platform compiled
        for decides (see `fp8moe_prims.use_lowering`).
      bypass_device_check: of no effect: no device is looked at.
      zero_initialize: of no effect: rows of no group are zero.
      fuse_gateup_activation: "silu" or "gelu_tanh": ``activation(out[:, :n // 2]) * out[:, n //
        2:]``, for the rows of groups.

    Returns:
      [m, n], or [m, n // 2] with fuse_gateup_activation.

    Raises:
      NotImplementedError: an option that we do not have; it is named.
      TypeError, ValueError: as `fp8moe_prims.gmm`.

    >>> import jax.numpy as jnp
    >>> from fp8moe_prims.compat import tokamax
    >>> tokamax.ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 8, 2)), jnp.array([1, 2]))[:, 0]
    Array([8., 8., 8., 0.], dtype=float32)
    """
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(_GMM[0], ((), ())),
        lhs_ragged_dimensions=_GMM[1],
        rhs_group_dimensions=_GMM[2],
    )
    return ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        dimensions,
        precision,
        preferred_element_type,
        group_offset,
        activation,
        manual_axis_type,
        implementation=implementation,
        bypass_device_check=bypass_device_check,
        zero_initialize=zero_initialize,
        fuse_gateup_activation=fuse_gateup_activation,
    )


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    activation: Callable | None = None,
    manual_axis_type=None,
    *,
    implementation=None,
    bypass_device_check: bool | None = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
):
    """`ragged_dot` with dimension numbers: the three forms of a grouped matmul and its gradients.

    The contraction may be ``([1], [1])``, rhs [g, k, n]; ``([1], [2])``, rhs [g, n, k]; or
    ``([0], [0])`` with no group dimension in rhs [m, n]: the weight gradient [g, k, n]. The other
    arguments, the result and the errors are those of `ragged_dot`.
    """
    del bypass_device_check, zero_initialize
    _check_precision(precision)
    _check_implementation(implementation)
    form = _form(ragged_dot_dimension_numbers)
    sizes = getattr(group_sizes, "value", group_sizes)
    sizes = sizes if hasattr(sizes, "dtype") else np.asarray(sizes)
    if form == _TGMM:
        for name, value in (
            ("activation", activation),
            ("fuse_gateup_activation", fuse_gateup_activation),
        ):
            if value is not None:
                raise NotImplementedError(f"{name}: not in the weight gradient's form")
        out = tgmm_quant(
            lhs,
            rhs,
            sizes,
            group_offset=group_offset,
            lhs_dtype=None,
            dout_dtype=None,
            preferred_element_type=preferred_element_type,
        )
        return _vary(out, manual_axis_type)
    wide = activation is not None
    out = gmm(
        lhs,
        rhs,
        sizes,
        group_offset=group_offset,
        transpose_rhs=form == _GMM_TRANSPOSED,
        preferred_element_type=jnp.float32 if wide else preferred_element_type,
    )
    if fuse_gateup_activation is not None:
        if fuse_gateup_activation not in _GATED:
            raise NotImplementedError(
                f"fuse_gateup_activation: takes one of {tuple(_GATED)}, got"
                f" {fuse_gateup_activation!r}"
            )
        out = ragged_glu(out, activation=_GATED[fuse_gateup_activation])
    if wide:
        dtype = preferred_element_type
        if dtype is None:
            plain = [a.dtype for a in (lhs, rhs) if not hasattr(a, "qvalue")]
            dtype = jnp.result_type(*plain) if plain else jnp.bfloat16
        out = activation(out).astype(dtype)
    return _vary(out, manual_axis_type)


def _form(numbers):
    """(contraction, ragged dimension, group dimension), one of the three that we have."""
    (contract, batch) = numbers.dot_dimension_numbers
    as_tuples = lambda pair: tuple(tuple(int(i) for i in x) for x in pair)
    form = (
        as_tuples(contract),
        *as_tuples((numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)),
    )
    if any(batch) or form not in (_GMM, _GMM_TRANSPOSED, _TGMM):
        raise NotImplementedError(
            "ragged_dot_dimension_numbers: takes a contraction of ([1], [1]) or ([1], [2]) with"
            " group dimension [0], or ([0], [0]) with none, ragged dimension [0] and no batch"
            f" dimension; got {numbers}"
        )
    return form


def _check_precision(precision) -> None:
    for one in precision if isinstance(precision, (tuple, list)) else (precision,):
        if one is None or isinstance(one, lax.Precision):
            continue
        if not isinstance(one, str) or one.lower() not in (
            *(p.name.lower() for p in lax.Precision),
            *("bfloat16", "tensorfloat32", "float32", "fastest"),
        ):
            raise NotImplementedError(f"precision: takes a jax.lax.Precision, got {precision!r}")


def _check_implementation(implementation) -> None:
    several = implementation if isinstance(implementation, (tuple, list)) else (implementation,)
    for one in several:
        if one is not None and one not in _IMPLEMENTATIONS:
            raise NotImplementedError(
                f"implementation: takes None or names among {_IMPLEMENTATIONS}, got {one!r}"
            )


def _vary(x, manual_axis_type):
    """x, varying over the mesh axes that are asked for, too."""
    if manual_axis_type is None:
        return x
    if getattr(manual_axis_type, "unreduced", None):
        raise NotImplementedError(
            "manual_axis_type: unreduced results are not supported; psum them"
        )
    return functools.reduce(vary_over, sorted(manual_axis_type.varying), x)
