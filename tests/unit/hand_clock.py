"""A group's clock without a network, for tests of the step loop: the rules of coordinator/clock.py, called directly."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NoReturn

from coordinator.clock import Clock, Commit, Expel, Output, Phase
from coordinator.messages import (
    Arrive,
    ClockMessage,
    Done,
    Evicted,
    Failed,
    Fault,
    Go,
    Hello,
    MemberMessage,
    Ready,
    Reconfigure,
    Release,
)
from replica.errors import GroupLost
from replica.group_clock import for_all_replicas, reconfiguration
from replica.step_clock import Reconfiguration
from tests.clock_driver import make_settings


class HandGroup:
    """A clock of `size` members that have all said Hello. Messages take no time; `now_s` is by hand."""

    def __init__(self, size: int, *, prefill_delay_s: float = 0.0) -> None:
        self.now_s = 0.0
        settings = make_settings(size, config={}, prefill_delay_s=prefill_delay_s)
        self.clock = Clock(settings, self.now_s, epoch=1, members=tuple(range(size)))
        self.releases: list[Release] = []
        self.members = [HandMember(self, dp_rank) for dp_rank in range(size)]
        for dp_rank in range(size):
            name = f"r{dp_rank}"
            hello = Hello(group="g", replica_id=name, incarnation=name, dp_rank=dp_rank, config={}, url="")
            self.deliver(self.clock.hello(hello, self.now_s))

    def send(self, dp_rank: int, message: MemberMessage) -> None:
        """A member's message reaches the clock, and what that causes all members."""
        self.deliver(self.clock.receive(dp_rank, message, self.now_s))

    def deliver(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if isinstance(output, Commit):
                self.deliver(self.clock.committed(output.epoch, self.now_s))
            elif isinstance(output, Expel):
                self.members[output.dp_rank].take(output.message)
            else:
                if isinstance(output, Release):
                    self.releases.append(for_all_replicas(output, self.clock.members, len(self.members)))
                for dp_rank in self.clock.members:
                    self.members[dp_rank].take(output)

    def lose(self, dp_rank: int) -> None:
        """A member's connection ends: it hears nothing any more."""
        self.members[dp_rank].is_gone = True
        self.deliver(self.clock.lost(dp_rank, "its connection ended (EOF)", self.now_s))

    def release(self, epoch: int, step: int) -> Release:
        """The one of this step."""
        return next(release for release in reversed(self.releases) if (release.epoch, release.step) == (epoch, step))

    @property
    def is_parked(self) -> bool:
        return self.clock.phase is Phase.RUNNING and self.clock.is_parked


class HandMember:
    """A StepClock, as replica/group_clock.py is one."""

    def __init__(self, group: HandGroup, dp_rank: int) -> None:
        self.is_shared = True
        self.is_looking = False
        self.takeover_s = 0.0
        self.arrivals: list[tuple[int, int]] = []  # all of them
        self.faults: list[str] = []
        self.is_gone = False
        self._group = group
        self._dp_rank = dp_rank
        self._epoch = 1  # that steps run in
        self._change: Reconfigure | None = None  # the newest
        self._go: Go | None = None
        self._step = 0
        self._arrival: tuple[int, int] | None = None
        self._wants: dict[str, None] = {}
        self._releases: deque[Release] = deque()
        self._reason = ""
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def first(self) -> Reconfiguration:
        """How the group began."""
        return Reconfiguration(epoch=1, members=tuple(range(len(self._group.members))))

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        self._arrival = (decode_tokens, prefill_tokens)
        self.arrivals.append(self._arrival)
        self._send_arrival()

    def want(self, command: str) -> None:
        self._wants[command] = None
        if self._arrival is not None:
            self._send_arrival()

    async def released(self) -> Release:
        assert self._arrival is not None, "arrive first"
        while not self._releases or self._is_superseded:
            await self._changed()
        release = self._releases.popleft()
        assert release.step == self._step
        self._step += 1
        self._arrival = None
        for command in release.commands:
            self._wants.pop(command, None)
        return for_all_replicas(release, self._group.clock.members, len(self._group.members))

    def done(self, step: int) -> None:
        self._group.send(self._dp_rank, Done(epoch=self._epoch, step=step))

    def fault(self, step: int, what: str) -> None:
        self.faults.append(what)
        self._group.send(self._dp_rank, Fault(epoch=self._epoch, step=step, what=what))

    async def superseded(self) -> None:
        while not self._is_superseded:
            await self._changed()

    async def reconfigured(self) -> Reconfiguration:
        assert self._change is not None and self._is_superseded
        self._epoch, self._go, self._step, self._arrival = self._change.epoch, None, 0, None
        self._releases.clear()
        return reconfiguration(self._change)

    async def exchange(self, blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        self._group.send(self._dp_rank, Ready(epoch=self._epoch, blob=b"".join(blobs)))
        while self._go is None:
            await self._changed()
        return self._go.blobs

    async def failed(self) -> NoReturn:
        while True:
            await self._changed()

    def leave(self) -> None:
        self._group.lose(self._dp_rank)

    def take(self, message: ClockMessage) -> None:
        if self.is_gone:
            return
        match message:
            case Release():
                self._releases.append(message)
            case Reconfigure():
                self._change = message
            case Go():
                self._go = message
            case Evicted() | Failed():
                self._reason = message.reason
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    @property
    def _is_superseded(self) -> bool:
        return self._change is not None and self._change.epoch > self._epoch

    async def _changed(self) -> None:
        if not self._reason:
            self._waiters.append(asyncio.get_running_loop().create_future())
            await self._waiters[-1]
        if self._reason:
            raise GroupLost(self._reason)

    def _send_arrival(self) -> None:
        decode_tokens, prefill_tokens = self._arrival or (0, 0)
        self._group.send(
            self._dp_rank,
            Arrive(
                epoch=self._epoch,
                step=self._step,
                decode_tokens=decode_tokens,
                prefill_tokens=prefill_tokens,
                wants=tuple(self._wants),
            ),
        )
