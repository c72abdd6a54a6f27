"""KV blocks: every block is free, or used as often as it is counted. What is in them: test_prefix_cache.py."""

from __future__ import annotations

import pytest

from replica.block_pool import BlockPool
from replica.request import SamplingParams, Sequence


def make_sequence() -> Sequence:
    return Sequence(request_id="r", choice=0, prompt_ids=[1], params=SamplingParams(max_tokens=1, seed=0))


def make_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(block_size=4)
    pool.add_blocks(num_blocks)
    return pool


def test_a_pool_has_no_blocks_before_the_cache_exists() -> None:
    pool = BlockPool(block_size=4)
    assert (pool.num_blocks, pool.num_free) == (0, 0)


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = make_pool(5)
    first, second = make_sequence(), make_sequence()
    pool.allocate(first, 2)
    pool.allocate(second, 3)
    assert sorted(first.block_ids + second.block_ids) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.free(first)
    assert first.block_ids == [] and pool.num_free == 2
    pool.allocate(second, 2)
    assert sorted(second.block_ids) == [0, 1, 2, 3, 4]


def test_more_blocks_than_are_free_are_a_broken_invariant() -> None:
    pool = make_pool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(make_sequence(), 3)


def test_blocks_cannot_be_freed_twice() -> None:
    pool = make_pool(2)
    sequence = make_sequence()
    blocks = list(pool.allocate(sequence, 1))
    pool.free(sequence)
    sequence.block_ids = blocks
    with pytest.raises(AssertionError, match="nobody uses it"):
        pool.free(sequence)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_last_block_may_be_partly_empty(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(block_size=4).blocks_for(num_tokens) == num_blocks
