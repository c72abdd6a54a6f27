"""A group's clock without a network, for tests of the step loop: the rules of coordinator/clock.py, called directly."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NoReturn

from coordinator.clock import Clock, ClockSettings, Phase
from coordinator.messages import Arrive, ClockMessage, Done, Failed, Fault, Hello, MemberMessage, Ready, Release
from replica.errors import GroupLost, ReplicaError, WorkerFailed


class HandGroup:
    """A clock of `size` members that have all said that they are ready. Messages take no time; `now_s` is by hand."""

    def __init__(self, size: int, *, prefill_delay_s: float = 0.0) -> None:
        self.now_s = 0.0
        settings = ClockSettings(group="g", size=size, config={}, prefill_delay_s=prefill_delay_s)
        self.clock = Clock(settings, started_s=self.now_s)
        self.releases: list[Release] = []
        self.members = [HandMember(self, dp_rank) for dp_rank in range(size)]
        for dp_rank in range(size):
            name = f"r{dp_rank}"
            hello = Hello(group="g", replica_id=name, incarnation=name, dp_rank=dp_rank, config={}, url="")
            self.clock.hello(hello, self.now_s)
        for dp_rank in range(size):
            self.send(dp_rank, Ready(epoch=0, blob=b""))

    def send(self, dp_rank: int, message: MemberMessage) -> None:
        """A member's message reaches the clock, and what that causes all members."""
        self.deliver(self.clock.receive(dp_rank, message, self.now_s))

    def deliver(self, outputs: tuple[ClockMessage, ...]) -> None:
        for message in outputs:
            if isinstance(message, Release):
                self.releases.append(message)
            for member in self.members:
                member.take(message)

    def lose(self, dp_rank: int) -> None:
        """A member's connection ends."""
        self.deliver(self.clock.lost(dp_rank, "its connection ended (EOF)"))

    @property
    def is_parked(self) -> bool:
        return self.clock.phase is Phase.RUNNING and self.clock.is_parked


class HandMember:
    """A StepClock, as replica/group_clock.py is one."""

    def __init__(self, group: HandGroup, dp_rank: int) -> None:
        self.epoch = 0
        self.is_shared = True
        self.arrivals: list[tuple[int, int]] = []  # all of them
        self._group = group
        self._dp_rank = dp_rank
        self._step = 0
        self._arrival: tuple[int, int] | None = None
        self._wants: dict[str, None] = {}
        self._releases: deque[Release] = deque()
        self._reason = ""
        self._waiters: list[asyncio.Future[None]] = []

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
        while not self._releases:
            await self._change()
        release = self._releases.popleft()
        assert release.step == self._step
        self._step += 1
        self._arrival = None
        for command in release.commands:
            self._wants.pop(command, None)
        return release

    def done(self, step: int) -> None:
        self._group.send(self._dp_rank, Done(epoch=0, step=step))

    async def failed(self) -> NoReturn:
        while True:
            await self._change()

    async def verdict(self, step: int, error: WorkerFailed) -> ReplicaError:
        self._group.send(self._dp_rank, Fault(epoch=0, step=step, what=str(error)))
        return GroupLost(self._reason)

    def take(self, message: ClockMessage) -> None:
        if isinstance(message, Release):
            self._releases.append(message)
        elif isinstance(message, Failed):
            self._reason = message.reason
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _change(self) -> None:
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
                epoch=0,
                step=self._step,
                decode_tokens=decode_tokens,
                prefill_tokens=prefill_tokens,
                wants=tuple(self._wants),
            ),
        )
