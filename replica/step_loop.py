"""The step loop: schedule -> arrive -> released -> run on the ranks -> commit -> done -> publish. One path.

What runs is what the clock releases: this replica's tokens, or a step without any because another replica of its group
has work. There is no early return: every released step is one forward of every rank (step_clock.py).

A group agrees on a step while the step before it runs: each replica arrives as soon as its ranks have their frames,
with what it can schedule ahead of the tokens that they sample (`Scheduler.schedule_ahead`).

A replica without work stands arrived with no tokens; then the loop parks in `released` and costs no CPU. A request that
comes meanwhile replaces the arrival. What a step sampled is published on the event loop's thread and only after the
scheduler has committed it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import numpy as np

from replica.batch import Batch
from replica.constraints import MaskFiller
from replica.errors import GroupLost, Unavailable, WorkerFailed, first_error
from replica.frames import I32, StepInput, StepOutput
from replica.request import FinishReason, Sequence, TokenOutput
from replica.scheduler import Scheduler
from replica.step_clock import STOP, StepClock, StepRelease

logger = logging.getLogger(__name__)

STALLED_DEADLINES: Final = 3  # progress deadlines after which a step that is not done counts as a frozen worker


class Executor(Protocol):
    """Runs a step on every rank."""

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        """What the step sampled. Calls `on_sent` while the ranks run it. Raises WorkerFailed."""

    async def failed(self) -> NoReturn:
        """Waits until a rank's process has ended, and raises WorkerFailed."""


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
    idle_steps: int = 0  # of these, without tokens of this replica
    barrier_wait_s: float = 0.0  # of steps with work of its own: waited for the release; all steps together
    forward_s: float = 0.0  # from each release to the ranks' answer; all steps together


