"""The step loop of a replica alone, over an executor that the test drives by hand. A group: test_group_steps.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from replica import step_clock
from replica.errors import CollectiveFailed, Unavailable, WorkerFailed
from replica.frames import StepInput, StepOutput
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler
from replica.step_clock import DRAIN, STOP, LocalClock
from replica.step_loop import StepLoop
from tests.unit.hand_executor import HandExecutor

NUM_BLOCKS = 32


class Bench:
    """A running loop, its executor, and a clock that the test moves."""

    def __init__(self, *, max_waiting: int = 8, progress_deadline_s: float = 10.0) -> None:
        self.executor = HandExecutor()
        self.now_s = 0.0
        scheduler = Scheduler(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4)
        self.loop = StepLoop(
            scheduler=scheduler,
            executor=self.executor,
            clock=LocalClock(),
            max_waiting=max_waiting,
            progress_deadline_s=progress_deadline_s,
            startup_timeout_s=progress_deadline_s,
            now_s=lambda: self.now_s,
        )
        self.loop.add_blocks(NUM_BLOCKS)

    async def end_step(self, error: Exception | None = None) -> StepInput:
        """Waits until a step runs, ends it, and lets the loop see it."""
        step_input = await self.executor.started.get()
        self.executor.ends.put_nowait(error)
        await settle()
        return step_input


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def commanded(loop: StepLoop, *commands: str) -> None:
    for command in commands:
        await loop.commanded(command)


def make_sequence(max_tokens: int = 3) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return Sequence(request_id="r", choice=0, prompt_ids=[1, 2, 3], params=params)


async def test_a_replica_alone_is_said_to_form_until_its_loop_runs() -> None:
    bench = Bench()
    assert bench.loop.group.to_json()["state"] == "forming"
    async with running(bench):
        await settle()
        assert bench.loop.group.to_json()["state"] == "running"


async def outputs_of(sequence: Sequence) -> list[TokenOutput]:
    async with asyncio.timeout(5):
        return [output async for output in sequence.stream]


async def test_tokens_are_published_after_their_step_and_not_before() -> None:
    bench = Bench()
    sequence = make_sequence()
    async with running(bench):
        bench.loop.submit([sequence])
        await settle()
        assert sequence.stream.take() is None
        await bench.end_step()
        assert sequence.stream.take() == TokenOutput((100,))
        await bench.end_step()
        await bench.end_step()
        assert await outputs_of(sequence) == [TokenOutput((101, 102), FinishReason.LENGTH)]
    stats = bench.loop.stats()
    assert (stats.step, stats.running, stats.waiting, stats.free_blocks) == (3, 0, 0, NUM_BLOCKS)


async def test_a_loop_without_work_runs_no_step_and_a_request_wakes_it() -> None:
    bench = Bench()
    async with running(bench):
        for _ in range(2):
            await settle()
            steps = bench.executor.num_steps
            await settle()
            assert bench.executor.num_steps == steps
            sequence = make_sequence(1)
            bench.loop.submit([sequence])
            await bench.end_step()
            assert sequence.finish_reason is FinishReason.LENGTH
    assert bench.executor.num_steps == 2


async def test_steps_are_numbered_one_by_one() -> None:
    bench = Bench()
    async with running(bench):
        bench.loop.submit([make_sequence(3)])
        assert [(await bench.end_step()).step for _ in range(3)] == [0, 1, 2]


async def test_an_abort_during_a_step_ends_the_stream_at_once_and_frees_with_the_step() -> None:
    bench = Bench()
    aborted, other = make_sequence(), make_sequence(1)
    async with running(bench):
        bench.loop.submit([aborted, other])
        await settle()
        bench.loop.abort([aborted])
        bench.loop.abort([aborted])
        assert await outputs_of(aborted) == [TokenOutput((), FinishReason.ABORT)]
        assert bench.loop.stats().free_blocks == NUM_BLOCKS - 2
        await bench.end_step()
        assert bench.loop.stats().free_blocks == NUM_BLOCKS
        assert aborted.stream.take() is None
        assert await outputs_of(other) == [TokenOutput((100,), FinishReason.LENGTH)]


async def test_a_failed_worker_ends_every_sequence_with_an_error_and_the_loop_raises() -> None:
    bench = Bench()
    sequences = [make_sequence() for _ in range(6)]  # four run, two wait
    async with running(bench) as task:
        bench.loop.submit(sequences)
        await bench.end_step(WorkerFailed("the worker of rank 0 ended: killed by SIGKILL"))
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            await task
    for sequence in sequences:
        (output,) = await outputs_of(sequence)
        assert output.finish_reason is FinishReason.LOST and "SIGKILL" in output.error
    assert bench.loop.stats().free_blocks == NUM_BLOCKS
    with pytest.raises(Unavailable, match="stopping"):
        bench.loop.submit([make_sequence()])


async def test_a_frozen_worker_fails_the_step_after_three_deadlines() -> None:
    bench = Bench(progress_deadline_s=0.05)
    sequence = make_sequence()
    async with running(bench) as task:
        warming = asyncio.create_task(bench.loop.warm_up([make_sequence(1)]))
        await bench.end_step()
        await warming
        bench.loop.submit([sequence])
        with pytest.raises(WorkerFailed, match=r"step 1 was not done after 0\.15 s"):
            await task
    (output,) = await outputs_of(sequence)
    assert output.finish_reason is FinishReason.LOST


async def test_a_first_step_has_the_time_of_a_start() -> None:
    bench = Bench(progress_deadline_s=0.2)  # and as much to start
    async with running(bench) as task:
        bench.loop.submit([make_sequence()])
        with pytest.raises(WorkerFailed, match=r"step 0 was not done after 0\.2 s"):
            await task


async def test_a_worker_that_dies_while_nothing_runs_ends_the_loop() -> None:
    bench = Bench()
    async with running(bench) as task:
        await settle()
        bench.executor.death.set_result(WorkerFailed("the worker of rank 1 ended: killed by SIGKILL"))
        with pytest.raises(WorkerFailed, match="rank 1 ended"):
            await task


async def test_a_worker_that_dies_during_a_step_is_named_to_the_clients() -> None:
    bench = Bench()
    sequence = make_sequence()
    async with running(bench) as task:
        bench.loop.submit([sequence])
        await bench.executor.started.get()
        bench.executor.death.set_result(WorkerFailed("the worker of rank 1 ended: killed by SIGKILL"))
        with pytest.raises(WorkerFailed, match="rank 1 ended"):
            await task
    (output,) = await outputs_of(sequence)
    assert "SIGKILL" in output.error


async def test_commands_are_acted_on_at_a_step_and_the_one_that_says_stop_is_the_last() -> None:
    bench = Bench()
    async with running(bench) as task:
        told = asyncio.create_task(commanded(bench.loop, DRAIN, "other"))
        bench.loop.want(DRAIN)
        await bench.end_step()  # without tokens: nobody has work
        assert not told.done()
        bench.loop.want("other")
        await bench.end_step()
        assert told.done()
        bench.loop.want(STOP)
        await bench.end_step()
        await task
    assert bench.executor.num_steps == 3
    with pytest.raises(Unavailable, match="stopping"):
        bench.loop.submit([make_sequence()])


@pytest.mark.parametrize(("step", "num_tokens"), [(7, 1), (0, 2)])
async def test_an_answer_to_another_step_fails_the_worker(step: int, num_tokens: int) -> None:
    bench = Bench()

    async def answer(*_: object) -> StepOutput:
        return StepOutput(step=step, token_ids=np.zeros(num_tokens, np.int32))

    bench.executor.step = answer  # type: ignore[method-assign]
    async with running(bench) as task:
        bench.loop.submit([make_sequence()])
        with pytest.raises(WorkerFailed, match=f"with step {step}, {num_tokens} tokens"):
            await task


async def test_a_cancelled_loop_leaves_no_stream_open() -> None:
    bench = Bench()
    sequence = make_sequence()
    async with running(bench) as task:
        bench.loop.submit([sequence])
        await settle()
        task.cancel()
        (output,) = await outputs_of(sequence)
    assert output.finish_reason is FinishReason.LOST and "stopped" in output.error


async def test_a_full_queue_refuses_all_of_a_request() -> None:
    bench = Bench(max_waiting=3)
    bench.loop.submit([make_sequence(), make_sequence()])
    with pytest.raises(Unavailable, match="--max-waiting"):
        bench.loop.submit([make_sequence(), make_sequence()])
    assert bench.loop.num_unfinished == 2


async def test_work_without_a_step_is_no_progress_and_idleness_is_not_a_stall() -> None:
    bench = Bench()
    async with running(bench):
        bench.now_s = 1000.0
        assert bench.loop.is_progressing()  # idle for long
        sequence = make_sequence(2)
        bench.loop.submit([sequence])
        assert bench.loop.is_progressing()
        bench.now_s += 9.9
        assert bench.loop.is_progressing()
        bench.now_s += 0.2
        assert not bench.loop.is_progressing()
        await bench.end_step()
        assert bench.loop.is_progressing()


async def test_subscribers_hear_of_every_change_of_load() -> None:
    bench = Bench()
    calls: list[int] = []
    unsubscribe = bench.loop.subscribe(lambda: calls.append(bench.loop.num_unfinished))
    async with running(bench):
        first, second = make_sequence(1), make_sequence(1)
        bench.loop.submit([first, second])
        bench.loop.abort([second])
        await bench.end_step()
        assert calls == [2, 1, 0]
        unsubscribe()
        bench.loop.submit([make_sequence(1)])
        await bench.end_step()
        assert calls == [2, 1, 0]


async def test_a_replica_alone_whose_rank_is_missed_by_another_ends_with_what_the_rank_died_of() -> None:
    bench = Bench()
    async with running(bench) as task:
        bench.loop.submit([make_sequence()])
        await bench.end_step(CollectiveFailed("rank 1 is gone"))
        assert not task.done(), "that its process has ended is seen a moment later"
        bench.executor.death.set_result(WorkerFailed("rank 1 was killed"))
        with pytest.raises(WorkerFailed, match="rank 1 was killed"):
            await task


async def test_a_replica_alone_whose_ranks_all_live_and_do_not_reach_each_other_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_clock, "FAULT_S", 0.01)
    bench = Bench()
    async with running(bench) as task:
        bench.loop.submit([make_sequence()])
        await bench.end_step(CollectiveFailed("connection reset"))
        with pytest.raises(WorkerFailed, match="the ranks do not reach each other: connection reset"):
            await task
