"""Qwix's quantized-training rules as recipes."""

import jax.numpy as jnp
import numpy as np

from fp8moe_prims.qarray import parse_calibration, qdtype_name
from fp8moe_prims.recipe import QuantRecipe, check_block

_NOT_TRANSLATED = {
    "tile_size": "scales per tile of the contraction; QuantRecipe has block_k for activations",
    "act_static_scale": "collected statistics; use a fixed calibration",
    "bwd_stochastic_rounding": "rounding is to nearest even",
    "additional_qt_config": "translate the fields that it overrides",
}


def recipe_of_rule(rule) -> QuantRecipe:
    """The recipe that quantizes what a Qwix rule quantizes.

    Activations get one scale per (row x block_k) where Qwix has one per row, weights one per
    (expert x channel) where Qwix has one per channel of all experts, and the weight gradient
    quantizes the saved activations again per (row block x channel): results agree within the noise
    of the types.

    Args:
      rule: a ``qwix.QtRule``, or any object with its fields; None for nothing quantized.

    Returns:
      A QuantRecipe.

    Raises:
      NotImplementedError: a field asks for something a recipe cannot do; it is named.
      ValueError: a field holds a dtype or a calibration that we do not have; it is named.

    >>> import types, jax.numpy as jnp
    >>> from fp8moe_prims.compat.qwix import recipe_of_rule
    >>> rule = types.SimpleNamespace(weight_qtype="float8_e4m3fn", act_qtype=jnp.float8_e4m3fn)
    >>> recipe_of_rule(rule).weight_dtype, recipe_of_rule(rule).grad_dtype
    ('e4m3', None)
    """
    if rule is None:
        return QuantRecipe(None, None, None)
    get = lambda field, default=None: getattr(rule, field, default)
    for field, why in _NOT_TRANSLATED.items():
        if get(field):
            raise NotImplementedError(f"{field}: {get(field)!r} can't be translated: {why}")
    calibrations = {
        "act_calibration": _calibration("act_calibration_method", get("act_calibration_method")),
        "weight_calibration": _calibration(
            "weight_calibration_method", get("weight_calibration_method")
        ),
        "grad_calibration": _calibration("bwd_calibration_method", get("bwd_calibration_method")),
    }
    dtypes = {
        "act_dtype": _dtype("act_qtype", get("act_qtype")),
        "weight_dtype": _dtype("weight_qtype", get("weight_qtype")),
        "grad_dtype": _dtype("bwd_qtype", get("bwd_qtype"), ("e5m2", "e4m3")),
    }
    if get("disable_channelwise_axes"):
        # A fixed range is one scale for the tensor either way.
        for kind in ("act", "weight", "grad"):
            if dtypes[f"{kind}_dtype"] and calibrations[f"{kind}_calibration"] == "absmax":
                raise NotImplementedError(
                    "disable_channelwise_axes: one absmax scale for a tensor needs a pass over it;"
                    f" give a fixed {kind} calibration"
                )
    more = {}
    if get("bwd_weight_grad_tile_size") is not None:
        check_block("bwd_weight_grad_tile_size", get("bwd_weight_grad_tile_size"))
        more["block_m"] = get("bwd_weight_grad_tile_size")
    return QuantRecipe(**dtypes, **calibrations, **more)


def _dtype(field, value, allowed=("e4m3", "e5m2", "int8")):
    if value is None:
        return None
    names = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
    name = value if isinstance(value, str) else jnp.dtype(value).name
    return qdtype_name(field, names.get(name, name), allowed)


def _calibration(field, value) -> str:
    value = "absmax" if value is None else value
    parse_calibration(field, value)
    return value


def to_qwix(x):
    """Our QArray as Qwix's (which gives its gradient no carrier); needs qwix."""
    import qwix

    return qwix.QArray(x.qvalue, x.scale, zero_point=None, qtype=np.dtype(x.qvalue.dtype))
