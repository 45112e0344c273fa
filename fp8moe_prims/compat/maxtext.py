"""The signature of MaxText 0.2.5's ``kernels/megablox/ops.py: gmm``, over our primitives.

from fp8moe_prims.compat.maxtext import gmm      # instead of: from maxtext.kernels.megablox...
"""

import contextlib
import functools

import jax.numpy as jnp

from fp8moe_prims._primitive import use_lowering, vary_over
from fp8moe_prims.compat.qwix import recipe_of_rule
from fp8moe_prims.gmm import gmm as _gmm
from fp8moe_prims.gmm import quantize_weights
from fp8moe_prims.qarray import QArray
from fp8moe_prims.recipe import QuantRecipe
from fp8moe_prims.ring_all_gather import ring_all_gather


def gmm(
    lhs,
    rhs,
    group_sizes,
    preferred_element_type=jnp.float32,
    tiling=(128,) * 9,
    group_offset=None,
    existing_out=None,
    transpose_rhs=False,
    interpret=None,
    lhs_quantize_dtype=None,
    rhs_quantize_dtype=None,
    use_qwix_quantization=False,
    use_tokamax_backend=False,
    weight_gather_axes=None,
    lhs_vma_axes=(),
    rhs_vma_axes=(),
    qwix_rule=None,
    use_manual_quantization=False,
    use_gmm_v2=False,
    use_gmm_v2_heuristic_tiling=False,
    partial_sum=None,
):
    """Grouped matmul with the quantization of a Qwix rule, inside the kernels.

    The gradients are those of `fp8moe_prims.gmm`: both quantize the cotangent to the rule's
    ``bwd_qtype`` inside the kernel, and that of the weights has the dtype of rhs.

    Args:
      lhs: [m, k], wide, or a QArray.
      rhs: [g, k, n], or [g, n, k] with transpose_rhs; wide, or a QArray.
      group_sizes: integers [G].
      preferred_element_type: dtype of the result.
      tiling: of no effect: the lowering chooses.
      group_offset: index of the first local group, shape () or (1,).
      existing_out, partial_sum: only None.
      transpose_rhs: whether rhs is [g, n, k].
      interpret: True: the TPU kernels in Pallas's interpreter.
      lhs_quantize_dtype, rhs_quantize_dtype: int8 or float8 of the forward pass, where there is no
        rule; the gradients are then not quantized.
      use_qwix_quantization: take qwix_rule, or else the rule that Qwix has for "gmm" here.
      use_tokamax_backend, use_gmm_v2, use_gmm_v2_heuristic_tiling: of no effect.
      weight_gather_axes: [(mesh axis, dimension of rhs)]: rhs is this shard's part; it is quantized
        and then gathered over each axis in turn; its gradient is reduce-scattered.
      lhs_vma_axes, rhs_vma_axes: mesh axes over which the result and the gradient vary; ours follow
        from the operands, and these are added.
      qwix_rule: a ``qwix.QtRule``, see `fp8moe_prims.compat.qwix.recipe_of_rule`.
      use_manual_quantization: only False.

    Returns:
      [m, n]; rows of no group are zero.

    Raises:
      NotImplementedError: an option that we do not have; it is named.
      TypeError, ValueError: as `fp8moe_prims.gmm`.

    >>> import jax.numpy as jnp
    >>> from fp8moe_prims.compat.maxtext import gmm
    >>> gmm(jnp.ones((4, 8)), jnp.ones((2, 8, 2)), jnp.array([1, 2]))[:, 0]
    Array([8., 8., 8., 0.], dtype=float32)
    """
    del tiling, use_tokamax_backend, use_gmm_v2, use_gmm_v2_heuristic_tiling
    if existing_out is not None:
        raise NotImplementedError("existing_out: rows of no group are zero; add it to the result")
    if partial_sum is not None:
        raise NotImplementedError("partial_sum: not summed in the kernel; add it to the result")
    if use_manual_quantization:
        raise NotImplementedError("use_manual_quantization: pass rhs as a QArray instead")
    recipe = _recipe(use_qwix_quantization, qwix_rule, lhs_quantize_dtype, rhs_quantize_dtype)
    if not hasattr(rhs, "qvalue"):
        rhs = functools.reduce(vary_over, rhs_vma_axes, rhs)
    if weight_gather_axes:
        rhs = _gather_weights(rhs, recipe, weight_gather_axes, transpose_rhs)
    lowering = use_lowering("interpret") if interpret else contextlib.nullcontext()
    with lowering:
        out = _gmm(
            lhs,
            rhs,
            group_sizes,
            group_offset=group_offset,
            transpose_rhs=transpose_rhs,
            recipe=recipe,
            preferred_element_type=preferred_element_type,
        )
    return functools.reduce(vary_over, lhs_vma_axes, out)


def _recipe(use_qwix, rule, lhs_dtype, rhs_dtype) -> QuantRecipe:
    if use_qwix:
        if rule is None:
            import qwix.pallas

            rule = qwix.pallas.get_current_rule("gmm")
        if rule is None:
            raise ValueError(
                "qwix_rule: use_qwix_quantization needs a rule, and Qwix has none here"
            )
        return recipe_of_rule(rule)
    names = {"lhs_quantize_dtype": lhs_dtype, "rhs_quantize_dtype": rhs_dtype}
    for name, dtype in names.items():
        if dtype is not None and jnp.dtype(dtype).name == "int4":
            raise NotImplementedError(f"{name}: int4 is not supported; take int8")
    return QuantRecipe(act_dtype=lhs_dtype, weight_dtype=rhs_dtype, grad_dtype=None)


def _gather_weights(rhs, recipe: QuantRecipe, axes, transpose_rhs: bool):
    """rhs, quantized before it travels where the recipe quantizes it."""
    k_axis = 2 if transpose_rhs else 1
    rhs = quantize_weights(rhs, recipe, transpose_rhs)
    for name, axis in axes:
        if isinstance(rhs, QArray) and axis != k_axis and rhs.scale.shape[axis] == 1:
            # Along k the scales of the shards become blocks; along the others gmm takes all or one.
            shape = list(rhs.scale.shape)
            shape[axis] = rhs.qvalue.shape[axis]
            rhs = QArray(rhs.qvalue, jnp.broadcast_to(rhs.scale, shape), rhs.carrier)
        rhs = ring_all_gather(rhs, name, axis=axis, tiled=True)
    return rhs
