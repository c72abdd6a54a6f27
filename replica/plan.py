"""What a layout will need, before anything starts: weights, KV cache and communication of each rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from replica.errors import ConfigError
from replica.layout import MAX_WORLD, Layout, valid_layouts
from replica.model_config import DTYPE_BYTES, ModelConfig
from replica.shards import weight_bytes
from replica.tensor_specs import TensorSpec, block_size, mlp_block_width, tensor_specs

GIB: Final = 2**30  # bytes
SAME_CAPACITY: Final = 0.05  # layouts whose KV tokens differ by less of the best are ranked by what they send


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a plan is made for, beside model and layout."""

    dtype: str  # of weights that are not FP8, of activations and of the KV cache: a key of DTYPE_BYTES
    device_bytes: int  # what weights, reserve and KV cache of one rank may take together
    step_tokens: int  # tokens of one decode step, all replicas together
    survive: int | None = None  # replicas that may be lost (Layout.losses): room for their blocks is kept

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no plan can be made for."""
        if self.device_bytes < 1 or self.step_tokens < 1:
            raise ConfigError("--device-memory and --step-tokens must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's memory, in bytes."""

    rank: int
    dp_rank: int
    weights: Mapping[str, int]  # by kind, as tensors.KINDS
    reserve_bytes: int  # kept free for the blocks of lost replicas
    kv_bytes_per_token: int
    kv_tokens: int  # tokens that fit into what is left of the device

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def most_weight_bytes(self) -> int:
        """All weights, when as many replicas are lost as may be."""
        return self.weight_bytes + self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One layout's needs."""

    layout: Layout
    ranks: tuple[RankPlan, ...]
    sent_bytes: Mapping[str, int]  # by kind of layer: what each rank sends in one step
    losses: int  # replicas for whose blocks there is a reserve
    missing_bytes: int  # what the fullest rank lacks for weights and reserve; 0 if they fit

    @property
    def fullest_over_mean(self) -> float:
        """The most weights on a rank, over the mean: what uneven shards cost every rank's KV cache."""
        sizes = [rank.weight_bytes for rank in self.ranks]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def kv_tokens(self) -> int:
        """Tokens that all replicas together can hold; a replica holds what its fullest rank can."""
        by_replica: dict[int, int] = {}
        for rank in self.ranks:
            by_replica[rank.dp_rank] = min(rank.kv_tokens, by_replica.get(rank.dp_rank, rank.kv_tokens))
        return sum(by_replica.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A valid layout, and why it stands where it stands."""

    plan: Plan
    reason: str


def make_plan(
    config: ModelConfig, layout: Layout, settings: PlanSettings, specs: Mapping[str, TensorSpec] | None = None
) -> Plan:
    """The plan of one layout. `specs` saves making them again. Raises ConfigError if the model cannot be cut so."""
    layout.check(config)
    specs = tensor_specs(config, settings.dtype) if specs is None else specs
    losses = layout.losses(settings.survive)
    weights = weight_bytes(config, layout, specs)
    reserves = _reserves(layout, weights, _largest_blocks(config, settings.dtype), losses)
    # Each rank has the same number of KV heads, repeated where there are fewer than ranks.
    kv_heads = max(1, config.num_kv_heads // layout.attn_tp)
    kv_bytes = config.kv_bytes_per_token(settings.dtype) // config.num_kv_heads * kv_heads
    ranks: list[RankPlan] = []
    missing_bytes = 0
    for rank, (held, reserve) in enumerate(zip(weights, reserves, strict=True)):
        left = settings.device_bytes - sum(held.values()) - reserve
        missing_bytes = max(missing_bytes, -left)
        ranks.append(
            RankPlan(
                rank=rank,
                dp_rank=layout.dp_rank(rank),
                weights=held,
                reserve_bytes=reserve,
                kv_bytes_per_token=kv_bytes,
                kv_tokens=max(0, left) // kv_bytes,
            )
        )
    sent = sent_bytes(config, layout, settings)
    return Plan(layout=layout, ranks=tuple(ranks), sent_bytes=sent, losses=losses, missing_bytes=missing_bytes)


def sent_bytes(config: ModelConfig, layout: Layout, settings: PlanSettings) -> dict[str, int]:
    """What one rank sends in one decode step of `step_tokens` tokens, by kind of layer.

    Around each layer its ranks gather the tokens that each of them owns, and scatter the sums back: both send as many
    chunks as there are other ranks.
    """
    attn_tp, item_bytes = layout.attn_tp, DTYPE_BYTES[settings.dtype]
    tokens = -(-settings.step_tokens // layout.dp)  # of one replica
    token_bytes = config.hidden_size * item_bytes
    chunk = -(-tokens // attn_tp) * token_bytes  # what one rank owns
    in_replica = (attn_tp - 1) * chunk

    num_dense = len(config.dense_layers)
    logits = (attn_tp - 1) * tokens * layout.padded_vocab(config.vocab_size) // attn_tp * item_bytes
    return {
        "attention": config.num_layers * 2 * in_replica,
        "mlp": num_dense * 2 * (layout.mlp_tp - 1) * chunk,
        "experts": (config.num_layers - num_dense) * 2 * (layout.moe - 1) * chunk,
        "vocabulary": 2 * in_replica + logits,
    }


def suggest(config: ModelConfig, num_devices: int, settings: PlanSettings, nnodes: int = 1) -> list[Suggestion]:
    """All valid layouts of so many devices, best first.

    What fits comes before what does not; then more KV tokens, which bound how many requests run at once; among about as
    many, fewer bytes sent; then whole blocks of each expert before slivers, and a smaller ep, because experts that are
    cut are loaded evenly whatever the routing.
    """
    if not 1 <= num_devices <= MAX_WORLD:
        raise ConfigError(f"--suggest is {num_devices}, must be 1 to {MAX_WORLD} devices")
    specs = tensor_specs(config, settings.dtype)
    layouts = [layout for layout in valid_layouts(num_devices, config, nnodes) if (settings.survive or 0) < layout.dp]
    if not layouts:
        demand = f"--nnodes {nnodes} and --survive {settings.survive or 0}"
        raise ConfigError(f"no layout of {num_devices} devices allows {demand}; lower them or take more devices")
    plans = [make_plan(config, layout, settings, specs) for layout in layouts]
    fitting = [plan for plan in plans if not plan.missing_bytes] or plans
    most_tokens = max(1, *(plan.kv_tokens for plan in plans))
    least_sent = max(1, min(sum(plan.sent_bytes.values()) for plan in fitting))

    def order(plan: Plan) -> tuple[float, ...]:
        capacity = math.floor((1 - plan.kv_tokens / most_tokens) / SAME_CAPACITY)
        sent = round(sum(plan.sent_bytes.values()) / least_sent, 2)
        return plan.missing_bytes, capacity, sent, _is_sliver(config, plan.layout), plan.layout.ep, plan.layout.dp

    ordered = sorted(plans, key=order)
    return [Suggestion(plan=plan, reason=_reason(config, plan, most_tokens, least_sent)) for plan in ordered]


class SurvivorCheck:
    """Tells whether what is left of a group can hold the model."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: str, weight_room_bytes: int) -> None:
        """`weight_room_bytes` is what the weights of one rank may take (cache_size.py)."""
        self._layout = layout
        self._room_bytes = weight_room_bytes
        specs = tensor_specs(config, dtype)
        self._weights = weight_bytes(config, layout, specs)
        self._block_bytes = _largest_blocks(config, dtype)

    def __call__(self, members: Collection[int]) -> str:
        """Why these replicas (dp ranks) cannot go on alone; "" if they can."""
        living = [rank for rank in range(self._layout.world) if self._layout.dp_rank(rank) in members]
        if not living:
            return "no replica is left"
        more = _taken_bytes(self._layout, self._weights, self._block_bytes, living)
        needed = max(sum(self._weights[rank].values()) + more[rank] for rank in living)
        if needed <= self._room_bytes:
            return ""
        return (
            f"{len(members)} of {self._layout.dp} replicas are left: a rank would hold {needed / GIB:.2f} GiB of "
            f"weights, there is room for {self._room_bytes / GIB:.2f} beside its KV cache (--survive, --kv-cache-gb)"
        )


def _reserves(
    layout: Layout, weights: Sequence[Mapping[str, int]], block_bytes: Mapping[str, int], losses: int
) -> list[int]:
    """Bytes that each rank keeps free for the blocks of replicas that may be lost.

    The worst case loses them from one group of each kind, whose survivors then hold all its blocks. A group whose
    replicas are all lost leaves nobody to serve, and the other groups lose nothing.
    """
    reserves = [0] * layout.world
    for kind, width in _widths(layout):
        num_replicas = max(1, width // layout.attn_tp)
        num_living = width - min(losses, num_replicas - 1) * layout.attn_tp
        for group in layout.groups(width):
            share = _share_bytes([weights[rank][kind] for rank in group], num_living, block_bytes[kind])
            for rank in group:
                reserves[rank] += max(0, share - weights[rank][kind])
    return reserves


def _taken_bytes(
    layout: Layout, weights: Sequence[Mapping[str, int]], block_bytes: Mapping[str, int], living: Sequence[int]
) -> dict[int, int]:
    """The most bytes that each living rank may have taken over, in whatever order the others were lost."""
    taken = dict.fromkeys(living, 0)
    for kind, width in _widths(layout):
        for group in layout.groups(width):
            left = [rank for rank in group if rank in taken]
            if not left:
                continue
            share = _share_bytes([weights[rank][kind] for rank in group], len(left), block_bytes[kind])
            for rank in left:
                taken[rank] += max(0, share - weights[rank][kind])
    return taken


def _share_bytes(held: Sequence[int], num_living: int, block_bytes: int) -> int:
    """The most that a living rank holds of a group's blocks, beside those that it had from the start.

    Blocks go to who holds the least (takeover.py), which is at most the mean; so nobody is more than one above it.
    """
    return 0 if num_living == len(held) else -(-sum(held) // num_living) + block_bytes


def _widths(layout: Layout) -> tuple[tuple[str, int], ...]:
    return ("mlp", layout.mlp_tp), ("experts", layout.moe)


def _largest_blocks(config: ModelConfig, dtype: str) -> dict[str, int]:
    """Bytes of one block of a dense MLP's width, and of an expert's, in the layer where it is largest; 0 if none."""
    largest = {"mlp": 0, "experts": 0}
    for layer in range(config.num_layers):
        kind = "experts" if config.is_moe(layer) else "mlp"
        largest[kind] = max(largest[kind], block_size(config, layer, dtype).num_bytes(0))
    return largest


def _is_sliver(config: ModelConfig, layout: Layout) -> bool:
    """Whether an expert is cut among more ranks than it has blocks, so that some hold none of it."""
    moe_layers = [layer for layer in range(config.num_layers) if config.is_moe(layer)]
    return bool(moe_layers) and layout.moe_tp * mlp_block_width(config, moe_layers[0]) > config.moe_intermediate_size


def _reason(config: ModelConfig, plan: Plan, most_tokens: int, least_sent: int) -> str:
    layout = plan.layout
    if plan.missing_bytes:
        return f"does not fit: the fullest rank lacks {plan.missing_bytes / GIB:.1f} GiB"
    reasons = [
        f"{100 * plan.kv_tokens / most_tokens:.0f} % of the most KV tokens",
        f"sends {sum(plan.sent_bytes.values()) / least_sent:.2f}x the least",
    ]
    if (repeats := layout.attn_tp // config.num_kv_heads) > 1:
        reasons.append(f"each KV head is held {repeats} times")
    if layout.moe < layout.world and config.num_experts:
        reasons.append(f"the experts are held {layout.world // layout.moe} times")
    if _is_sliver(config, layout):
        reasons.append("experts are cut among more ranks than they have blocks")
    if layout.ep > 1:
        reasons.append("the load of a rank depends on the routing")
    return ", ".join(reasons)
