"""Ranks in processes, some of which die or stop inside a collective: the others let go, take over and go on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from replica.errors import CollectiveFailed, WorkerFailed
from replica.frames import Init, StepInput
from replica.model_config import ModelConfig
from replica.tensor_specs import tensor_specs
from tests.commands import wait_until
from tests.executor_group import ExecutorGroup
from tests.planned_bytes import weight_bytes_after
from tests.step_driver import BLOCK_SIZE, Driven, StepDriver, make_frame

DEMO_MODEL: Final = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
PROMPT: Final = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_OUTPUT: Final = 8
NUM_REGROUPS: Final = 200  # an hour's worth, and more
RELEASED_S: Final = 2.0  # on a loaded machine; a free one takes 20 ms
INIT: Final = Init(
    model=str(DEMO_MODEL),
    dtype="float32",
    device="cpu",
    num_threads=1,
    block_size=BLOCK_SIZE,
    kv_cache_bytes=2 * 4 * 2 * 32 * 4 * BLOCK_SIZE * 20,  # 20 blocks
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    dp=3,
    mlp_tp=3,
    moe_tp=3,
    collective_timeout_s=25.0,  # what ends within RELEASED_S was released
)
FOUR: Final = replace(INIT, dp=4, mlp_tp=4, moe_tp=2, ep=2)
PAIR: Final = replace(INIT, dp=2, mlp_tp=2, moe_tp=2)
EMPTY: Final = make_frame([], {}, [])


class Replica:
    """One sequence of one replica, and steps of the group in which nobody else has work."""

    def __init__(self, group: ExecutorGroup, dp_rank: int) -> None:
        self._group = group
        self._dp_rank = dp_rank
        self._free = list(range(20))
        self.sequence = Driven(list(PROMPT), len(PROMPT))

    def frames(self) -> dict[int, StepInput]:
        """What it computes next, and the others' nothing."""
        chunks = {self.sequence: len(self.sequence.token_ids) - self.sequence.num_computed}
        own = make_frame([self.sequence], chunks, self._free)
        return {member: EMPTY for member in self._group.members} | {self._dp_rank: own}

    async def step(self) -> None:
        """One step, which is committed when all have done it."""
        frames = self.frames()
        outputs = await self._group.step(frames)
        self.sequence.num_computed += len(frames[self._dp_rank].token_ids)
        self.sequence.token_ids.append(int(outputs[self._dp_rank].token_ids[-1]))

    async def finish(self) -> list[int]:
        """Steps until it has all its output, which is returned."""
        while len(self.sequence.output_ids) < NUM_OUTPUT:
            await self.step()
        return self.sequence.output_ids


async def started(init: Init) -> AsyncIterator[ExecutorGroup]:
    group = ExecutorGroup(init)
    try:
        await group.start()
        yield group
    finally:
        await group.close()


@pytest.fixture
async def three() -> AsyncIterator[ExecutorGroup]:
    async for group in started(INIT):
        yield group


