"""Several step loops in lockstep: real schedulers and the real rules of the clock, without ranks or network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest

from coordinator import messages
from replica.errors import GroupLost, WorkerFailed
from replica.frames import StepInput, StepOutput
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler
from replica.step_clock import DRAIN, STOP
from replica.step_loop import StepLoop
from tests.unit.hand_clock import HandGroup
from tests.unit.hand_executor import HandExecutor

NUM_BLOCKS = 64


class Replica:
    """One member: its loop, over an executor that the test drives or over one that answers at once."""

    def __init__(
        self,
        group: HandGroup,
        dp_rank: int,
        executor: HandExecutor | QuickExecutor,
        *,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.executor = executor
        self.clock = group.members[dp_rank]
        scheduler = Scheduler(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4)
        self.loop = StepLoop(
            scheduler=scheduler,
            executor=executor,
            clock=self.clock,
            dp_rank=dp_rank,
            max_waiting=8,
            progress_deadline_s=10.0,
            startup_timeout_s=10.0,
        )
        self.loop.add_blocks(num_blocks)


class QuickExecutor:
    """Answers after some turns of the event loop. Holds every step against its release."""

    def __init__(self, group: HandGroup, dp_rank: int, seed: int) -> None:
        self.steps: list[int] = []
        self._group, self._dp_rank = group, dp_rank
        self._random = random.Random(seed)

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        release = self._group.releases[step_input.step]
        assert step_input.group_tokens.tolist() == list(release.tokens)
        assert len(step_input.token_ids) == release.tokens[self._dp_rank], "exactly the released counts"
        assert step_input.num_decodes == release.decode_tokens[self._dp_rank]
        self.steps.append(step_input.step)
        if self._random.random() < 0.9:
            on_sent()
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)
        return StepOutput(step=step_input.step, token_ids=100 + step_input.output_indices)

    async def failed(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@asynccontextmanager
async def running(replicas: list[Replica]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(replica.loop.run()) for replica in replicas]
    await settle()
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def by_hand(size: int, *, prefill_delay_s: float = 0.0) -> tuple[HandGroup, list[Replica]]:
    group = HandGroup(size, prefill_delay_s=prefill_delay_s)
    return group, [Replica(group, dp_rank, HandExecutor()) for dp_rank in range(size)]


async def end_step(replicas: list[Replica]) -> list[StepInput]:
    """All ranks of all members finish the step that runs."""
    inputs = []
    for replica in replicas:
        assert isinstance(replica.executor, HandExecutor)
        inputs.append(replica.executor.started.get_nowait())
        replica.executor.ends.put_nowait(None)
    await settle()
    return inputs


async def both_decode(group: HandGroup, replicas: list[Replica]) -> None:
    """Two members each have a sequence that decodes, and a step runs."""
    for replica in replicas:
        replica.loop.submit([make_sequence(max_tokens=20)])
    await settle()
    for _ in range(3):  # the first's prompt; its decode, which holds the second's prompt back; both
        group.now_s += 1.1
        await end_step(replicas)


def make_sequence(num_prompt: int = 3, max_tokens: int = 2, stop_token_ids: frozenset[int] = frozenset()) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1, stop_token_ids=stop_token_ids)
    return Sequence(request_id="r", choice=0, prompt_ids=[1] * num_prompt, params=params)


async def test_a_member_without_work_runs_every_step_of_the_others_without_tokens() -> None:
    group, replicas = by_hand(3)
    async with running(replicas):
        assert group.is_parked and not group.releases
        replicas[1].loop.submit([make_sequence()])
        await settle()
        for tokens in ([0, 3, 0], [0, 1, 0]):
            inputs = await end_step(replicas)
            assert [len(step_input.token_ids) for step_input in inputs] == tokens
            assert all(step_input.group_tokens.tolist() == tokens for step_input in inputs)
        assert group.is_parked
        stats = [replica.loop.stats() for replica in replicas]
        assert [s.step for s in stats] == [2, 2, 2] and [s.idle_steps for s in stats] == [2, 0, 2]
        assert all(s.barrier_wait_s >= 0 and s.forward_s > 0 for s in stats) and stats[0].barrier_wait_s == 0


async def test_a_request_replaces_the_arrival_of_an_idle_member() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        assert replicas[0].clock.arrivals == [(0, 0)]
        replicas[0].loop.submit([make_sequence(5)])
        assert replicas[0].clock.arrivals == [(0, 0), (0, 5)]  # at once, whatever the loop's task is doing
        assert [release.tokens for release in group.releases] == [(5, 0)]
        await settle()
        await end_step(replicas)


async def test_an_arrival_that_came_too_late_to_be_replaced_runs_as_released() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        late = replicas[1].loop
        replicas[0].loop.submit([make_sequence()])  # releases a step with (3, 0), which member 1 has not taken yet
        sequence = make_sequence(7)
        late.submit([sequence])
        assert replicas[1].clock.arrivals == [(0, 0), (0, 7)]
        await settle()
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [3, 0]
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [1, 7]
        await end_step(replicas)
        assert sequence.output_ids == [100, 101]
    assert group.clock.step == 3


async def test_the_next_step_is_agreed_while_a_step_runs_and_a_sequence_that_ends_meanwhile_is_computed_once_more() -> (
    None
):
    group, replicas = by_hand(2)
    sequence = make_sequence(max_tokens=9, stop_token_ids=frozenset({101}))
    async with running(replicas):
        replicas[0].loop.submit([sequence])
        await settle()
        await end_step(replicas)
        assert len(group.releases) == 3  # the prompt, the decode that runs, and the next one
        await end_step(replicas)
        assert sequence.output_ids == [100, 101] and sequence.finish_reason is FinishReason.STOP
        assert sequence.block_ids  # a forward writes them
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [1, 0]
        assert sequence.output_ids == [100, 101] and not sequence.block_ids
        assert group.is_parked and replicas[0].loop.stats().free_blocks == NUM_BLOCKS


async def test_a_sequence_that_ends_by_length_takes_no_part_in_the_next_step() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        replicas[0].loop.submit([make_sequence(max_tokens=2)])
        await settle()
        await end_step(replicas)
        await end_step(replicas)
        assert group.is_parked and [release.tokens for release in group.releases] == [(3, 0), (1, 0)]


async def test_a_prompt_is_held_back_while_others_decode_and_its_decodes_run() -> None:
    group, replicas = by_hand(2, prefill_delay_s=1.0)
    async with running(replicas):
        await both_decode(group, replicas)
        replicas[0].loop.submit([make_sequence(6)])
        await end_step(replicas)  # was released before
        for _ in range(3):
            inputs = await end_step(replicas)
            assert [len(step_input.token_ids) for step_input in inputs] == [1, 1]
        group.now_s += 1.1
        for _ in range(2):
            await end_step(replicas)  # the one that runs, and the one that was agreed while it ran
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [7, 1]


async def test_a_prompt_that_is_held_back_and_aborted_frees_its_blocks() -> None:
    group, replicas = by_hand(2, prefill_delay_s=1.0)
    loop = replicas[0].loop
    async with running(replicas):
        await both_decode(group, replicas)
        num_released = len(group.releases)
        held = make_sequence(6)
        loop.submit([held])
        await end_step(replicas)
        assert len(held.block_ids) == 2
        loop.abort([held])  # while a step runs that has it not
        await end_step(replicas)
        assert (loop.stats().running, held.block_ids) == (1, [])
    assert all(release.prefill_tokens == (0, 0) for release in group.releases[num_released:])


async def test_one_members_rank_that_dies_ends_the_requests_of_all_with_its_name() -> None:
    _, replicas = by_hand(2)
    sequences = [make_sequence(), make_sequence()]
    async with running(replicas) as tasks:
        for replica, sequence in zip(replicas, sequences, strict=True):
            replica.loop.submit([sequence])
        await settle()
        executor = replicas[1].executor
        assert isinstance(executor, HandExecutor)
        executor.death.set_result(WorkerFailed("the worker of rank 0 ended: killed by SIGKILL", was_killed=True))
        for task in tasks:
            with pytest.raises(GroupLost, match=r"member 1 \(r1\) failed in step 0: .* killed by SIGKILL"):
                await task
    for sequence in sequences:
        output = sequence.stream.take()
        assert output is not None and output.finish_reason is FinishReason.ERROR
        assert "member 1 (r1) failed" in output.error and "SIGKILL" in output.error


async def test_a_lost_member_ends_a_parked_group() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        group.lose(1)
        with pytest.raises(GroupLost, match=r"member 1 \(r1\) was lost before step 0"):
            await tasks[0]


def test_the_replica_and_the_clock_have_one_word_for_the_last_step() -> None:
    assert STOP == messages.STOP


async def test_all_members_act_on_a_command_at_the_same_step_and_stop_together() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        told = [asyncio.create_task(replica.loop.commanded(DRAIN)) for replica in replicas]
        replicas[0].loop.want(DRAIN)
        await settle()
        await end_step(replicas)
        assert all(task.done() for task in told)
        replicas[1].loop.want(STOP)
        await settle()
        await end_step(replicas)
        await asyncio.gather(*tasks)
    assert [release.commands for release in group.releases] == [(DRAIN,), (STOP,)]


@pytest.mark.parametrize("seed", range(4))
async def test_members_that_are_idle_at_random_run_the_same_steps(seed: int) -> None:
    await soak(seed, num_steps=1500)


async def soak(seed: int, *, num_steps: int) -> None:
    """Requests come and go at random until so many steps are released. All members have then run the same steps, and
    every request that was not aborted has all of its tokens."""
    rng = random.Random(seed)
    group = HandGroup(rng.choice([2, 3, 4]), prefill_delay_s=0.01)
    num_blocks = rng.choice([24, NUM_BLOCKS])  # so few that some are preempted, or enough for all
    replicas = [
        Replica(group, r, QuickExecutor(group, r, seed + r), num_blocks=num_blocks) for r in range(len(group.members))
    ]
    open_: dict[Sequence, Replica] = {}
    async with running(replicas) as tasks:
        while len(group.releases) < num_steps:
            group.now_s += 0.001
            replica = rng.choice(replicas)
            if rng.random() < 0.3 and replica.loop.stats().waiting < 4:
                stop_token_ids = frozenset({100 + rng.randrange(40)})  # half of them end by themselves
                sequence = make_sequence(rng.randrange(1, 40), rng.randrange(1, 20), stop_token_ids)
                open_[sequence] = replica
                replica.loop.submit([sequence])
            elif rng.random() < 0.05 and open_:
                aborted = rng.choice(list(open_))
                open_.pop(aborted).loop.abort([aborted])
            for _ in range(rng.choice([0, 1, 1, 5, 50])):
                await asyncio.sleep(0)
            for task in tasks:
                assert not task.done(), task.result()
            for ended in [sequence for sequence in open_ if sequence.finish_reason is not None]:
                check_whole(ended)
                del open_[ended]
        while any(replica.loop.num_unfinished for replica in replicas):
            group.now_s += 0.001
            await asyncio.sleep(0)
        await settle()
        assert group.is_parked
        replicas[0].loop.want(STOP)
        await asyncio.gather(*tasks)
    for sequence in open_:
        check_whole(sequence)
    stats = [replica.loop.stats() for replica in replicas]
    assert {s.step for s in stats} == {group.clock.step} == {len(group.releases)}
    assert all(s.free_blocks == num_blocks for s in stats)
    assert all(replica_steps(replica) == list(range(len(group.releases))) for replica in replicas)
    assert all(0 < s.idle_steps < s.step for s in stats)


def replica_steps(replica: Replica) -> list[int]:
    assert isinstance(replica.executor, QuickExecutor)
    return replica.executor.steps


def check_whole(sequence: Sequence) -> None:
    (stop_token,) = sequence.params.stop_token_ids
    num_tokens = min(sequence.params.max_tokens, stop_token - 100 + 1)
    assert sequence.finish_reason is (FinishReason.STOP if stop_token < 100 + num_tokens else FinishReason.LENGTH)
    assert list(tokens_of(sequence)) == sequence.output_ids == list(range(100, 100 + num_tokens))


def tokens_of(sequence: Sequence) -> Iterator[int]:
    output = sequence.stream.take()
    assert isinstance(output, TokenOutput)
    yield from output.token_ids
