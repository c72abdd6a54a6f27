"""What tells a step loop when to run which step: the group's clock, or for a replica alone, LocalClock.

    clock.arrive(...)                  what the replica would run next; again, to replace it, until it is released
    release = await clock.released()   run exactly this
    clock.done(release.step)           all ranks have reported: the batch is committed

An arrival stands until it is released: that is how an idle replica waits. The rules of the clock that several replicas
share are in coordinator/clock.py; `group_clock.py` is the way to it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from replica.errors import ReplicaError, WorkerFailed

# Commands travel in releases, so that all replicas of a group act on them at the same step. The clock knows STOP.
DRAIN: Final = "drain"  # take no new requests, finish the running ones
STOP: Final = "stop"  # the step that carries it is the last


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


class StepClock(Protocol):
    """A clock, as one replica sees it."""

    @property
    def epoch(self) -> int:
        """The membership that steps are numbered in."""

    @property
    def is_shared(self) -> bool:
        """Whether others must agree, so that it pays to arrive while the step before still runs."""

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """Stands ready for the next step with these tokens, or with none. Replaces what was said for that step."""

    def want(self, command: str) -> None:
        """Asks for a command to be put into a release."""

    async def released(self) -> StepRelease:
        """The next step, once it is released. Raises GroupLost."""

    def done(self, step: int) -> None:
        """All ranks of this replica have reported the step, and its batch is committed."""

    async def failed(self) -> NoReturn:
        """Waits until the group can step no more, and raises GroupLost."""

    async def verdict(self, step: int, error: WorkerFailed) -> ReplicaError:
        """Tells the group that a rank failed in a step. Returns the error that everybody is given for it."""


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
        self.epoch = 0
        self.is_shared = False
        self._step = 0
        self._arrival: tuple[int, int] | None = None
        self._commands: dict[str, None] = {}
        self._is_due = asyncio.Event()

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

    async def failed(self) -> NoReturn:
        """See StepClock. Nobody else can make a replica alone fail."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def verdict(self, step: int, error: WorkerFailed) -> ReplicaError:
        """See StepClock."""
        return error