@pytest.fixture
async def four() -> AsyncIterator[ExecutorGroup]:
    async for group in started(FOUR):
        yield group


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[ExecutorGroup]:
    async for group in started(PAIR):
        yield group


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What a rank alone makes of the prompt."""
    driver = StepDriver(DEMO_MODEL)
    s = driver.add(PROMPT)
    driver.generate(s, NUM_OUTPUT)
    return s.output_ids


async def entered(group: ExecutorGroup, *members: int) -> None:
    """Waits until these are in a collective of the step, and gives them time to be blocked there."""
    await asyncio.to_thread(
        wait_until,
        lambda: all(min(group.executors[member].collectives_entered()) for member in members),
        "a collective",
    )
    await asyncio.sleep(0.2)


def most_weight_bytes(init: Init, evicted: tuple[tuple[int, ...], ...]) -> int:
    """Of any living rank, as it is planned."""
    config = ModelConfig.load(DEMO_MODEL)
    specs = tensor_specs(config, init.dtype)
    after = weight_bytes_after(config, init.layout, specs, init.dtype, evicted)
    return max(sum(kinds.values()) for kinds in after.values())


async def test_survivors_of_a_kill_and_a_stop_inside_a_collective_go_on_with_the_tokens_of_one_rank(
    four: ExecutorGroup, expected: list[int]
) -> None:
    replica = Replica(four, 3)
    for _ in range(3):
        await replica.step()
    await four.regroup()  # so that the counts of the step are the first
    stopped, killed = 1, 2
    os.kill(four.pid(stopped), signal.SIGSTOP)
    step = asyncio.create_task(replica.step())
    await entered(four, 0, killed, 3)
    assert not step.done()  # all wait for the stopped one
    os.kill(four.pid(killed), signal.SIGKILL)
    with pytest.raises((WorkerFailed, CollectiveFailed)):
        await step
    began_s = time.monotonic()
    regrouped = await four.regroup((stopped, killed))
    assert time.monotonic() - began_s < RELEASED_S
    assert max(one.weight_bytes for one in regrouped) == most_weight_bytes(FOUR, ((stopped, killed),))
    await replica.step()
    os.kill(four.pid(stopped), signal.SIGCONT)  # it wakes in a collective of an epoch that is over
    assert await replica.finish() == expected


async def test_a_rank_that_only_waits_for_a_stopped_peer_is_released(three: ExecutorGroup, expected: list[int]) -> None:
    replica = Replica(three, 0)
    os.kill(three.pid(2), signal.SIGSTOP)
    step = asyncio.create_task(replica.step())
    await entered(three, 0, 1)
    step.cancel()
    await asyncio.wait({step})
    began_s = time.monotonic()
    await three.regroup((2,))
    assert time.monotonic() - began_s < RELEASED_S
    assert await replica.finish() == expected


async def test_a_replica_that_stops_while_the_others_connect_costs_another_epoch_and_no_deadline(
    three: ExecutorGroup, expected: list[int]
) -> None:
    """It has given its blobs, so that the others wait for its connections."""
    replica = Replica(three, 1)
    await replica.step()
    three.begin_epoch()
    three.left_waiting.add(2)
    regroups = [asyncio.create_task(three.regroup_one(member)) for member in three.members]
    await asyncio.wait(regroups, timeout=0.5)
    assert not all(task.done() for task in regroups[:2])  # whoever it had to dial waits
    os.kill(three.pid(2), signal.SIGSTOP)
    for task in regroups:
        task.cancel()
    await asyncio.wait(regroups)
    began_s = time.monotonic()
    await three.regroup((2,))
    assert time.monotonic() - began_s < RELEASED_S
    assert await replica.finish() == expected


async def test_replicas_lost_one_after_the_other_leave_one_that_holds_everything(
    three: ExecutorGroup, expected: list[int]
) -> None:
    replica = Replica(three, 1)
    await replica.step()
    os.kill(three.pid(0), signal.SIGKILL)
    three.begin_epoch((0,))
    cut_off = [asyncio.create_task(three.regroup_one(member)) for member in three.members]
    await asyncio.sleep(0.01)  # somewhere on the way
    os.kill(three.pid(2), signal.SIGKILL)
    for task in cut_off:
        task.cancel()
    await asyncio.wait(cut_off)
    (regrouped,) = await three.regroup((2,))
    assert regrouped.weight_bytes == most_weight_bytes(INIT, ((0,), (2,)))
    assert await replica.finish() == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_hundreds_of_epochs_leave_no_descriptor_thread_or_memory_behind(
    pair: ExecutorGroup, expected: list[int]
) -> None:
    for member in pair.members:  # first steps take memory for good
        assert await Replica(pair, member).finish() == expected
    replica = Replica(pair, 0)

    def used() -> list[tuple[int, int, int]]:
        """Descriptors, threads and MiB of each worker."""
        folders = [Path(f"/proc/{pair.pid(member)}") for member in pair.members]
        pages = [int((folder / "statm").read_text().split()[1]) for folder in folders]
        return [
            (len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())), resident // 256)
            for folder, resident in zip(folders, pages, strict=True)
        ]

    for _ in range(20):
        await pair.regroup()
    before = used()
    for epoch in range(NUM_REGROUPS):
        await pair.regroup()
        if epoch % 40 == 0:
            await replica.step()
    for (fds, threads, mib), (fds_after, threads_after, mib_after) in zip(before, used(), strict=True):
        assert fds_after <= fds and threads_after <= threads and mib_after <= mib + 4
    assert await replica.finish() == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_step_that_was_cut_off_is_computed_again_and_its_late_answers_are_dropped(
    pair: ExecutorGroup, expected: list[int]
) -> None:
    replica = Replica(pair, 1)
    while len(replica.sequence.output_ids) < NUM_OUTPUT:
        step = asyncio.create_task(replica.step())
        await asyncio.sleep(0.002 * len(replica.sequence.output_ids))  # before, in, or after the forward
        step.cancel()
        await asyncio.wait({step})
        await pair.regroup()
        await replica.step()
    assert replica.sequence.output_ids[:NUM_OUTPUT] == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_each_epoch_counts_its_collectives_from_0(pair: ExecutorGroup) -> None:
    frames = dict.fromkeys(pair.members, EMPTY)
    await pair.step(frames)
    in_one_step = {executor.collectives_entered() for executor in pair.executors}
    await pair.regroup()
    assert [executor.collectives_entered() for executor in pair.executors] == [(0,), (0,)]
    for _ in range(2):
        await pair.step(frames)
    assert len({executor.collectives_entered() for executor in pair.executors}) == 1
    assert pair.executors[0].collectives_entered()[0] > 0 and len(in_one_step) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_worker_is_not_alive_and_one_that_goes_on_is(pair: ExecutorGroup) -> None:
    executor = pair.executors[0]
    assert executor.is_alive()
    os.kill(pair.pid(0), signal.SIGSTOP)
    await asyncio.to_thread(wait_until, lambda: not executor.is_alive(), "the rank's silence", 3)
    assert pair.executors[1].is_alive()
    os.kill(pair.pid(0), signal.SIGCONT)
    await asyncio.to_thread(wait_until, executor.is_alive, "the rank's life", 3)
