"""A group of two replicas of two ranks: their executors, their real workers, and no engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from replica.errors import WorkerFailed
from replica.executor_mp import MpExecutor
from replica.frames import Init, Ready, StepInput, StepOutput
from tests.step_driver import BLOCK_SIZE, Driven, StepDriver, make_frame

DEMO_MODEL: Final = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
STARTUP_S: Final = 60.0
DEADLINE_S: Final = 30.0
TIMEOUT_S: Final = 5.0
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
    collective_timeout_s=TIMEOUT_S,
)


class Group:
    """Both replicas' executors, and the exchange of blobs that the clock will be."""

    def __init__(self) -> None:
        self.executors = [MpExecutor(num_ranks=2) for _ in range(INIT.dp)]
        self.blobs: list[asyncio.Future[tuple[bytes, ...]]] = []

    async def start(self) -> list[Ready]:
        self.blobs = [asyncio.get_running_loop().create_future() for _ in self.executors]
        return await asyncio.gather(*map(self._start, range(INIT.dp)))

    async def _start(self, dp_rank: int) -> Ready:
        async def exchange(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
            self.blobs[dp_rank].set_result(blobs)
            return tuple(blob for blobs in await asyncio.gather(*self.blobs) for blob in blobs)

        init = replace(INIT, rank=dp_rank * INIT.attn_tp)
        return await self.executors[dp_rank].start(init, timeout_s=STARTUP_S, exchange=exchange)

    async def step(self, *frames: StepInput) -> list[StepOutput]:
        tokens = np.array([len(frame.token_ids) for frame in frames], np.int32)
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(
                *(
                    executor.step(replace(frame, group_tokens=tokens))
                    for executor, frame in zip(self.executors, frames, strict=True)
                )
            )

    async def close(self) -> None:
        await asyncio.gather(*(executor.close() for executor in self.executors))


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group()
    try:
        yield group
    finally:
        await group.close()


EMPTY: Final = make_frame([], {}, [])


@contextmanager
def one_rank() -> Iterator[tuple[StepDriver, Driven]]:
    """What a rank alone makes of the prompt."""
    driver = StepDriver(DEMO_MODEL)
    s = driver.add(PROMPT)
    driver.generate(s, 3)
    yield driver, s


async def test_two_replicas_of_two_ranks_take_steps_together(group: Group) -> None:
    ready = await group.start()
    assert [answer.num_blocks for answer in ready] == [20, 20]
    for _ in range(2):  # steps in which nobody has work, too
        outputs = await group.step(EMPTY, EMPTY)
        assert [len(output.token_ids) for output in outputs] == [0, 0]
    with one_rank() as (_, expected):
        s = Driven(list(PROMPT), len(PROMPT))
        free = list(range(20))
        while len(s.output_ids) < 3:  # replica 1 has no work, and takes part
            chunks = {s: len(s.token_ids) - s.num_computed}
            _, output = await group.step(EMPTY, make_frame([s], chunks, free))
            s.num_computed += chunks[s]
            s.token_ids.append(int(output.token_ids[-1]))
        assert s.output_ids == expected.output_ids
    entered = [count for executor in group.executors for count in executor.collectives_entered()]
    assert len(entered) == 4 and len(set(entered)) == 1 and entered[0] > 0


async def test_a_step_of_other_tokens_than_were_agreed_is_refused_before_any_collective(group: Group) -> None:
    await group.start()
    wrong = replace(make_frame([s := Driven(list(PROMPT), 8)], {s: 8}, [0]), group_tokens=np.array([3, 0], np.int32))
    with pytest.raises(WorkerFailed, match=r"step 0 of replica 0 has 8 tokens, its group agreed on \[3, 0\]"):
        await group.executors[0].step(wrong)
    assert group.executors[0].collectives_entered() == (0, 0)


async def test_a_rank_that_is_killed_ends_its_peers_step_with_an_error(group: Group) -> None:
    await group.start()
    os.kill(group.executors[0]._ranks[1].process.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(
            *(executor.step(replace(EMPTY, group_tokens=np.zeros(2, np.int32))) for executor in group.executors),
            return_exceptions=True,
        )
    assert all(isinstance(result, WorkerFailed) for result in results)
    # What its replica hears first is its end, or the error of its peer's collective.
    assert "rank 1 ended: killed by SIGKILL" in str(results[0]) or "rank 0 failed" in str(results[0])
