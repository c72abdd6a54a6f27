"""How many bytes the KV cache gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replica.cache_size import GIB, free_memory_bytes, kv_cache_bytes, resolve_device, weight_room_bytes
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.layout import Layout
from replica.plan import RankPlan

CONFIG = ReplicaConfig(model=Path("m"), max_num_seqs=4)
TOKEN_BYTES = 1024


def rank_of(*, loaded_bytes: int, reserve_bytes: int = 0) -> RankPlan:
    return RankPlan(
        rank=0,
        dp_rank=0,
        weights={"experts": loaded_bytes},
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=TOKEN_BYTES,
        kv_tokens=0,
    )


def size(config: ReplicaConfig, *, loaded_bytes: int = 0, reserve_bytes: int = 0, free_bytes: int = 100 * GIB) -> int:
    rank = rank_of(loaded_bytes=loaded_bytes, reserve_bytes=reserve_bytes)
    return kv_cache_bytes(config, rank=rank, max_model_len=100, free_bytes=free_bytes)


def test_a_cache_holds_every_sequence_at_its_longest_in_whole_blocks() -> None:
    assert size(CONFIG) == 4 * 112 * TOKEN_BYTES


def test_a_cache_leaves_a_share_of_the_memory_that_the_weights_leave() -> None:
    wide = replace(CONFIG, max_num_seqs=10**9)
    assert size(wide, loaded_bytes=6 * GIB, free_bytes=16 * GIB) == 7 * GIB


def test_what_is_asked_for_is_given_exactly() -> None:
    assert size(replace(CONFIG, kv_cache_gb=1.5)) == 3 * GIB // 2


def test_more_than_there_is_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-gb is 12, but of 16\.0 GiB .* the weights take 6\.0: ask"):
        size(replace(CONFIG, kv_cache_gb=12), loaded_bytes=6 * GIB, free_bytes=16 * GIB)


def test_weights_that_fill_the_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"of 16\.0 GiB free memory of a rank the weights take 17\.0: no room"):
        size(CONFIG, loaded_bytes=17 * GIB, free_bytes=16 * GIB)


def test_ranks_share_this_machines_memory() -> None:
    alone = free_memory_bytes(replace(CONFIG, device="cpu"))
    shared = free_memory_bytes(replace(CONFIG, device="cpu", layout=Layout.resolve(tp=4)))
    assert alone > 0 and 3 < alone / shared < 5  # others take some meanwhile


def test_a_replicas_devices_follow_those_of_the_replicas_before_it() -> None:
    config = replace(CONFIG, device="cuda", layout=Layout.resolve(dp=2, tp=8))
    assert [resolve_device(replace(config, dp_rank=dp_rank)) for dp_rank in (0, 1)] == ["cuda:0", "cuda:4"]


def test_more_than_any_number_of_bytes_is_refused_as_any_other() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-gb is 1e\+308, but of 16\.0 GiB"):
        size(replace(CONFIG, kv_cache_gb=1e308), free_bytes=16 * GIB)


def test_room_for_the_weights_of_lost_replicas_is_kept_before_the_cache_is_sized() -> None:
    wide = replace(CONFIG, max_num_seqs=10**9)
    assert size(wide, loaded_bytes=4 * GIB, reserve_bytes=2 * GIB, free_bytes=16 * GIB) == 7 * GIB
    with pytest.raises(ConfigError, match=r"the weights take 4\.0 and 2\.0 is kept for those of lost replicas"):
        size(replace(CONFIG, kv_cache_gb=10.5), loaded_bytes=4 * GIB, reserve_bytes=2 * GIB, free_bytes=16 * GIB)


def test_weights_may_come_to_what_was_kept_for_them_and_to_what_the_cache_leaves() -> None:
    rank = rank_of(loaded_bytes=4 * GIB, reserve_bytes=2 * GIB)
    asked = [weight_room_bytes(rank=rank, cache_bytes=cache * GIB, free_bytes=16 * GIB) for cache in (10, 7, 1)]
    assert asked == [6 * GIB, 6 * GIB, 12 * GIB]
