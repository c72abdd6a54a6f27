"""How many bytes the KV cache gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replica.cache_size import GIB, free_memory_bytes, kv_cache_bytes, weight_bytes
from replica.checkpoint import Checkpoint
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.model_config import ModelConfig
from tests.commands import DEMO_MODEL

CONFIG = ReplicaConfig(model=Path("m"), max_num_seqs=4)
MODEL = ModelConfig.load(DEMO_MODEL)
TOKEN_BYTES = MODEL.kv_bytes_per_token("bfloat16")


def size(config: ReplicaConfig, *, loaded_bytes: int = 0, free_bytes: int = 100 * GIB) -> int:
    return kv_cache_bytes(
        config, model=MODEL, dtype="bfloat16", max_model_len=100, loaded_bytes=loaded_bytes, free_bytes=free_bytes
    )


def test_a_cache_holds_every_sequence_at_its_longest_in_whole_blocks() -> None:
    assert size(CONFIG) == 4 * 112 * TOKEN_BYTES


def test_a_cache_leaves_a_share_of_the_memory_that_the_weights_leave() -> None:
    wide = replace(CONFIG, max_num_seqs=10**9)
    assert size(wide, loaded_bytes=6 * GIB, free_bytes=16 * GIB) == 7 * GIB


def test_what_is_asked_for_is_given_exactly() -> None:
    assert size(replace(CONFIG, kv_cache_gb=1.5)) == 3 * GIB // 2


def test_more_than_there_is_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-gb is 12, but of 16\.0 GiB free memory the weights take 6\.0"):
        size(replace(CONFIG, kv_cache_gb=12), loaded_bytes=6 * GIB, free_bytes=16 * GIB)


def test_weights_that_fill_the_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes 16\.0 GiB, free memory is 16\.0 GiB"):
        size(CONFIG, loaded_bytes=16 * GIB, free_bytes=16 * GIB)


def test_weights_are_counted_in_the_dtype_they_run_in() -> None:
    checkpoint = Checkpoint.open(DEMO_MODEL)
    stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert weight_bytes(checkpoint, "float32") == 2 * weight_bytes(checkpoint, "bfloat16") == 2 * stored


def test_this_machine_has_memory() -> None:
    assert free_memory_bytes("cpu") > 0
