"""How many bytes each rank holds after evictions, as planned: what real ranks are compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.shards import weight_bytes
from replica.takeover import GroupBlocks, dead_ranks
from replica.tensor_specs import TensorSpec


def weight_bytes_after(
    config: ModelConfig,
    layout: Layout,
    specs: Mapping[str, TensorSpec],
    dtype: str,
    evicted: Sequence[Collection[int]],
) -> dict[int, dict[str, int]]:
    """For each rank that lives after these evictions, in their order, the bytes of its weights by kind (KINDS)."""
    lost = {rank for replicas in evicted for rank in dead_ranks(layout, replicas)}
    held = {rank: kinds for rank, kinds in enumerate(weight_bytes(config, layout, specs)) if rank not in lost}
    for kind, width in (("mlp", layout.mlp_tp), ("experts", layout.moe)):
        for ranks in layout.groups(width):
            blocks = GroupBlocks(config, layout, kind, ranks, dtype)
            for replicas in evicted:
                blocks.evict(dead_ranks(layout, replicas))
            for rank, num_bytes in blocks.bytes.items():
                held[rank][kind] = num_bytes
    return held
