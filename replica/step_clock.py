"""What tells a step loop when to run which step: the group's clock, or for a replica alone, LocalClock.

    clock.arrive(...)                  what the replica would run next; again, to replace it, until it is released
    release = await clock.released()   run exactly this
    clock.done(release.step)           all ranks have reported: the batch is committed

An arrival stands until it is released: that is how an idle replica waits. When the members of the group change, a new
epoch begins: `superseded` returns, whatever runs is cut off, `reconfigured` says what the epoch is like, the ranks are
connected anew with `exchange`, and steps are numbered from 0 again. The rules of the clock that several replicas share
are in coordinator/clock.py; `group_clock.py` is the way to it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from replica.errors import WorkerFailed

# Commands travel in releases, so that all replicas of a group act on them at the same step. The clock knows STOP.
DRAIN: Final = "drain"  # take no new requests, finish the running ones
STOP: Final = "stop"  # the step that carries it is the last

FAULT_S: Final = 2.0  # by then a rank that has died is known to have


class StepRelease(Protocol):
    """A released step. Every replica of the group runs one forward for it, with exactly its counts."""

    @property
    def step(self) -> int:
        """Its number within the epoch."""

    @property
    def decode_tokens(self) -> tuple[int, ...]:
        """Of each replica."""

    @property
    def prefill_tokens(self) -> tuple[int, ...]:
        """Of each replica; all 0 where prompts are held back."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Both together."""

    @property
    def commands(self) -> tuple[str, ...]:
        """What all act on at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """How a new epoch begins."""

    epoch: int
    members: tuple[int, ...]  # dp ranks that live, ascending
    evicted: tuple[tuple[int, ...], ...] = ()  # dp ranks, one entry an eviction, in their order from the first epoch on
    kinds: tuple[str, ...] = ()  # of each in `evicted`, one after the other, what spoke against it, in a word
    reason: str = ""  # the verdict, with its evidence
    detect_s: float = 0.0  # from the last that was heard of who is evicted to the verdict
    agree_s: float = 0.0  # from the verdict to its commit


class StepClock(Protocol):
    """A clock, as one replica sees it."""

    @property
    def is_shared(self) -> bool:
        """Whether others must agree, so that it pays to arrive while the step before still runs."""

    @property
    def is_looking(self) -> bool:
        """Whether the group's master is lost and another one is looked for: no step is released meanwhile."""

    @property
    def takeover_s(self) -> float:
        """How long a step may be stuck, beyond its deadline, because the group has no master that could judge it."""

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """Stands ready for the next step with these tokens, or with none. Replaces what was said for that step."""

    def want(self, command: str) -> None:
        """Asks for a command to be put into a release."""

    async def released(self) -> StepRelease:
        """The next step, once it is released. Raises GroupLost."""

    def done(self, step: int) -> None:
        """All ranks of this replica have reported the step, and its batch is committed."""

    def fault(self, step: int, what: str) -> None:
        """A collective of the step raised, and no rank here has died. A reconfiguration follows, or the group fails."""

    async def superseded(self) -> None:
        """Waits until a new epoch is to begin. What runs of the old one counts for nothing, and is to be cut off."""

    async def reconfigured(self) -> Reconfiguration:
        """Begins the newest epoch, once `superseded` has returned and nothing of the old one runs."""

    async def exchange(self, blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The blobs of this replica's ranks -> those of all living ranks, when all members have come so far."""

    async def failed(self) -> NoReturn:
        """Waits until this replica can step no more with its group, and raises GroupLost, or WorkerFailed if alone."""

    def leave(self) -> None:
        """Leaves the group at once; the others notice. May be called again."""


@dataclass(frozen=True, slots=True)
class LocalRelease:
    """The release of a replica alone."""

    step: int
    decode_tokens: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    commands: tuple[str, ...]


class LocalClock:
    """The clock of a replica alone: an arrival with work is released at once."""

    def __init__(self) -> None:
        self.is_shared = False
        self.is_looking = False
        self.takeover_s = 0.0
        self._step = 0
        self._arrival: tuple[int, int] | None = None
        self._commands: dict[str, None] = {}
        self._is_due = asyncio.Event()
        self._fault = ""
        self._has_fault = asyncio.Event()

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """See StepClock."""
        self._arrival = (decode_tokens, prefill_tokens)
        if decode_tokens or prefill_tokens or self._commands:
            self._is_due.set()

    def want(self, command: str) -> None:
        """See StepClock."""
        self._commands[command] = None
        if self._arrival is not None:
            self._is_due.set()

    async def released(self) -> LocalRelease:
        """See StepClock."""
        await self._is_due.wait()
        assert self._arrival is not None
        decode_tokens, prefill_tokens = self._arrival
        commands = tuple(self._commands)
        release = LocalRelease(
            self._step, (decode_tokens,), (prefill_tokens,), (decode_tokens + prefill_tokens,), commands
        )
        self._step += 1
        self._arrival = None
        self._commands.clear()
        self._is_due.clear()
        return release

    def done(self, step: int) -> None:
        """See StepClock."""

    def fault(self, step: int, what: str) -> None:
        """See StepClock. Of a replica alone it is the end of a rank's process that says who failed, if there is one."""
        self._fault = what
        self._has_fault.set()

    async def superseded(self) -> None:
        """See StepClock. A replica alone stays as it is."""
        await asyncio.Event().wait()

    async def reconfigured(self) -> Reconfiguration:
        """See StepClock."""
        raise AssertionError("a replica alone has one epoch")

    async def exchange(self, blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """See StepClock."""
        return blobs

    async def failed(self) -> NoReturn:
        """See StepClock. Raises WorkerFailed, FAULT_S after a fault: only its own ranks make a replica alone fail."""
        await self._has_fault.wait()
        await asyncio.sleep(FAULT_S)
        raise WorkerFailed(f"the ranks do not reach each other: {self._fault}")

    def leave(self) -> None:
        """See StepClock."""