class StepLoop:
    """Owns the Scheduler. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        clock: StepClock,
        dp_rank: int = 0,
        max_waiting: int,
        progress_deadline_s: float,
        startup_timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._dp_rank = dp_rank
        self._max_waiting = max_waiting
        self._progress_deadline_s = progress_deadline_s
        # A first forward may compile for long; `warm_up` ends with this.
        self._step_deadline_s = startup_timeout_s
        self._now_s = now_s
        self._masks = MaskFiller()
        self._step = 0
        self._idle_steps = 0
        self._barrier_wait_s = 0.0
        self._forward_s = 0.0
        self._last_progress_s = self._arrived_s = now_s()
        self._has_arrived = False  # for the next step
        self._is_idle = False  # with no tokens
        self._is_stepping = False  # the ranks run a step
        self._is_closed = False
        self._commands: set[str] = set()  # that releases have carried
        self._commanded = asyncio.Event()
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
        self._add(sequences)

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
            epoch=self._clock.epoch,
            idle_steps=self._idle_steps,
            barrier_wait_s=self._barrier_wait_s,
            forward_s=self._forward_s,
        )

    def is_progressing(self) -> bool:
        """False when there is work and no step has ended for the progress deadline."""
        return not self._scheduler.has_work or self._now_s() - self._last_progress_s < self._progress_deadline_s

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever the load has changed. Returns what ends the subscription."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def want(self, command: str) -> None:
        """Asks the group to act on a command, all at the same step."""
        self._clock.want(command)

    async def commanded(self, *commands: str) -> None:
        """Waits until releases have carried all of these."""
        while not self._commands.issuperset(commands):
            self._commanded.clear()
            await self._commanded.wait()

    async def warm_up(self, sequences: list[Sequence]) -> None:
        """Waits until these have been served, while `run` runs: no client's request is to be the first."""
        self._add(sequences)
        for sequence in sequences:
            async for _ in sequence.stream:
                pass  # what a warm-up says is of no interest
        self._step_deadline_s = STALLED_DEADLINES * self._progress_deadline_s

    async def run(self) -> None:
        """Runs steps until one carries STOP. When a rank or the group fails, it ends every sequence with that error
        and raises it: WorkerFailed or GroupLost."""
        error = "the replica stopped before the answer was complete"
        try:
            await self._run_watched()
        except WorkerFailed as err:
            verdict = await self._clock.verdict(self._step, err)
            error = str(verdict)
            raise verdict from err
        except GroupLost as err:
            error = str(err)
            raise
        finally:
            self._is_closed = True
            for sequence in self._scheduler.end_all(FinishReason.ERROR):
                sequence.stream.put(TokenOutput((), FinishReason.ERROR, error))

    async def _run_watched(self) -> None:
        """Runs steps, and notices at once, whatever they wait for, when a rank or the group fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._executor.failed()), tasks.create_task(self._clock.failed())]
                while STOP not in self._commands:
                    await self._run_step()
                for watch in watches:
                    watch.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def _add(self, sequences: list[Sequence]) -> None:
        if not self._scheduler.has_work:
            self._last_progress_s = self._now_s()  # an idle time is no stall
        for sequence in sequences:
            self._scheduler.add(sequence)
        if self._is_idle:
            self._arrive()
        self._notify()

    async def _run_step(self) -> None:
        began_s = self._now_s()
        if not self._has_arrived:
            self._arrive()
        release = await self._clock.released()
        self._has_arrived = self._is_idle = False
        released_s = self._now_s()
        wait_s = released_s - max(began_s, self._arrived_s)
        batch = self._scheduler.start(
            decode_tokens=release.decode_tokens[self._dp_rank], prefill_tokens=release.prefill_tokens[self._dp_rank]
        )
        self._is_stepping = True
        output = await self._run_on_ranks(batch, release)
        self._is_stepping = False
        outputs = self._scheduler.commit(batch, output.token_ids, output.logprobs)
        self._clock.done(release.step)
        self._count_step(batch, wait_s=wait_s, released_s=released_s)
        for sequence, token_output in outputs:
            sequence.stream.put(token_output)
        if release.commands:
            self._commands.update(release.commands)
            self._commanded.set()
        self._notify()

    def _arrive(self) -> None:
        """Schedules, and stands ready with that, unless what can run depends on the step that does."""
        batch = self._scheduler.schedule_ahead() if self._is_stepping else self._scheduler.schedule()
        if batch is None:
            return
        self._has_arrived = True
        self._is_idle = not batch.sequences
        self._arrived_s = self._now_s()
        self._clock.arrive(decode_tokens=batch.decode_tokens, prefill_tokens=batch.prefill_tokens)

    async def _run_on_ranks(self, batch: Batch, release: StepRelease) -> StepOutput:
        for sequence in batch.sequences[batch.num_decodes :]:
            sequence.started_s = sequence.started_s or self._now_s()
        for sequence, error in await self._masks.fill(batch.sampled):
            if self._scheduler.abort(sequence):
                sequence.stream.put(TokenOutput((), FinishReason.ERROR, error))
        step_input = self._scheduler.step_input(batch, step=release.step, group_tokens=_group_tokens(release))
        is_followed = self._clock.is_shared and STOP not in release.commands
        try:
            async with asyncio.timeout(self._step_deadline_s):
                output = await self._executor.step(step_input, self._arrive if is_followed else _nothing)
        except TimeoutError as err:
            raise WorkerFailed(f"step {release.step} was not done after {self._step_deadline_s:g} s") from err
        if output.step != release.step or len(output.token_ids) != len(step_input.sample_rows):
            raise WorkerFailed(
                f"the worker answered step {release.step}, {len(step_input.sample_rows)} tokens, "
                f"with step {output.step}, {len(output.token_ids)} tokens"
            )
        return output

    def _count_step(self, batch: Batch, *, wait_s: float, released_s: float) -> None:
        self._step += 1
        self._last_progress_s = self._now_s()
        self._forward_s += self._last_progress_s - released_s
        if batch.sequences:
            self._barrier_wait_s += wait_s
        else:
            self._idle_steps += 1

    def _notify(self) -> None:
        for callback in self._subscribers:
            callback()


def _nothing() -> None:
    """What is to be done while a step runs that nobody has to agree on the next of."""


def _group_tokens(release: StepRelease) -> I32:
    """What a worker needs to know of the others: nothing, if there are none."""
    is_alone = len(release.tokens) == 1
    return np.array(() if is_alone else release.tokens, np.int32)
