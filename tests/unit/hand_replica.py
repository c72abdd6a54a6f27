"""Members of a group for tests of the step loop: real schedulers and rules of the clock, without ranks or network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

from replica.frames import StepInput, StepOutput
from replica.request import SamplingParams, Sequence
from replica.scheduler import Scheduler
from replica.step_loop import Exchange, StepLoop
from tests.unit.hand_clock import HandGroup
from tests.unit.hand_executor import HandExecutor, HandRegrouped

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
        self.dp_rank = dp_rank
        self.executor = executor
        self.clock = group.members[dp_rank]
        scheduler = Scheduler(
            max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, max_prefill_tokens=8
        )
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
        self.steps: list[int] = []  # all epochs
        self._epoch = 1
        self._group, self._dp_rank = group, dp_rank
        self._random = random.Random(seed)

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        release = self._group.release(self._epoch, step_input.step)
        assert step_input.group_tokens.tolist() == list(release.tokens)
        assert len(step_input.token_ids) == release.tokens[self._dp_rank], "exactly the released counts"
        assert step_input.num_decodes == release.decode_tokens[self._dp_rank]
        self.steps.append(step_input.step)
        if self._random.random() < 0.9:
            on_sent()
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)
        return StepOutput(step=step_input.step, token_ids=100 + step_input.output_indices)

    async def regroup(
        self,
        *,
        epoch: int,
        members: tuple[int, ...],
        evicted: tuple[tuple[int, ...], ...],
        exchange: Exchange,
        timeout_s: float,
    ) -> HandRegrouped:
        for _ in range(self._random.randrange(5)):
            await asyncio.sleep(0)
        await exchange((b"",))
        self._epoch = epoch
        return HandRegrouped()

    async def failed(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@asynccontextmanager
async def running(replicas: list[Replica]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(replica.loop.run(replica.clock.first)) for replica in replicas]
    await settle()
    for replica in replicas:
        if isinstance(replica.executor, HandExecutor):
            assert replica.executor.regroups.get_nowait() == (1, tuple(range(len(replicas))), ())
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def hand(replica: Replica) -> HandExecutor:
    assert isinstance(replica.executor, HandExecutor)
    return replica.executor


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
        inputs.append(hand(replica).started.get_nowait())
        hand(replica).ends.put_nowait(None)
    await settle()
    return inputs


def make_sequence(num_prompt: int = 3, max_tokens: int = 2, stop_token_ids: frozenset[int] = frozenset()) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1, stop_token_ids=stop_token_ids)
    return Sequence(request_id="r", choice=0, prompt_ids=[1] * num_prompt, params=params)
