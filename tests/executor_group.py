"""A group of replicas without engines: their executors, their real workers, and the exchange that the clock has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from replica.errors import first_error
from replica.executor import Exchange, RankExecutor, Regrouped
from replica.executor_mp import LocalRanks
from replica.frames import Init, Ready, StepInput, StepOutput

STARTUP_S = 120.0  # a loaded machine starts torch in many seconds
DEADLINE_S = 30.0


@dataclass
class _Epoch:
    """Who has given its blobs, and where those of all will be."""

    members: tuple[int, ...]
    blobs: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)


class ExecutorGroup:
    """The executors of all replicas of `init`'s layout, by dp rank, of which `members` live."""

    def __init__(self, init: Init) -> None:
        self.init = init
        self.executors = [RankExecutor(LocalRanks(init.attn_tp)) for _ in range(init.dp)]
        self.members = tuple(range(init.dp))
        self.evicted: tuple[tuple[int, ...], ...] = ()
        self.epoch = 0
        self.left_waiting: set[int] = set()  # replicas that give their blobs and never get the others'
        self._epochs: dict[int, _Epoch] = {}

    async def start(self) -> list[Ready]:
        """Starts all replicas and connects them."""

        async def start(dp_rank: int) -> Ready:
            init = replace(self.init, rank=dp_rank * self.init.attn_tp)
            ready = await self.executors[dp_rank].start(init, timeout_s=STARTUP_S)
            await self.regroup_one(dp_rank)
            return ready

        return await asyncio.gather(*map(start, self.members))

    def pid(self, dp_rank: int, local_rank: int = 0) -> int:
        """That of a rank's worker."""
        return self.executors[dp_rank]._ranks[local_rank].process.pid

    def begin_epoch(self, lost: Collection[int] = ()) -> None:
        """The next epoch: without these replicas, evicted together."""
        self.epoch += 1
        self.members = tuple(dp_rank for dp_rank in self.members if dp_rank not in lost)
        if lost:
            self.evicted = (*self.evicted, tuple(sorted(lost)))

    async def regroup(self, lost: Collection[int] = ()) -> list[Regrouped]:
        """Evicts replicas together, if any, and connects the others anew."""
        self.begin_epoch(lost)
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*map(self.regroup_one, self.members))

    async def regroup_one(self, dp_rank: int) -> Regrouped:
        """One replica's way into the epoch."""
        return await self.executors[dp_rank].regroup(
            epoch=self.epoch,
            members=self.members,
            evicted=self.evicted,
            exchange=self.exchange(dp_rank),
            timeout_s=DEADLINE_S,
        )

    def exchange(self, dp_rank: int) -> Exchange:
        """Waits until all members of the epoch have given their blobs."""
        epoch = self._epochs.setdefault(self.epoch, _Epoch(self.members))

        async def exchange(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
            epoch.blobs[dp_rank] = blobs
            if len(epoch.blobs) == len(epoch.members):
                epoch.is_complete.set()
            await epoch.is_complete.wait()
            if dp_rank in self.left_waiting:
                await asyncio.Event().wait()
            return tuple(blob for member in epoch.members for blob in epoch.blobs[member])

        return exchange

    async def step(self, frames: dict[int, StepInput]) -> dict[int, StepOutput]:
        """One step of all members, by dp rank. The first error cuts off the others' steps and is raised."""
        agreed = self.agreed(frames)
        try:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                steps = {member: tasks.create_task(self.executors[member].step(agreed[member])) for member in frames}
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return {member: step.result() for member, step in steps.items()}

    def agreed(self, frames: dict[int, StepInput]) -> dict[int, StepInput]:
        """The frames with the counts of all replicas in them; 0 for those that were lost."""
        tokens = np.zeros(self.init.dp, np.int32)
        for member, frame in frames.items():
            tokens[member] = len(frame.token_ids)
        return {member: replace(frame, group_tokens=tokens) for member, frame in frames.items()}

    async def close(self) -> None:
        """Ends every worker."""
        for executor in self.executors:
            executor.kill()
        await asyncio.gather(*(executor.close() for executor in self.executors))
