"""Runs steps on the ranks of one replica, wherever they are: executor_mp.py starts them here, executor_ray.py on Ray.

Ranks that share weights with others are connected with them by `regroup`, after the start and again whenever the
group's members change: each worker gives a blob, `exchange` turns the blobs of this replica's ranks into those of the
whole group, and each worker gets them all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeVar

from replica.errors import CollectiveFailed, WorkerFailed, first_error
from replica.frames import (
    Blob,
    Blobs,
    Connected,
    Frame,
    Init,
    Progress,
    Ready,
    Regroup,
    Shutdown,
    StepInput,
    StepOutput,
    encode,
)
from replica.rank_board import RankBoard
from replica.rank_link import RankLink

logger = logging.getLogger(__name__)

SHUTDOWN_S: Final = 3.0  # a worker that was asked to exit is killed after so long
KILLED_S: Final = 3.0  # one that was killed is given up after so long

T = TypeVar("T")
Exchange = Callable[[tuple[bytes, ...]], Awaitable[tuple[bytes, ...]]]


class RankHost(Protocol):
    """Where the ranks of one replica are started."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    @property
    def board(self) -> RankBoard:
        """What the ranks show without frames, and what they are shown."""

    def start(self, init: Init) -> AsyncIterator[RankLink]:
        """Starts all, sends each its Init and yields it, in order of rank. `init` is that of the first rank.

        Whoever gets a link must see to its end. Raises WorkerFailed when a rank does not come up.
        """

    async def close(self) -> None:
        """Ends whatever is left. May be called again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """What it took to connect the ranks with those of an epoch's members."""

    rebuild_s: float  # all but `reload_s`; the other replicas' part of the exchange is in it
    reload_s: float  # of the slowest rank, to read what lost replicas held
    weight_bytes: int  # the most on any rank, with that


