"""What the ranks of a replica are told at their start, and how the memory of each is shared out. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from replica.address import own_address
from replica.cache_size import RankSpace, kv_cache_bytes, local_space, weight_room_bytes
from replica.config import ReplicaConfig
from replica.frames import Init
from replica.group_config import resolve_dtype
from replica.model_config import ModelConfig
from replica.plan import GIB, PlanSettings, RankPlan, SurvivorCheck, make_plan
from replica.step_loop import STALLED_DEADLINES

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What the fullest rank of a group does with its memory.

    All ranks get as much of a KV cache, lest one replica could take requests that another could not.
    """

    plan: RankPlan
    free_bytes: int
    cache_bytes: int


def share_memory(config: ReplicaConfig, model: ModelConfig, space: RankSpace, *, max_model_len: int) -> RankMemory:
    """Weights, room for those of lost replicas, and the rest to the KV cache. Raises ConfigError if it does not do."""
    settings = PlanSettings(
        dtype=resolve_dtype(config, model),
        device_bytes=space.free_bytes,
        step_tokens=config.max_num_batched_tokens,
        survive=config.survive,
    )
    fullest = max(make_plan(model, config.layout, settings).ranks, key=lambda rank: rank.most_weight_bytes)
    cache_bytes = kv_cache_bytes(config, rank=fullest, max_model_len=max_model_len, free_bytes=space.free_bytes)
    return RankMemory(plan=fullest, free_bytes=space.free_bytes, cache_bytes=cache_bytes)


def survivor_check(config: ReplicaConfig, model: ModelConfig) -> Callable[[tuple[int, ...]], str]:
    """What tells why some replicas of the group (dp ranks) could not go on alone, and "" where they could.

    It goes by this machine's memory, and does not know that of a Ray cluster's. Raises ConfigError.
    """
    if config.executor == "ray":
        return lambda members: ""
    max_model_len = config.max_model_len or model.max_model_len
    memory = share_memory(config, model, local_space(config), max_model_len=max_model_len)
    room_bytes = weight_room_bytes(rank=memory.plan, cache_bytes=memory.cache_bytes, free_bytes=memory.free_bytes)
    return SurvivorCheck(model, config.layout, resolve_dtype(config, model), room_bytes)


def rank_init(config: ReplicaConfig, model: ModelConfig, space: RankSpace, *, max_model_len: int) -> Init:
    """That of the replica's first rank. Raises ConfigError."""
    layout, dtype = config.layout, resolve_dtype(config, model)
    memory = share_memory(config, model, space, max_model_len=max_model_len)
    logger.info(
        "memory planned device=%s dtype=%s ranks=%d weights_gib=%.2f reserve_gib=%.2f kv_cache_gib=%.2f kv_tokens=%d",
        space.device,
        dtype,
        layout.attn_tp,
        memory.plan.weight_bytes / GIB,
        memory.plan.reserve_bytes / GIB,
        memory.cache_bytes / GIB,
        memory.cache_bytes // memory.plan.kv_bytes_per_token,
    )
    degrees = asdict(layout)
    del degrees["nnodes"]
    return Init(
        model=str(config.model.absolute()),  # a rank elsewhere has another working directory
        dtype=dtype,
        device=space.device,
        num_threads=space.num_threads,
        block_size=config.block_size,
        kv_cache_bytes=memory.cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        rank=config.dp_rank * layout.attn_tp,
        peer_host=own_address(config.master_addr) if layout.nnodes > 1 else LOOPBACK,
        # Of a peer that is gone the clock knows, and has the collective ended, long before. Not earlier, since a first
        # forward may compile for as long as a start may take.
        collective_timeout_s=max(config.startup_timeout_s, STALLED_DEADLINES * config.progress_deadline_s),
        **degrees,
    )
