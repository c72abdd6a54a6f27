"""A group of two replicas of two ranks: their executors, their real workers, and no engines."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from replica.errors import CollectiveFailed, WorkerFailed
from replica.frames import Init
from tests.executor_group import ExecutorGroup
from tests.step_driver import BLOCK_SIZE, Driven, StepDriver, make_frame

DEMO_MODEL: Final = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
PROMPT: Final = [3, 1, 4, 1, 5, 9, 2, 6]
INIT: Final = Init(
    model=str(DEMO_MODEL),
    dtype="float32",
    device="cpu",
    num_threads=1,
    block_size=BLOCK_SIZE,
    kv_cache_bytes=2 * 4 * 1 * 32 * 4 * BLOCK_SIZE * 20,  # 20 blocks of this rank's one KV head
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    dp=2,
    attn_tp=2,
    mlp_tp=4,
    moe_tp=2,
    ep=2,
    collective_timeout_s=5.0,
)
EMPTY: Final = make_frame([], {}, [])


@pytest.fixture
async def group() -> AsyncIterator[ExecutorGroup]:
    group = ExecutorGroup(INIT)
    try:
        yield group
    finally:
        await group.close()


def one_rank() -> list[int]:
    """What a rank alone makes of the prompt."""
    driver = StepDriver(DEMO_MODEL)
    s = driver.add(PROMPT)
    driver.generate(s, 3)
    return s.output_ids


async def test_two_replicas_of_two_ranks_take_steps_together(group: ExecutorGroup) -> None:
    ready = await group.start()
    assert [answer.num_blocks for answer in ready] == [20, 20]
    for _ in range(2):  # steps in which nobody has work, too
        outputs = await group.step({0: EMPTY, 1: EMPTY})
        assert [len(output.token_ids) for output in outputs.values()] == [0, 0]
    s = Driven(list(PROMPT), len(PROMPT))
    free = list(range(20))
    while len(s.output_ids) < 3:  # replica 0 has no work, and takes part
        chunks = {s: len(s.token_ids) - s.num_computed}
        outputs = await group.step({0: EMPTY, 1: make_frame([s], chunks, free)})
        s.num_computed += chunks[s]
        s.token_ids.append(int(outputs[1].token_ids[-1]))
    assert s.output_ids == one_rank()
    entered = [count for executor in group.executors for count in executor.collectives_entered()]
    assert len(entered) == 4 and len(set(entered)) == 1 and entered[0] > 0


async def test_a_step_of_other_tokens_than_were_agreed_is_refused_before_any_collective(group: ExecutorGroup) -> None:
    await group.start()
    wrong = replace(make_frame([s := Driven(list(PROMPT), 8)], {s: 8}, [0]), group_tokens=np.array([3, 0], np.int32))
    with pytest.raises(WorkerFailed, match=r"step 0 of replica 0 has 8 tokens, its group agreed on \[3, 0\]"):
        await group.executors[0].step(wrong)
    assert group.executors[0].collectives_entered() == (0, 0)


async def test_a_rank_that_is_killed_fails_its_own_replica_and_its_peers_collectives(group: ExecutorGroup) -> None:
    await group.start()
    os.kill(group.pid(0, 1), signal.SIGKILL)
    s = Driven(list(PROMPT), len(PROMPT))
    frames = group.agreed({0: EMPTY, 1: make_frame([s], {s: 8}, [0])})
    with pytest.raises(CollectiveFailed, match=r"did not finish step 0 with its peers: rank [01] is gone"):
        await group.executors[1].step(frames[1])
    with pytest.raises(WorkerFailed, match="rank 1 ended: killed by SIGKILL"):
        await group.executors[0].step(frames[0])
    with pytest.raises(WorkerFailed, match="rank 1 ended: killed by SIGKILL"):
        await group.executors[0].failed()
