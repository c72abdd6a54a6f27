"""What a layout will need, before anything starts: weights, KV cache and communication of each rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from replica.errors import ConfigError
from replica.layout import MAX_WORLD, Layout, valid_layouts
from replica.model_config import DTYPE_BYTES, ModelConfig
from replica.quantization import SCALE_SUFFIX
from replica.shards import weight_bytes
from replica.tensor_specs import TensorSpec, mlp_block_width, tensor_specs

SAME_CAPACITY: Final = 0.05  # layouts whose KV tokens differ by less of the best are ranked by what they send


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a plan is made for, beside model and layout."""

    dtype: str  # of weights that are not FP8, of activations and of the KV cache: a key of DTYPE_BYTES
    device_bytes: int  # what weights, reserve and KV cache of one rank may take together
    step_tokens: int  # tokens of one decode step, all replicas together
    survive: int = 0  # replicas that may be lost: room for their blocks is kept

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no plan can be made for."""
        if self.device_bytes < 1 or self.step_tokens < 1:
            raise ConfigError("--device-memory and --step-tokens must be above 0")
        if self.survive < 0:
            raise ConfigError(f"--survive is {self.survive}, must not be negative")

    def losses(self, layout: Layout) -> int:
        """How many replicas of the layout may be lost."""
        if self.survive >= layout.dp:
            raise ConfigError(
                f"--survive is {self.survive}, must be below the {layout.dp} replicas of {layout.flags()}"
            )
        return self.survive


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
    losses = settings.losses(layout)
    weights = weight_bytes(config, layout, specs)
    reserves = _reserves(config, layout, specs, weights, losses)
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
    layouts = [layout for layout in valid_layouts(num_devices, config, nnodes) if settings.survive < layout.dp]
    if not layouts:
        demand = f"--nnodes {nnodes} and --survive {settings.survive}"
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


def _reserves(
    config: ModelConfig,
    layout: Layout,
    specs: Mapping[str, TensorSpec],
    weights: Sequence[Mapping[str, int]],
    losses: int,
) -> list[int]:
    """Bytes that each rank keeps free for the blocks of replicas that may be lost.

    The worst case loses them from one group: the survivors of it then hold all its blocks, dealt out evenly, so to
    within one block. A group whose replicas are all lost leaves nobody to serve, and the other groups lose nothing.
    """
    reserves = [0] * layout.world
    for kind, width in (("mlp", layout.mlp_tp), ("experts", layout.moe)):
        num_replicas = max(1, width // layout.attn_tp)
        lost = min(losses, num_replicas - 1)
        if not lost:
            continue
        block_bytes = _largest_block_bytes(config, specs, kind)
        for group in layout.groups(width):
            held = sum(weights[rank][kind] for rank in group)
            share = -(-held // (len(group) - lost * layout.attn_tp)) + block_bytes
            for rank in group:
                reserves[rank] += max(0, share - weights[rank][kind])
    return reserves


def _largest_block_bytes(config: ModelConfig, specs: Mapping[str, TensorSpec], kind: str) -> int:
    """Bytes of one block of an expert's (or dense MLP's) width in the layer where it is largest; 0 if there is none."""
    is_experts = kind == "experts"
    width = config.moe_intermediate_size if is_experts else config.intermediate_size
    largest = 0
    for layer in range(config.num_layers):
        if config.is_moe(layer) != is_experts:
            continue
        prefix = f"model.layers.{layer}.mlp.{'experts.0.' if is_experts else ''}"
        names = [f"{prefix}{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
        whole = sum(specs[name].num_bytes for name in (*names, *(n + SCALE_SUFFIX for n in names)) if name in specs)
        num_blocks = -(-width // mlp_block_width(config, layer))
        largest = max(largest, -(-whole // num_blocks))
    return largest


def _is_sliver(config: ModelConfig, layout: Layout) -> bool:
    """Whether an expert is cut among more ranks than it has blocks, so that some hold none of it."""
    moe_layers = [layer for layer in range(config.num_layers) if config.is_moe(layer)]
    return bool(moe_layers) and layout.moe_tp * mlp_block_width(config, moe_layers[0]) > config.moe_intermediate_size


def _reason(config: ModelConfig, plan: Plan, most_tokens: int, least_sent: int) -> str:
    layout = plan.layout
    if plan.missing_bytes:
        return f"does not fit: the fullest rank lacks {plan.missing_bytes / 2**30:.1f} GiB"
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
