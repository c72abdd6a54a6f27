"""The engine's step loop: schedule -> run on the ranks -> commit -> publish. One path, one step at a time.

The loop parks on an event while nobody has work; then it costs no CPU. What a step sampled is published on the event
loop's thread and only after the scheduler has committed it. `_run_step` is the one place where a step is executed:
what must be agreed about a step before it runs stands between its first two lines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from replica.errors import Unavailable, WorkerFailed
from replica.frames import StepInput, StepOutput
from replica.request import FinishReason, Sequence, TokenOutput
from replica.scheduler import Scheduler

logger = logging.getLogger(__name__)

STALLED_DEADLINES: Final = 3  # progress deadlines after which a step that is not done counts as a frozen worker


class Executor(Protocol):
    """Runs a step on every rank."""

    async def step(self, step_input: StepInput) -> StepOutput:
        """What the step sampled. Raises WorkerFailed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now."""

    running: int  # sequences in the batch
    waiting: int  # sequences not started
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    step: int  # steps done
    epoch: int


class StepLoop:
    """Owns the Scheduler. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        max_waiting: int,
        progress_deadline_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_waiting = max_waiting
        self._progress_deadline_s = progress_deadline_s
        self._now_s = now_s
        self._step = 0
        self._last_progress_s = now_s()
        self._wake = asyncio.Event()
        self._is_closed = False
        self._subscribers: list[Callable[[], None]] = []

    def add_blocks(self, num_blocks: int) -> None:
        """The worker has made its KV cache: from now on sequences can be submitted."""
        self._scheduler.pool.add_blocks(num_blocks)

    def max_tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """The most output tokens that the KV cache can hold after such a prompt; below 1 means that none does."""
        return self._scheduler.max_tokens_that_fit(num_prompt_tokens)

    def submit(self, sequences: list[Sequence]) -> None:
        """Takes all of the sequences, or none. Raises Unavailable if the queue is full or the loop has ended."""
        if self._is_closed:
            raise Unavailable("the replica is stopping")
        num_waiting = len(self._scheduler.waiting)
        if num_waiting + len(sequences) > self._max_waiting:
            raise Unavailable(
                f"{num_waiting} sequences wait and {len(sequences)} more are asked for, "
                f"limit is {self._max_waiting} (--max-waiting)"
            )
        if not self._scheduler.has_work:
            self._last_progress_s = self._now_s()  # an idle time is no stall
        for sequence in sequences:
            self._scheduler.add(sequence)
        self._wake.set()
        self._notify()

    def abort(self, sequences: list[Sequence]) -> None:
        """Ends the sequences that have not ended. Their slots and blocks are free after the running step."""
        aborted = [s for s in sequences if self._scheduler.abort(s)]
        for sequence in aborted:
            sequence.stream.put(TokenOutput((), FinishReason.ABORT))
        if aborted:
            self._notify()

    def abort_all(self) -> None:
        """Aborts everything that runs or waits."""
        self.abort([*self._scheduler.running, *self._scheduler.waiting])

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """The load now."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.num_blocks,
            step=self._step,
            epoch=0,
        )

    def is_progressing(self) -> bool:
        """False when there is work and no step has ended for the progress deadline."""
        return not self._scheduler.has_work or self._now_s() - self._last_progress_s < self._progress_deadline_s

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever the load has changed. Returns what ends the subscription."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def run(self) -> None:
        """Runs steps until cancelled. A worker's failure ends every sequence with an error and is raised."""
        error = "the replica stopped before the answer was complete"
        try:
            while True:
                while not self._scheduler.has_work:
                    self._wake.clear()
                    await self._wake.wait()
                await self._run_step()
        except WorkerFailed as err:
            error = str(err)
            raise
        finally:
            self._is_closed = True
            for sequence in self._scheduler.end_all(FinishReason.ERROR):
                sequence.stream.put(TokenOutput((), FinishReason.ERROR, error))

    async def _run_step(self) -> None:
        batch = self._scheduler.schedule()
        step_input = self._scheduler.step_input(batch, step=self._step)
        deadline_s = STALLED_DEADLINES * self._progress_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                output = await self._executor.step(step_input)
        except TimeoutError as err:
            raise WorkerFailed(f"step {self._step} was not done after {deadline_s:g} s") from err
        if output.step != self._step or len(output.token_ids) != len(step_input.sample_rows):
            raise WorkerFailed(
                f"the worker answered step {self._step}, {len(step_input.sample_rows)} tokens, "
                f"with step {output.step}, {len(output.token_ids)} tokens"
            )
        outputs = self._scheduler.commit(batch, output.token_ids)
        self._step += 1
        self._last_progress_s = self._now_s()
        for sequence, token_output in outputs:
            sequence.stream.put(token_output)
        self._notify()

    def _notify(self) -> None:
        for callback in self._subscribers:
            callback()
