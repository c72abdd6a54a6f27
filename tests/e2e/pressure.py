"""A step loop over the demo model itself, in the test's own process, without HTTP: for tests that fill its cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from replica.frames import StepInput, StepOutput
from replica.layout import Layout
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler
from replica.step_clock import LocalClock
from replica.step_loop import StepLoop
from tests.commands import DEMO_MODEL
from tests.model_replica import ModelExecutor
from tests.step_driver import BLOCK_SIZE, RankModel


@dataclass(frozen=True, slots=True)
class Forward:
    """One that has been run."""

    num_decodes: int
    num_prompt_tokens: int
    took_s: float


class RecordingExecutor(ModelExecutor):
    """Also remembers the forwards."""

    def __init__(self, rank: RankModel) -> None:
        super().__init__(rank)
        self.forwards: list[Forward] = []

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        began_s = time.monotonic()
        output = await super().step(step_input, on_sent)
        num_decodes = step_input.num_decodes
        took_s = time.monotonic() - began_s
        self.forwards.append(Forward(num_decodes, len(step_input.token_ids) - num_decodes, took_s))
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What matters under pressure."""

    num_blocks: int
    max_num_seqs: int = 256  # the cache is the limit
    max_num_batched_tokens: int = 512
    max_prefill_tokens: int = 128
    has_prefix_cache: bool = True
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class PressedLoop:
    """A running one."""

    loop: StepLoop
    scheduler: Scheduler
    executor: RecordingExecutor

    async def until_step(self, step: int) -> None:
        """Waits until so many steps are done, or nothing is left to do."""
        changed = asyncio.Event()
        unsubscribe = self.loop.subscribe(changed.set)
        try:
            while self.loop.stats().step < step and self.loop.num_unfinished:
                changed.clear()
                await changed.wait()
        finally:
            unsubscribe()


@asynccontextmanager
async def pressed_loop(settings: Settings) -> AsyncIterator[PressedLoop]:
    """A loop over the demo model in float32. At its end nothing may be left in scheduler or cache."""
    rank = RankModel(DEMO_MODEL, Layout(), 0, num_blocks=settings.num_blocks)
    scheduler = Scheduler(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=rank.config.max_model_len,
        block_size=BLOCK_SIZE,
        max_prefill_tokens=settings.max_prefill_tokens,
        has_prefix_cache=settings.has_prefix_cache,
    )
    clock = LocalClock()
    clock.is_shared = settings.overlaps
    executor = RecordingExecutor(rank)
    loop = StepLoop(
        scheduler=scheduler,
        executor=executor,
        clock=clock,
        max_waiting=10_000,
        progress_deadline_s=60.0,
        startup_timeout_s=60.0,
    )
    loop.add_blocks(settings.num_blocks)
    running = asyncio.create_task(loop.run())
    try:
        pressed = PressedLoop(loop, scheduler, executor)
        yield pressed
        await pressed.until_step(loop.stats().step + 2)  # of a sequence that has ended, the last one may be ahead
        assert not running.done(), running.exception()
        assert not loop.num_unfinished and scheduler.pool.num_free == settings.num_blocks
        assert all(not scheduler.pool.num_users(block) for block in range(settings.num_blocks))
    finally:
        running.cancel()
        await asyncio.wait([running])


def make_sequence(prompt_ids: list[int], max_tokens: int) -> Sequence:
    """Greedy, and to its full length."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
    return Sequence(request_id="r", choice=0, prompt_ids=prompt_ids, params=params)


async def outputs_of(sequence: Sequence) -> tuple[list[int], FinishReason | None]:
    """All tokens, when the sequence has ended, and why it has."""
    outputs: list[TokenOutput] = [output async for output in sequence.stream]
    return [token_id for output in outputs for token_id in output.token_ids], outputs[-1].finish_reason
