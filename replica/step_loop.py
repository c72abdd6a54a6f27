"""The step loop: schedule -> arrive -> released -> run on the ranks -> commit -> done -> publish. One path.

What runs is what the clock releases: this replica's tokens, or a step without any because another replica of its group
has work. There is no early return: every released step is one forward of every rank (step_clock.py).

A group agrees on a step while the step before it runs: each replica arrives as soon as its ranks have their frames,
with what it can schedule ahead of the tokens that they sample (`Scheduler.schedule_ahead`).

A replica without work stands arrived with no tokens; then the loop parks in `released` and costs no CPU. A request that
comes meanwhile replaces the arrival. What a step sampled is published on the event loop's thread and only after the
scheduler has committed it.

When the members of the group change, whatever the loop waits for is cut off: the batch of the step that ran is not
committed and will be scheduled again, the ranks are connected with those of the members that live, and steps go on from
0 of the new epoch. Sequences, their blocks and what is in them stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

import numpy as np

from replica.batch import Batch
from replica.constraints import MaskFiller
from replica.errors import CollectiveFailed, GroupLost, Unavailable, WorkerFailed, first_error
from replica.frames import I32, StepInput, StepOutput
from replica.group_state import GroupPhase, GroupState
from replica.request import FinishReason, Sequence, TokenOutput
from replica.roster import SchedulerCounts
from replica.scheduler import Scheduler
from replica.step_clock import STOP, Reconfiguration, StepClock, StepRelease

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S: Final = 0.05
STALLED_DEADLINES: Final = 3  # progress deadlines after which a step that is not done counts as a frozen worker

Exchange = Callable[[tuple[bytes, ...]], Awaitable[tuple[bytes, ...]]]


class Regrouped(Protocol):
    """How long the ranks took to come together."""

    @property
    def reload_s(self) -> float:
        """To read what lost ranks held."""

    @property
    def rebuild_s(self) -> float:
        """All else."""


class Executor(Protocol):
    """Runs a step on every rank."""

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        """What the step sampled. Calls `on_sent` while the ranks run it. Raises WorkerFailed, CollectiveFailed.

        After a CollectiveFailed, or when it was cancelled, `regroup` must come next.
        """

    async def regroup(
        self,
        *,
        epoch: int,
        members: tuple[int, ...],
        evicted: tuple[tuple[int, ...], ...],
        exchange: Exchange,
        timeout_s: float,
    ) -> Regrouped:
        """Cuts off what the ranks do and connects them with those of `members`, which take over what `evicted` held.

        May be cancelled and called again. Raises WorkerFailed, CollectiveFailed when a rank does not reach a peer, and
        what `exchange` raises.
        """

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
    prefill_skew_tokens: int = 0  # that the replica with the longest prefill of each step had more; all steps together
    group: GroupState = field(default_factory=GroupState)
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)


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
        self._startup_timeout_s = startup_timeout_s
        # A first forward may compile for long; `warm_up` ends with this.
        self._step_deadline_s = startup_timeout_s
        self._now_s = now_s
        self._masks = MaskFiller()
        self._step = 0
        self._idle_steps = 0
        self._barrier_wait_s = 0.0
        self._forward_s = 0.0
        self._prefill_skew_tokens = 0
        self._last_progress_s = self._arrived_s = now_s()
        self._has_arrived = False  # for the next step
        self._is_idle = False  # with no tokens
        self._is_stepping = False  # the ranks run a step
        self._is_closed = False
        self._wanted: dict[str, None] = {}  # commands that were asked for here
        self._commands: set[str] = set()  # that releases have carried
        self._commanded = asyncio.Event()
        self.group = GroupState(
            phase=GroupPhase.FORMING, members=() if clock.is_shared else (0,), is_looking=lambda: clock.is_looking
        )
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
            epoch=self.group.epoch,
            idle_steps=self._idle_steps,
            barrier_wait_s=self._barrier_wait_s,
            forward_s=self._forward_s,
            prefill_skew_tokens=self._prefill_skew_tokens,
            group=self.group,
            counts=scheduler.counts,
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
        self._wanted[command] = None
        self._clock.want(command)

    async def commanded(self, command: str) -> None:
        """Waits until a release has carried the command."""
        await self.commanded_by_all(lambda _: command)

    async def commanded_by_all(self, command_of: Callable[[int], str]) -> None:
        """Waits until releases have carried the command of every replica, by its dp rank, that lives."""
        while not self._commands.issuperset(map(command_of, self.group.members)):
            self._commanded.clear()
            await self._commanded.wait()

    async def warm_up(self, sequences: list[Sequence]) -> None:
        """Waits until these have been served, while `run` runs: no client's request is to be the first."""
        self._add(sequences)
        for sequence in sequences:
            async for _ in sequence.stream:
                pass  # what a warm-up says is of no interest
        self._step_deadline_s = STALLED_DEADLINES * self._progress_deadline_s + self._clock.takeover_s

    async def run(self, first: Reconfiguration | None = None) -> None:
        """Runs steps, epoch after epoch, until one carries STOP. Several ranks are connected for the `first`.

        Raises WorkerFailed when a rank fails, GroupLost when the group does, or goes on without this replica; every
        sequence then ends so that another replica can go on.
        """
        error = "the replica stopped before the answer was complete"
        if first is not None:
            self.group.forming(first)
        else:
            self.group.phase = GroupPhase.RUNNING  # a replica alone has nobody to wait for
        try:
            await self._run_watched(first)
        except (WorkerFailed, GroupLost) as err:
            self._clock.leave()  # the others need not wait for a deadline
            self.group.phase = GroupPhase.LOST
            error = str(err)
            raise
        finally:
            self._is_closed = True
            for sequence in self._scheduler.end_all(FinishReason.LOST):
                sequence.stream.put(TokenOutput((), FinishReason.LOST, error))

    async def _run_watched(self, begin: Reconfiguration | None) -> None:
        """Runs all epochs, and notices at once, whatever they wait for, when a rank or the group fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._executor.failed()), tasks.create_task(self._clock.failed())]
                while STOP not in self._commands:
                    begin = await self._run_epoch(tasks, begin)
                for watch in watches:
                    watch.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _run_epoch(self, tasks: asyncio.TaskGroup, begin: Reconfiguration | None) -> Reconfiguration | None:
        """Steps until the last step, or until the next epoch begins, which cuts off whatever runs and is returned."""
        stepping = tasks.create_task(self._step_on(begin))
        superseded = tasks.create_task(self._clock.superseded())
        await asyncio.wait({stepping, superseded}, return_when=asyncio.FIRST_COMPLETED)
        if stepping.done():
            superseded.cancel()
            return None
        while not stepping.done():
            # Again and again: before Python 3.13 a TaskGroup loses a cancellation that comes together with a failure.
            stepping.cancel()
            await asyncio.wait({stepping}, timeout=CANCEL_AGAIN_S)
        # What arrived for the old epoch counts for nothing, and nothing may arrive before the new one has begun.
        self._has_arrived = self._is_idle = self._is_stepping = False
        change = await self._clock.reconfigured()
        self.group.changed(change)
        self._notify()
        return change

    async def _step_on(self, begin: Reconfiguration | None) -> None:
        if begin is not None:
            await self._regroup(begin)
        while STOP not in self._commands:
            await self._run_step()

    async def _regroup(self, begin: Reconfiguration) -> None:
        """Connects the ranks with those of the new epoch's members. What was cut off will be scheduled again."""
        try:
            regrouped = await self._executor.regroup(
                epoch=begin.epoch,
                members=begin.members,
                evicted=begin.evicted,
                exchange=self._clock.exchange,
                timeout_s=self._startup_timeout_s,
            )
        except CollectiveFailed as err:
            await self._await_verdict(0, err)
        self._scheduler.rollback()  # not before: only now it is certain that no rank writes the batch's blocks
        self.group.connected(rebuild_s=regrouped.rebuild_s, reload_s=regrouped.reload_s)
        for command in self._wanted:  # the release that carried one may have been cut off at another replica
            self._clock.want(command)
        self._commanded.set()  # who waits for the commands of all waits for fewer now
        self._notify()

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
        # With no tokens, perhaps, for want of the room that the step before it has given back since.
        if not self._has_arrived or (self._is_idle and self._scheduler.has_work):
            self._arrive()
        release = await self._clock.released()
        self._has_arrived = self._is_idle = False
        arrived_s, released_s = self._arrived_s, self._now_s()
        self._scheduler.others_decode = sum(release.decode_tokens) > release.decode_tokens[self._dp_rank]
        batch = self._scheduler.start(
            decode_tokens=release.decode_tokens[self._dp_rank], prefill_tokens=release.prefill_tokens[self._dp_rank]
        )
        self._is_stepping = True
        output = await self._run_on_ranks(batch, release)
        self._is_stepping = False
        outputs = self._scheduler.commit(batch, output.token_ids, output.logprobs)
        self._clock.done(release.step)
        self._count_step(batch, release, waited_s=released_s - max(began_s, arrived_s), released_s=released_s)
        if self.group.awaits_first_step:
            self.group.stepped(self._last_progress_s - (arrived_s if batch.sequences else released_s))
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
        for sequence, reason, error in await self._masks.fill(batch.sampled):
            if self._scheduler.abort(sequence):
                sequence.stream.put(TokenOutput((), reason, error))
        step_input = self._scheduler.step_input(batch, step=release.step, group_tokens=_group_tokens(release))
        is_followed = self._clock.is_shared and STOP not in release.commands
        try:
            async with asyncio.timeout(self._step_deadline_s):
                output = await self._executor.step(step_input, self._arrive if is_followed else _nothing)
        except TimeoutError as err:
            raise WorkerFailed(f"step {release.step} was not done after {self._step_deadline_s:g} s") from err
        except CollectiveFailed as err:
            await self._await_verdict(release.step, err)
        if output.step != release.step or len(output.token_ids) != len(step_input.sample_rows):
            raise WorkerFailed(
                f"the worker answered step {release.step}, {len(step_input.sample_rows)} tokens, "
                f"with step {output.step}, {len(output.token_ids)} tokens"
            )
        return output

    async def _await_verdict(self, step: int, error: CollectiveFailed) -> NoReturn:
        """A peer is gone, or this replica's connection with it: who, the clock says. Its verdict cuts this off."""
        self.group.suspended()
        self._notify()
        self._clock.fault(step, str(error))
        await asyncio.sleep(self._step_deadline_s)
        raise GroupLost(f"no verdict came within {self._step_deadline_s:g} s: {error}") from error

    def _count_step(self, batch: Batch, release: StepRelease, *, waited_s: float, released_s: float) -> None:
        self._step += 1
        self._last_progress_s = self._now_s()
        self._forward_s += self._last_progress_s - released_s
        self._prefill_skew_tokens += max(release.prefill_tokens) - release.prefill_tokens[self._dp_rank]
        if batch.sequences:
            self._barrier_wait_s += waited_s
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