class RankExecutor:
    """The ranks of one replica. `close` must be called, whatever happened before."""

    def __init__(self, host: RankHost) -> None:
        self.num_ranks = host.num_ranks
        self._host = host
        self._ranks: list[RankLink] = []

    async def start(
        self,
        init: Init,
        *,
        timeout_s: float,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Ready:
        """Starts the workers, and waits until all have loaded. Where there are several, `regroup` must follow.

        `init` is that of the replica's first rank; the others' follow from it. `on_progress` gets the first rank's.
        Returns the first rank's answer, with the fewest blocks and the most bytes and seconds of any rank. Raises
        WorkerFailed when one dies or is not ready in time, and CheckpointError when it refuses the checkpoint.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async for rank in self._host.start(init):
                    self._ranks.append(rank)
                reports = [on_progress, *[lambda _: None] * (self.num_ranks - 1)]
                answers = await _all(worker.loaded(report) for worker, report in zip(self._ranks, reports, strict=True))
        except TimeoutError as err:
            raise WorkerFailed(f"the workers were not ready after {timeout_s:g} s (--startup-timeout-s)") from err
        return Ready(
            num_blocks=min(answer.num_blocks for answer in answers),
            weight_bytes=max(answer.weight_bytes for answer in answers),
            load_s=max(answer.load_s for answer in answers),
        )

    async def regroup(
        self,
        *,
        epoch: int,
        members: tuple[int, ...],
        evicted: tuple[tuple[int, ...], ...],
        exchange: Exchange,
        timeout_s: float,
    ) -> Regrouped:
        """Cuts off whatever the ranks are doing, and connects them with those of the members of a new epoch.

        `members` are the replicas that live (dp ranks); `evicted` names those of each eviction, in order, since the
        group was whole: the ranks take over their share of what those held. `exchange` gets the blobs of this
        replica's ranks and returns those of all living ranks, in order. May be cancelled, and called again for a newer
        epoch. Raises WorkerFailed when a rank dies or is not ready in time, CollectiveFailed when one does not reach
        its peers, and what `exchange` raises; after the last two, another call may follow.
        """
        started_s = time.monotonic()
        self._host.board.epoch = epoch
        for worker in self._ranks:
            worker.process.release()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_all(Regroup(epoch=epoch, members=members, evicted=evicted))
                blobs = await _all(worker.regrouped(Blob, epoch) for worker in self._ranks)
                peers = await exchange(tuple(answer.blob for answer in blobs))
                await self._send_all(Blobs(epoch=epoch, blobs=peers))
                answers = await _all(worker.regrouped(Connected, epoch) for worker in self._ranks)
        except TimeoutError as err:
            raise WorkerFailed(f"the ranks were not connected after {timeout_s:g} s (--startup-timeout-s)") from err
        reload_s = max(answer.reload_s for answer in answers)
        return Regrouped(
            rebuild_s=time.monotonic() - started_s - reload_s,
            reload_s=reload_s,
            weight_bytes=max(answer.weight_bytes for answer in answers),
        )

    async def step(self, step_input: StepInput, on_sent: Callable[[], None] = lambda: None) -> StepOutput:
        """Runs one forward on all ranks and returns, when all have done it, what rank 0 sampled.

        `on_sent` is called when all ranks have their frame: what is done then takes no time of the step. Raises
        WorkerFailed, and CollectiveFailed when none has died but a collective failed, as it does when a peer is gone.
        After that or a cancellation only `regroup` and `close` may follow, after WorkerFailed only `close`.
        """
        await self._send_all(step_input)
        on_sent()
        # All at once: one that fails must be heard, although another one may be waiting for it in a collective.
        try:
            output, *_ = await _all(worker.stepped(step_input.step) for worker in self._ranks)
        except CollectiveFailed:
            for worker in self._ranks:
                if (how := worker.process.end) is not None:
                    raise worker.ended(how) from None
            raise
        assert isinstance(output, StepOutput)  # `stepped` has looked
        return output

    def collectives_entered(self) -> tuple[int, ...]:
        """For each rank, how many collectives of its epoch it has entered. May be called from any thread."""
        return self._host.board.counts

    def is_alive(self) -> bool:
        """Whether every worker's process runs: one that is stopped is noticed within a second. From any thread."""
        return self._host.board.is_alive()

    async def watch(self, rank: int) -> NoReturn:
        """Waits until the rank's process ends and raises WorkerFailed: parked or not, that is noticed at once."""
        worker = self._ranks[rank]
        raise worker.ended(await worker.process.wait())

    async def failed(self) -> NoReturn:
        """As `watch`, of all ranks at once."""
        await asyncio.gather(*(self.watch(rank) for rank in range(self.num_ranks)))
        raise AssertionError("no watch returns")

    def kill(self) -> None:
        """Ends every worker at once, whatever it is doing."""
        for worker in self._ranks:
            worker.process.kill()

    async def close(self) -> None:
        """Asks every worker to exit, and kills those that do not within SHUTDOWN_S."""
        for worker in self._ranks:
            worker.write(encode(Shutdown()))
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                for worker in self._ranks:
                    await worker.process.wait()
        for worker in self._ranks:
            if worker.process.end is None:
                logger.warning("worker does not exit, killing it rank=%d %s", worker.rank, worker.process)
                worker.process.kill()
                with suppress(TimeoutError):  # it may be out of reach; what it holds of this replica is of no use
                    async with asyncio.timeout(KILLED_S):
                        await worker.process.wait()
            worker.writer.close()
            worker.process.close()
        self._ranks.clear()
        await self._host.close()

    async def _send_all(self, frame: Frame) -> None:
        """Sends a frame to every rank, also when this is cancelled."""
        encoded = encode(frame)
        for worker in self._ranks:
            worker.write(encoded)
        for worker in self._ranks:
            await worker.sent()


async def _all(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error ends the others' waits."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(awaitable) for awaitable in awaitables]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in running]
