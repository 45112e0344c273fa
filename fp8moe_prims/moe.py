"""A mixture-of-experts layer over the primitives, on one device or expert-parallel in shard_map.

The path of a token, ring of experts: tokens are quantized per row and all-gathered over the expert
axis, sorted by expert into the ragged buffer (gather), multiplied by the gate and up projections
(one gmm over both), activated and quantized per row, multiplied by the down projection, and each
token's rows are weighted and summed (gather_reduce); partial results are reduce-scattered back.

    x -> quantize -> all_gather -> gather -> gmm -> glu -> gmm -> gather_reduce -> psum_scatter

Backward, the weight gradients read what the forward pass left in fp8: the sorted tokens and the
activation, each with its row scale. Of the activation h = [gate, up] is saved in the dtype of x, 4f
bytes a row in bfloat16: its derivative needs both halves, and recomputing them would cost the gate
and up projections again, or lose them to a second rounding in fp8 (2f bytes saved).

Every operation on the buffer passes tail="undefined" and the range of valid rows, so nothing fills,
maps or reads the rows beyond.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8moe_prims.collectives import all_gather, reduce_scatter
from fp8moe_prims.gmm import gmm, quantize_weights
from fp8moe_prims.qarray import WIDE_DTYPES, QArray, operand, quantize
from fp8moe_prims.ragged_gather import ragged_gather
from fp8moe_prims.ragged_gather_reduce import ragged_gather_reduce
from fp8moe_prims.ragged_glu import ACTIVATIONS, ragged_glu
from fp8moe_prims.recipe import UNQUANTIZED, QuantRecipe

SAVED_NAMES = ("fp8moe_sorted_inputs", "fp8moe_routing")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """How the layer routes, moves and quantizes tokens.

    Attributes:
      num_experts: E, over all shards.
      top_k: experts per token.
      ep_axis: mesh axis over which experts are sharded, inside shard_map; None: one device.
      recipe: what is quantized; a recipe whose dtypes are None for nothing.
      ragged_buffer_factor: rows of the buffer, as a multiple of the balanced number (tokens of all
        shards * top_k / shards); rows beyond are dropped, last expert first. <= 0: the worst case,
        nothing is ever dropped.
      quantize_before_all_gather: tokens travel and are sorted in fp8; False: in their own dtype,
        and are quantized inside the kernels.
      ring_cotangent_all_gather: the cotangent of the combine's reduce-scatter is gathered by the
        ring kernel, where the axis is a ring of the torus. The forward pass has no ring kernel, so
        a rematerialized one has none either.
      save_sorted_inputs: name the sorted tokens and the routing (SAVED_NAMES), so that
        ``jax.checkpoint(layer, policy=moe.save_sorted_inputs_policy)`` keeps them, and runs neither
        gather nor sort again.
      num_token_chunks: the tokens of a shard are processed in so many parts, one after the other.
      activation: "silu", "gelu" or "relu".
      norm_topk_prob: whether the weights of a token's top_k experts are renormalized to sum 1.
      sparse_core_gather: whether the dispatch fetches tokens with the SparseCores, see
        ``sparse_core`` of `ragged_gather`; no hardware has run it.

    Raises:
      TypeError, ValueError: a field holds something else.

    >>> from fp8moe_prims.moe import MoEConfig
    >>> MoEConfig(num_experts=8, top_k=2).ragged_buffer_factor
    -1.0
    """

    num_experts: int
    top_k: int
    ep_axis: str | None = None
    recipe: QuantRecipe = QuantRecipe()
    ragged_buffer_factor: float = -1.0
    quantize_before_all_gather: bool = True
    ring_cotangent_all_gather: bool = True
    save_sorted_inputs: bool = False
    num_token_chunks: int = 1
    activation: str = "silu"
    norm_topk_prob: bool = True
    sparse_core_gather: bool = False

    def __post_init__(self):
        for field in ("num_experts", "top_k", "num_token_chunks"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field}: must be a positive integer, got {value!r}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.recipe is None:
            object.__setattr__(self, "recipe", UNQUANTIZED)
        if not isinstance(self.recipe, QuantRecipe):
            raise TypeError(f"recipe: takes a QuantRecipe, got {type(self.recipe).__name__}")
        if self.activation not in ACTIVATIONS:
            allowed = tuple(ACTIVATIONS)
            raise ValueError(f"activation: must be one of {allowed}, got {self.activation!r}")
        if not math.isfinite(self.ragged_buffer_factor):
            raise ValueError(f"ragged_buffer_factor: not finite: {self.ragged_buffer_factor!r}")


save_sorted_inputs_policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


def moe_ffn(x, router_logits, w_gate, w_up, w_down, *, config: MoEConfig):
    """Routes tokens to their top_k experts and sums what these make of them.

    ``y = sum_j p_j * (activation(x @ w_gate[e_j]) * (x @ w_up[e_j])) @ w_down[e_j]``, over the
    top_k experts e_j of the softmax p of the logits. With ``config.ep_axis`` it is called inside
    shard_map: x and the logits are a shard's tokens, the weights its experts.

    Args:
      x: tokens [t, d], bfloat16, float16 or float32.
      router_logits: [t, num_experts], wide; the softmax is computed in float32.
      w_gate, w_up: [e_local, d, f], wide, or QArrays as `gmm` takes them (gathered in fp8 over
        another mesh axis, say); e_local = num_experts / size of ep_axis.
      w_down: [e_local, f, d], likewise.
      config: see `MoEConfig`.

    Returns:
      (y, stats): y [t, d] of x's dtype; stats a dict, the same on every shard, of
      ``rows_per_expert`` int32 [num_experts], the rows routed to each expert;
      ``rows_dropped`` int32 [], those that found no place in the buffer;
      ``needed_factor`` float32 [], the least ragged_buffer_factor that would have dropped none.

    Raises:
      TypeError, ValueError: an argument has a wrong rank, shape or dtype, or ep_axis is not bound.

    >>> import jax, jax.numpy as jnp
    >>> from fp8moe_prims.moe import MoEConfig, moe_ffn
    >>> x, logits = jnp.ones((8, 32)), jnp.zeros((8, 4))
    >>> w, w_down = jnp.ones((4, 32, 16)), jnp.ones((4, 16, 32))
    >>> layer = jax.jit(moe_ffn, static_argnames="config")
    >>> y, stats = layer(x, logits, w, w, w_down, config=MoEConfig(num_experts=4, top_k=2))
    >>> y.shape, stats["rows_dropped"]
    ((8, 32), Array(0, dtype=int32))
    """
    shards = _axis_size(config.ep_axis)
    _check(x, router_logits, w_gate, w_up, w_down, config, shards)
    w_in = _side_by_side(*(quantize_weights(w, config.recipe) for w in (w_gate, w_up)))
    w_down = quantize_weights(w_down, config.recipe)
    parts = config.num_token_chunks
    outs, counts, dropped, needed = [], 0, 0, jnp.float32(0)
    for i in range(parts):
        part = lambda a: a[i * (a.shape[0] // parts) : (i + 1) * (a.shape[0] // parts)]  # noqa: B023
        y, stats = _moe_part(part(x), part(router_logits), w_in, w_down, config, shards)
        outs.append(y)
        counts, dropped = counts + stats[0], dropped + stats[1]
        needed = jnp.maximum(needed, stats[2])
    if config.ep_axis is not None:
        sums = lax.psum(jnp.concatenate([counts, dropped[None]]), config.ep_axis)
        counts, dropped = sums[:-1], sums[-1]
        needed = lax.pmax(needed, config.ep_axis)
    stats = dict(rows_per_expert=counts, rows_dropped=dropped, needed_factor=needed)
    return (outs[0] if parts == 1 else jnp.concatenate(outs)), stats


def _moe_part(x, logits, w_in, w_down, config, shards):
    """One chunk: (y [t, d], (rows per expert of this shard's tokens, dropped, needed factor))."""
    axis, recipe = config.ep_axis, config.recipe
    weights, experts = route(logits, config)  # [t, top_k] each
    counts = jnp.zeros(config.num_experts, jnp.int32).at[experts.reshape(-1)].add(1)

    tokens = x
    if recipe.act_dtype is not None and config.quantize_before_all_gather:
        tokens = quantize(
            x, recipe.act_dtype, channelwise_axes=(0,), calibration=recipe.act_calibration
        )
    if axis is not None:
        tokens = all_gather(tokens, axis)
        weights, experts = (lax.all_gather(a, axis, tiled=True) for a in (weights, experts))
    plan = sort_rows(experts, w_in.shape[0], config, shards)
    plan = plan.name() if config.save_sorted_inputs else plan

    rows = dict(start=0, end=plan.end, expected_rows=plan.balanced, tail="undefined")
    gathered = ragged_gather(
        tokens,
        plan.token,
        inverse=plan.position,
        sparse_core=config.sparse_core_gather,
        **rows,
    )
    if config.save_sorted_inputs:
        gathered = _name_values(gathered)
    grouped = dict(recipe=recipe, tail="undefined", expected_rows=plan.balanced)
    wide = dict(preferred_element_type=x.dtype)
    h = gmm(gathered, w_in, plan.sizes, **grouped, **wide)  # [m, 2f]
    a = ragged_glu(h, activation=config.activation, qdtype=recipe.act_dtype, **rows)  # [m, f]
    y = gmm(a, w_down, plan.sizes, **grouped, **wide)  # [m, d]
    y = ragged_gather_reduce(y, plan.position, weights=weights, inverse=plan.slot, **rows)
    if axis is not None:
        y = reduce_scatter(y, axis, ring_cotangent=config.ring_cotangent_all_gather)

    needed = plan.routed.astype(jnp.float32) / np.float32(plan.balanced)
    return y, (counts, plan.routed - plan.end, needed)


def route(logits, config: MoEConfig):
    """(weights float32, experts int32), [t, top_k] each: the top_k of the softmax over experts."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = lax.top_k(probabilities, config.top_k)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which row of the buffer holds which token, for the experts of this shard.

    A *slot* is a (token, j) pair, numbered token * top_k + j. Rows are ordered by expert and slot.
    """

    token: jax.Array  # int32 [m], token of each row
    slot: jax.Array  # int32 [m], slot of each row
    position: jax.Array  # int32 [t, top_k], row of each slot; those of other shards lie beyond end
    sizes: jax.Array  # int32 [e_local], rows of each local expert in the buffer
    end: jax.Array  # int32 [], rows in use
    routed: jax.Array  # int32 [], rows that local experts got, in the buffer or dropped
    balanced: int  # rows of a shard if routing were even

    def name(self):
        """The same, named for a checkpoint policy."""
        fields = ("token", "slot", "position", "sizes", "end", "routed")
        named = {f: checkpoint_name(getattr(self, f), SAVED_NAMES[1]) for f in fields}
        return dataclasses.replace(self, **named)


def sort_rows(experts, e_local: int, config: MoEConfig, shards: int) -> RowPlan:
    """Sorts the slots of experts [t, top_k] by expert, this shard's experts first."""
    t, top_k = experts.shape
    total = t * top_k
    first = np.int32(0)
    if config.ep_axis is not None:
        first = lax.axis_index(config.ep_axis).astype(jnp.int32) * np.int32(e_local)
    local = jnp.mod(experts.reshape(-1) - first, np.int32(config.num_experts))  # ours: < e_local
    slots = jnp.arange(total, dtype=jnp.int32)
    order = _sorted_slots(local, slots, config.num_experts)
    position = jnp.zeros(total, jnp.int32).at[order].set(slots, unique_indices=True)
    routed = jnp.zeros(config.num_experts, jnp.int32).at[local].add(1)[:e_local]
    balanced = max(1, -(-total // shards))
    m = buffer_rows(total, balanced, min(top_k, e_local) * t, config.ragged_buffer_factor)
    slot = order[:m]
    ends = jnp.minimum(jnp.cumsum(routed, dtype=jnp.int32), np.int32(m))
    return RowPlan(
        token=slot // np.int32(top_k),
        slot=slot,
        position=position.reshape(t, top_k),
        sizes=jnp.diff(ends, prepend=np.int32(0)),
        end=ends[-1],
        routed=jnp.sum(routed, dtype=jnp.int32),
        balanced=balanced,
    )


def _sorted_slots(local, slots, num_experts: int):
    """The slots, ordered by expert and then by slot: a sort of one integer each where both fit."""
    total = slots.shape[0]
    if num_experts * total >= 2**31:
        return lax.sort((local, slots), num_keys=1, is_stable=True)[1]
    return jnp.mod(lax.sort(local * np.int32(total) + slots), np.int32(total))


def buffer_rows(total: int, balanced: int, worst: int, factor: float) -> int:
    """Rows of the buffer: factor * balanced, at most the worst case; <= 0 means the worst case."""
    worst = min(worst, total)
    return worst if factor <= 0 else max(1, min(worst, math.ceil(factor * balanced)))


def _side_by_side(gate, up):
    """[e, d, 2f]: one gmm for both, and one dlhs, so that no sum runs over the buffer's rows."""
    join = lambda a, b: jnp.concatenate([a, b], axis=2)
    if not hasattr(gate, "qvalue"):
        return join(gate, up)
    _, scale, carrier = operand("w_gate", gate, ("e_local", "d", "f"))
    _, other_scale, other = operand("w_up", up, ("e_local", "d", "f"))
    common = np.broadcast_shapes(scale.shape[:2], other_scale.shape[:2])
    scales = [
        jnp.broadcast_to(s, (*common, w.qvalue.shape[2]))
        for s, w in ((scale, gate), (other_scale, up))
    ]
    carriers = None if carrier is None or other is None else join(carrier, other)
    return QArray(join(gate.qvalue, up.qvalue), join(*scales), carriers)


def _name_values(x):
    """The sorted tokens, named; the carrier is not: it has no value to keep."""
    name = lambda a: checkpoint_name(a, SAVED_NAMES[0])
    if isinstance(x, QArray):
        return QArray(name(x.qvalue), name(x.scale), x.carrier)
    return name(x)


def _axis_size(axis) -> int:
    if axis is None:
        return 1
    try:
        return lax.axis_size(axis)
    except NameError as e:
        raise ValueError(
            f"ep_axis: {axis!r} is not bound; call moe_ffn inside jax.shard_map over that axis"
        ) from e


def _check(x, logits, w_gate, w_up, w_down, config, shards):
    for name, a, dims in (
        ("x", x, "[t, d]"),
        ("router_logits", logits, "[t, num_experts]"),
        ("w_gate", w_gate, "[e_local, d, f]"),
        ("w_up", w_up, "[e_local, d, f]"),
        ("w_down", w_down, "[e_local, f, d]"),
    ):
        if name.startswith("w_") and hasattr(a, "qvalue"):
            operand(name, a, tuple(dims[1:-1].split(", ")))
            continue
        if getattr(a, "dtype", None) not in WIDE_DTYPES:
            raise TypeError(
                f"{name}: takes bfloat16, float16 or float32, got {getattr(a, 'dtype', type(a))}"
            )
        if a.ndim != dims.count(",") + 1:
            raise ValueError(f"{name}: takes {dims}, got shape {a.shape}")
    (t, d), f = x.shape, w_gate.shape[2]
    e_local, remainder = divmod(config.num_experts, shards)
    if remainder:
        raise ValueError(
            f"num_experts: must be a multiple of the {shards} shards, got {config.num_experts}"
        )
    for name, a, shape in (
        ("router_logits", logits, (t, config.num_experts)),
        ("w_gate", w_gate, (e_local, d, f)),
        ("w_up", w_up, (e_local, d, f)),
        ("w_down", w_down, (e_local, f, d)),
    ):
        if a.shape != shape:
            raise ValueError(f"{name}: takes shape {shape}, got {a.shape}")
    if hasattr(w_gate, "qvalue") != hasattr(w_up, "qvalue") and config.recipe.weight_dtype is None:
        raise TypeError("w_up: must be a QArray where w_gate is one, and only there")
    if t % config.num_token_chunks:
        raise ValueError(
            f"num_token_chunks: must divide the {t} tokens, got {config.num_token_chunks}"
        )
