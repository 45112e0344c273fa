"""The backward pass with XLA-level quantization, ``QuantRecipe(backward="dense")``.

What frameworks do around a grouped matmul today, and the reference that the in-kernel backward is
compared with: mask the rows of no group, scale, take an absmax, round, all over the whole buffer,
and hand float8 arrays to the kernels. Nothing here is fast; that is its point.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp8moe_prims.qarray import quantize


def _membership(starts, ends, m: int):
    """bool [*b, m, g]: whether row r belongs to group e."""
    rows = jnp.arange(m, dtype=jnp.int32).reshape((1,) * (starts.ndim - 1) + (m, 1))
    return (rows >= starts[..., None, :]) & (rows < ends[..., None, :])


def _calibration(bound) -> str:
    return "absmax" if bound is None else f"fixed,{bound!r}"


def quantize_cotangent(x, p):
    """GmmOperands whose lhs, a cotangent [*b, m, n], is quantized per row to p.lhs_dtype.

    An rhs scale that varies along the contraction only is multiplied into it before, as the kernel
    does.
    """
    member = _membership(x.starts, x.ends, x.lhs.shape[-2])  # [*b, m, g]
    dout = jnp.where(member.any(-1)[..., None], x.lhs, 0).astype(jnp.float32)
    contraction, output = (-1, -2) if p.transpose_rhs else (-2, -1)
    scale = x.rhs_scale
    if scale is not None and scale.shape[output] == 1:
        if 1 < scale.shape[contraction] == x.rhs.shape[contraction]:
            per_group = jnp.squeeze(scale, output)  # [*b, g | 1, n]
            if per_group.shape[-2] == 1:
                per_row = per_group
            else:
                expert = jnp.argmax(member, axis=-1)[..., None].astype(jnp.int32)  # [*b, m, 1]
                lead = np.broadcast_shapes(expert.shape[:-2], per_group.shape[:-2])
                per_row = jnp.take_along_axis(
                    jnp.broadcast_to(per_group, (*lead, *per_group.shape[-2:])),
                    jnp.broadcast_to(expert, (*lead, *expert.shape[-2:])),
                    axis=-2,
                )
            dout = dout * per_row
            carrier = x.rhs_carrier
            x = x._replace(
                rhs_scale=jnp.ones((*scale.shape[:-3], 1, 1, 1), jnp.float32),
                rhs_carrier=None
                if carrier is None
                else (carrier.astype(jnp.float32) / scale).astype(carrier.dtype),
            )
    q = quantize(
        dout,
        p.lhs_dtype,
        channelwise_axes=range(dout.ndim - 1),
        calibration=_calibration(p.lhs_bound),
    )
    scale = jnp.broadcast_to(q.scale, (*dout.shape[:-2], *q.scale.shape[-2:]))
    return x._replace(lhs=q.qvalue, lhs_scale=scale, lhs_carrier=q.carrier)


def tgmm(x, p):
    """tgmm of TgmmOperands with both sides quantized per channel of the whole buffer."""
    from fp8moe_prims.tgmm_quant import TgmmParams, tgmm_quant_p

    valid = _membership(x.starts, x.ends, x.lhs.shape[-2]).any(-1)[..., None]  # [*b, m, 1]
    lhs = jnp.where(valid, x.lhs, jnp.zeros((), x.lhs.dtype))
    dout = jnp.where(valid, x.dout, 0).astype(jnp.float32)
    lhs_carrier, lhs_scale = x.lhs_carrier, np.float32(1.0)
    if x.lhs_scale is not None:
        row_scale = jnp.where(valid, x.lhs_scale, 0)
        dout = dout * row_scale
        if lhs_carrier is not None:
            wide = lhs_carrier.astype(jnp.float32) / jnp.where(valid, x.lhs_scale, 1)
            lhs_carrier = jnp.where(valid, wide, 0).astype(lhs_carrier.dtype)
    elif p.lhs_dtype is not None:
        lhs, lhs_scale, lhs_carrier = _per_channel(lhs, p.lhs_dtype, None)
    dout, dout_scale, dout_carrier = _per_channel(dout, p.dout_dtype, p.dout_bound)
    unit = jnp.ones((*lhs.shape[:-2], 1, 1), jnp.float32)
    out = tgmm_quant_p.call(
        x._replace(
            lhs=lhs,
            lhs_scale=unit if lhs.dtype.itemsize == 1 else None,
            lhs_carrier=lhs_carrier,
            dout=dout,
            dout_carrier=dout_carrier,
        ),
        TgmmParams(
            out_dtype=np.dtype(np.float32),
            block_m=p.block_m,
            transpose_out=p.transpose_out,
            tail=p.tail,
            expected_rows=p.expected_rows,
        ),
    )  # [*b, g, k, n] or [*b, g, n, k]
    for scale, axis in ((lhs_scale, -2), (dout_scale, -1)):
        if np.ndim(scale):  # [*b, 1, channels]
            scale = jnp.expand_dims(scale, -3)
            out = out * (scale if (axis == -1) != p.transpose_out else jnp.swapaxes(scale, -1, -2))
    return out.astype(p.out_dtype)


def _per_channel(x, dtype, bound):
    """(qvalue, scale [*b, 1, channels], carrier of the qvalue) of x [*b, m, channels]."""
    axes = [a for a in range(x.ndim) if a != x.ndim - 2]
    q = quantize(x, dtype, channelwise_axes=axes, calibration=_calibration(bound))
    return q.qvalue, q.scale, q.carrier / jax.lax.stop_gradient(q.scale).astype(q.carrier.dtype)
