"""Which part of each tensor a rank holds: sets of blocks, equal in memory over the whole model. Pure arithmetic.

An expert's width (and a dense MLP's) is a row of independent blocks: block b is some rows of gate and of up and as many
columns of down. So a rank may hold any set of blocks, and B blocks over R ranks need no padding and no common divisor:
each rank gets B // R, and the B % R others go to consecutive ranks, beginning where those of the expert before ended.
Over all experts of all layers that is one round of dealing cards, so the ranks' totals differ by at most one block.
Blocks of 128 keep each FP8 scale on one rank. Attention is cut by heads (a block of 128 that heads cut in two has its
scale on both sides), KV heads are repeated where ranks outnumber them, and the vocabulary is padded to equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from replica.layout import Layout, Range
from replica.model_config import ModelConfig
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX
from replica.tensor_specs import KINDS, TensorSpec, mlp_block_width

Ranges = tuple[Range, ...]

_CUT_BY_COLUMNS = ("o_proj", "down_proj")


def deal_blocks(num_blocks: int, num_ranks: int, ordinal: int, *, is_last_partial: bool = False) -> list[Range]:
    """The blocks of each rank, for the `ordinal`-th of a series of experts, or layers, of as many blocks.

    A rank's blocks are consecutive, and may be none. The ranks take turns at a partial last block.
    """
    base, extra = divmod(num_blocks, num_ranks)
    first_extra = ordinal * extra % num_ranks
    last = _rank_of_partial(num_blocks, num_ranks, ordinal) if is_last_partial else num_ranks - 1
    dealt = [(0, 0)] * num_ranks
    start = 0
    for turn in range(1, num_ranks + 1):
        rank = (last + turn) % num_ranks
        stop = start + base + ((rank - first_extra) % num_ranks < extra)
        dealt[rank] = (start, stop)
        start = stop
    return dealt


def _rank_of_partial(num_blocks: int, num_ranks: int, ordinal: int) -> int:
    base, extra = divmod(num_blocks, num_ranks)
    if base:
        return ordinal % num_ranks
    # Only the extra ranks hold a block. The set of them recurs after a period; then another of it takes its turn.
    period = num_ranks // math.gcd(extra, num_ranks)
    return (ordinal * extra + ordinal // period % extra) % num_ranks


def deal_width(width: int, block_width: int, num_ranks: int, ordinal: int) -> tuple[Range, ...]:
    """The columns of each rank, of a width that is cut in blocks; the last block may be partial."""
    extra = -(-width // block_width) % num_ranks
    return _deal_width(width, block_width, num_ranks, ordinal % (num_ranks * max(1, extra)))  # it recurs after so many


@lru_cache(maxsize=4096)
def _deal_width(width: int, block_width: int, num_ranks: int, ordinal: int) -> tuple[Range, ...]:
    is_partial = width % block_width != 0
    blocks = deal_blocks(-(-width // block_width), num_ranks, ordinal, is_last_partial=is_partial)
    return tuple((min(start * block_width, width), min(stop * block_width, width)) for start, stop in blocks)


def blocks_before(num_blocks: int, num_ranks: int, ordinal: int) -> list[int]:
    """How many blocks each rank holds of all that was dealt before the ordinal."""
    base, extra = divmod(num_blocks, num_ranks)
    rounds, rest = divmod(ordinal * extra, num_ranks)
    return [ordinal * base + rounds + (rank < rest) for rank in range(num_ranks)]


def dealt_totals(width: int, block_width: int, num_ranks: int, ordinals: range) -> list[tuple[int, int]]:
    """How many columns, in how many blocks, each rank holds of all the ordinals of a range together."""
    num_blocks = -(-width // block_width)
    before, after = (blocks_before(num_blocks, num_ranks, end) for end in (ordinals.start, ordinals.stop))
    blocks = [stop - start for start, stop in zip(before, after, strict=True)]
    columns = [count * block_width for count in blocks]
    if missing := num_blocks * block_width - width:
        for ordinal in ordinals:
            columns[_rank_of_partial(num_blocks, num_ranks, ordinal)] -= missing
    return list(zip(columns, blocks, strict=True))


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of a tensor: some rows, and some columns of a matrix, in the order they have in memory."""

    rows: Ranges
    columns: Ranges | None  # None: a vector
    num_padding_rows: int = 0  # below the rows, in memory only

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in memory."""
        num_rows = _size(self.rows) + self.num_padding_rows
        return (num_rows,) if self.columns is None else (num_rows, _size(self.columns))


class Shards:
    """What one rank of a layout holds of each tensor of a model. The layout must have passed `Layout.check`."""

    def __init__(self, config: ModelConfig, layout: Layout, rank: int) -> None:
        self.config = config
        self.layout = layout
        self.rank = rank
        attn_tp, local_rank = layout.attn_tp, layout.local_rank(rank)
        self.query_heads = _even_part(config.num_heads, attn_tp, local_rank)
        first_kv = local_rank * config.num_kv_heads // attn_tp
        self.kv_heads: Range = (first_kv, first_kv + max(1, config.num_kv_heads // attn_tp))
        start, stop = _even_part(layout.padded_vocab(config.vocab_size), attn_tp, local_rank)
        self.num_vocab_rows = stop - start  # padding included
        self.vocab_rows: Range = (min(start, config.vocab_size), min(stop, config.vocab_size))
        self._experts: dict[int, list[Ranges]] = {}  # by layer

    @property
    def num_heads(self) -> list[int]:
        """The rank's heads of q, of k and of v."""
        return [stop - start for start, stop in (self.query_heads, self.kv_heads, self.kv_heads)]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values on this rank, when the model runs in `dtype`."""
        return self.config.kv_bytes_per_token(dtype) // self.config.num_kv_heads * self.num_heads[1]

    def local_experts(self, layer: int) -> range:
        """The experts of a MoE layer that the rank and the others of its ep_rank hold between them."""
        ep_rank, _ = self.layout.moe_rank(self.rank)
        return range(*deal_blocks(self.config.num_experts, self.layout.ep, _ordinal(self.config, layer))[ep_rank])

    def experts(self, layer: int) -> list[Ranges]:
        """For each expert of a MoE layer, the rank's part of its width: rows of gate and up, columns of down."""
        if layer not in self._experts:
            shards: list[Ranges] = [()] * self.config.num_experts
            ep_rank, moe_tp_rank = self.layout.moe_rank(self.rank)
            width, block_width = self.config.moe_intermediate_size, mlp_block_width(self.config, layer)
            ordinals = _expert_ordinals(self.config, self.layout, layer)[ep_rank]
            for expert, ordinal in zip(self.local_experts(layer), ordinals, strict=True):
                dealt = deal_width(width, block_width, self.layout.moe_tp, ordinal)
                shards[expert] = _if_any(dealt[moe_tp_rank])
            self._experts[layer] = shards
        return self._experts[layer]

    def mlp(self, layer: int) -> Ranges:
        """The rank's part of a dense layer's width: rows of gate and up, columns of down."""
        block_width, ordinal = mlp_block_width(self.config, layer), _ordinal(self.config, layer)
        dealt = deal_width(self.config.intermediate_size, block_width, self.layout.mlp_tp, ordinal)
        return _if_any(dealt[self.layout.mlp_rank(self.rank)])

    def tensor(self, name: str, spec: TensorSpec) -> TensorShard:
        """The rank's part of one of the tensors of `tensor_specs`."""
        rows: Ranges = ((0, spec.shape[0]),)
        columns: Ranges | None = ((0, spec.shape[1]),) if len(spec.shape) == 2 else None
        if spec.kind == "vocabulary":
            num_padding_rows = self.num_vocab_rows - _size((self.vocab_rows,))
            return TensorShard(_if_any(self.vocab_rows), columns, num_padding_rows)
        module = name.split(".")[-2]
        ranges = self._cut(module, spec)
        if ranges is None:
            return TensorShard(rows, columns)
        if name.endswith(SCALE_SUFFIX):
            ranges = tuple((start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in ranges)
        if module not in _CUT_BY_COLUMNS:
            return TensorShard(ranges, columns)
        # A vector here is the bias of o_proj: whole on every rank, added once, after the sum.
        return TensorShard(rows, None if columns is None else ranges)

    def _cut(self, module: str, spec: TensorSpec) -> Ranges | None:
        """The part of a module's output (or, if cut by columns, input); None if every rank holds it whole."""
        if spec.kind == "experts":
            return self.experts(spec.layer)[spec.expert]
        if spec.kind == "mlp":
            return self.mlp(spec.layer)
        heads = {
            "q_proj": self.query_heads,
            "o_proj": self.query_heads,
            "k_proj": self.kv_heads,
            "v_proj": self.kv_heads,
        }
        if module not in heads:
            return None
        start, stop = heads[module]
        return ((start * self.config.head_dim, stop * self.config.head_dim),)


def weight_bytes(config: ModelConfig, layout: Layout, specs: Mapping[str, TensorSpec]) -> list[dict[str, int]]:
    """For each rank, the bytes of its weights by kind (KINDS), as they are in memory.

    The experts are counted from the dealing's totals, not one by one: a large model has 70,000 of their tensors.
    """
    others = {name: spec for name, spec in specs.items() if spec.kind != "experts"}
    by_place: dict[tuple[int, int], dict[str, int]] = {}  # ranks that agree in these hold the same of the others
    experts = _expert_bytes(config, layout, specs)
    ranks: list[dict[str, int]] = []
    for rank in range(layout.world):
        place = layout.local_rank(rank), layout.mlp_rank(rank)
        if place not in by_place:
            shards = Shards(config, layout, rank)
            by_place[place] = dict.fromkeys(KINDS, 0)
            for name, spec in others.items():
                by_place[place][spec.kind] += math.prod(shards.tensor(name, spec).shape) * spec.item_bytes
        ranks.append(by_place[place] | {"experts": experts[rank % layout.moe]})
    return ranks


def _expert_bytes(config: ModelConfig, layout: Layout, specs: Mapping[str, TensorSpec]) -> list[int]:
    """Bytes of the experts of each rank of a MoE group. All experts of a layer are alike."""
    sums = [0] * layout.moe
    for layer in range(config.num_layers):
        if not config.is_moe(layer):
            continue
        prefix = f"model.layers.{layer}.mlp.experts.0."
        block_width = mlp_block_width(config, layer)
        column_bytes = block_bytes = 0
        for part in ("gate_proj", "up_proj", "down_proj"):
            column_bytes += specs[f"{prefix}{part}.weight"].num_bytes // config.moe_intermediate_size
            scale = specs.get(f"{prefix}{part}.weight{SCALE_SUFFIX}")
            block_bytes += scale.num_bytes // -(-config.moe_intermediate_size // FP8_BLOCK) if scale else 0
        for ep_rank, ordinals in enumerate(_expert_ordinals(config, layout, layer)):
            totals = dealt_totals(config.moe_intermediate_size, block_width, layout.moe_tp, ordinals)
            for moe_tp_rank, (columns, blocks) in enumerate(totals):
                sums[ep_rank * layout.moe_tp + moe_tp_rank] += columns * column_bytes + blocks * block_bytes
    return sums


def _expert_ordinals(config: ModelConfig, layout: Layout, layer: int) -> list[range]:
    """For each ep_rank, the places of the layer's local experts among all of its experts in the model."""
    ordinal = _ordinal(config, layer)
    before = blocks_before(config.num_experts, layout.ep, ordinal)
    after = blocks_before(config.num_experts, layout.ep, ordinal + 1)
    return [range(start, stop) for start, stop in zip(before, after, strict=True)]


def _ordinal(config: ModelConfig, layer: int) -> int:
    """The layer's place among the layers of its kind, dense or MoE."""
    num_dense = sum(dense < layer for dense in config.dense_layers)
    return layer - num_dense if config.is_moe(layer) else num_dense


def _even_part(size: int, num_parts: int, part: int) -> Range:
    return size // num_parts * part, size // num_parts * (part + 1)


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _if_any(part: Range) -> Ranges:
    return (part,) if part[0] < part[1] else ()
