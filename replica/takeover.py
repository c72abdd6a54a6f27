"""Which rank takes over which blocks of the replicas that were lost. Pure arithmetic of layout, model and evictions.

A dense MLP's width, and each expert's, is a row of blocks (shards.py). When replicas are evicted, the blocks that their
ranks held, those taken over earlier among them, are dealt out over the ranks of the same group that live. Expert
blocks go to any rank of a MoE group, since each of them sees all tokens of the group, whatever its ep_rank. What a
survivor holds stays where it is.

Each lost block goes to the rank that holds the fewest bytes of the kind at that time, so totals end within one block of
each other wherever the lost ones are enough for that. A rank's share of a layer's lost blocks is consecutive: few
experts with wide parts rather than many with slivers. Every rank computes the same, from the evictions in their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from replica.layout import Layout, own_group
from replica.model_config import ModelConfig
from replica.shards import Ranges, Shards
from replica.tensor_specs import BlockSize, block_size

Block = tuple[int, int]  # expert (0 in a dense layer), place in its width
LayerBlocks = dict[int, list[Block]]  # by layer


class GroupBlocks:
    """Who holds which blocks of all layers of one kind in one group. `evict` moves those of the dead."""

    def __init__(self, config: ModelConfig, layout: Layout, kind: str, ranks: Sequence[int], dtype: str) -> None:
        """`kind` is "mlp" or "experts"; `dtype` is that of weights that are not FP8."""
        layers = [layer for layer in range(config.num_layers) if config.is_moe(layer) == (kind == "experts")]
        self._sizes = {layer: block_size(config, layer, dtype) for layer in layers}
        self.held: dict[int, LayerBlocks] = {}  # by living rank
        self.bytes: dict[int, int] = {}  # the same in sum
        for rank in ranks:
            shards = Shards(config, layout, rank)
            self.held[rank] = {layer: _base_blocks(shards, layer, size) for layer, size in self._sizes.items()}
            self.bytes[rank] = sum(self._num_bytes(layer, blocks) for layer, blocks in self.held[rank].items())

    def evict(self, dead: Collection[int]) -> dict[int, LayerBlocks]:
        """Takes the dead ranks out. Returns what each living one takes over of them; nobody may be left to."""
        lost = [self.held.pop(rank) for rank in list(self.held) if rank in dead]
        for rank in dead:
            self.bytes.pop(rank, None)
        taken: dict[int, LayerBlocks] = {rank: {} for rank in self.held}
        if not lost or not taken:
            return taken
        for layer, size in self._sizes.items():
            blocks = sorted(block for held in lost for block in held[layer])
            partial = size.num_blocks - 1 if size.partial_columns else size.num_blocks
            for alike in ([b for b in blocks if b[1] < partial], [b for b in blocks if b[1] >= partial]):
                for rank, share in self._deal(layer, alike).items():
                    taken[rank].setdefault(layer, []).extend(share)
        for rank, layers in taken.items():
            for layer, share in layers.items():
                share.sort()
                self.held[rank][layer] = sorted([*self.held[rank][layer], *share])
        return taken

    def ranges(self, layer: int, blocks: Sequence[Block], num_parts: int) -> list[Ranges]:
        """Blocks of a layer, sorted, as the columns of each of its `num_parts` experts."""
        size = self._sizes[layer]
        parts: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
        for expert, block in blocks:
            start, stop = size.columns(block)
            part = parts[expert]
            if part and part[-1][1] == start:
                start = part.pop()[0]
            part.append((start, stop))
        return [tuple(part) for part in parts]

    def _deal(self, layer: int, blocks: Sequence[Block]) -> dict[int, Sequence[Block]]:
        """Blocks of one size, in consecutive runs, to the ranks that hold the least."""
        num_bytes = self._num_bytes(layer, blocks[:1])
        quotas = dict.fromkeys(sorted(self.held), 0)
        heap = [(self.bytes[rank], rank) for rank in quotas]
        heapq.heapify(heap)
        for _ in blocks:
            total, rank = heap[0]
            quotas[rank] += 1
            heapq.heapreplace(heap, (total + num_bytes, rank))
        self.bytes = {rank: total for total, rank in heap}
        shares: dict[int, Sequence[Block]] = {}
        first = 0
        for rank, quota in quotas.items():
            shares[rank] = blocks[first : first + quota]
            first += quota
        return shares

    def _num_bytes(self, layer: int, blocks: Sequence[Block]) -> int:
        size = self._sizes[layer]
        return sum(size.num_bytes(block) for _, block in blocks)


class TakenShards(Shards):
    """What one rank takes over at one eviction, by layer. Of other tensors than MLPs and experts, its base part."""

    def __init__(self, base: Shards, mlp: Mapping[int, Ranges], experts: Mapping[int, list[Ranges]]) -> None:
        super().__init__(base.config, base.layout, base.rank)
        self._taken_mlp = mlp
        self._taken_experts = experts

    def mlp(self, layer: int) -> Ranges:
        """See Shards."""
        return self._taken_mlp.get(layer, ())

    def experts(self, layer: int) -> list[Ranges]:
        """See Shards."""
        return self._taken_experts.get(layer) or [()] * self.config.num_experts

    @property
    def layers(self) -> list[int]:
        """Those of which anything is taken over."""
        return sorted([*self._taken_mlp, *self._taken_experts])


class Takeover:
    """One rank's view of all evictions of its group, one after the other."""

    def __init__(self, shards: Shards, dtype: str) -> None:
        """`shards` is what the rank holds before the first; `dtype` is that of weights that are not FP8."""
        config, layout, rank = shards.config, shards.layout, shards.rank
        self._shards = shards
        self._mlp = GroupBlocks(config, layout, "mlp", own_group(layout.groups(layout.mlp_tp), rank), dtype)
        self._experts = GroupBlocks(config, layout, "experts", own_group(layout.groups(layout.moe), rank), dtype)

    def evict(self, replicas: Collection[int]) -> TakenShards:
        """What the rank takes over when these replicas (dp ranks) are evicted together."""
        dead = dead_ranks(self._shards.layout, replicas)
        mlp, experts = (
            {
                layer: blocks.ranges(layer, share, max(1, num_parts))
                for layer, share in blocks.evict(dead)[self._shards.rank].items()
                if share
            }
            for blocks, num_parts in ((self._mlp, 1), (self._experts, self._shards.config.num_experts))
        )
        return TakenShards(self._shards, {layer: parts[0] for layer, parts in mlp.items()}, experts)


def dead_ranks(layout: Layout, replicas: Collection[int]) -> list[int]:
    """All ranks of these replicas (dp ranks)."""
    return [rank for rank in range(layout.world) if layout.dp_rank(rank) in replicas]


def _base_blocks(shards: Shards, layer: int, size: BlockSize) -> list[Block]:
    """The blocks that a rank holds of a layer from the start, sorted."""
    parts = shards.experts(layer) if shards.config.is_moe(layer) else [shards.mlp(layer)]
    return [
        (expert, block)
        for expert, part in enumerate(parts)
        for start, stop in part
        for block in range(start // size.width, -(-stop // size.width))
    ]
