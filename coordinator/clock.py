"""The master's state machine: Hellos, arrivals and Dones in, releases and a verdict out. Pure state; time is passed in.

Whatever a method returns is to be sent to every member, in order. The rules:

- **Alike.** A group has one configuration; a Hello that differs from it is refused, naming the field. A rank that
  is there already is refused while the first lives.
- **Start together.** Steps begin when all have said Hello and all are ready. Who is missing when the start-up
  deadline passes is named.
- **One path.** A step is released to all when all have arrived for it, and every member runs exactly one forward for
  it, with exactly the counts that the release names: its own last arrival's, or the decodes alone.
- **Level, not edge.** An arrival stands until its step is released and may be replaced until then. Each release uses
  arrivals up. One for a step already released is ignored, one for a later step breaks the protocol.
- **Parked.** With no tokens anywhere and no command, nothing is released: the release of the next step is the wake.
- **Commit.** Done(s) says that all ranks of the member have reported s: its batch is committed. Dones come in order,
  one a step. What all have Done, the group has committed.
- **Bounded lead.** At most MAX_LEAD released steps are not yet committed: arrivals overlap the forward before,
  and nobody runs away from a member that is stuck.
- **Prefills together.** A step as long as its longest member is cheap only if the long parts coincide. Prefill parts
  are held back for `prefill_delay_s` (plus the step then running) while somebody decodes, unless all have one. Once one
  runs, all run; a prompt that goes on in the next step is not held again.
- **Commands travel on the clock.** A command, from the master's process or wanted by a member, is in exactly one
  release, so all members act on it at the same step. After the one that carries `stop` nothing is released.
- **Epochs.** A frame of another epoch is ignored.
- **Nobody waits for ever.** A connection that ends, a silent member, a Fault, a step not committed by the progress
  deadline, and a member that does not arrive while others have work, each end in a verdict that names the member.
  A parked member is judged by its beats alone. Until step 0 is committed the start-up deadline stands in for the
  progress deadline, since a first forward may compile.
- **Fair judge.** Time in which the master itself did not run counts against nobody.

The verdict is that the group fails: membership is fixed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from coordinator.errors import JoinRefused
from coordinator.messages import (
    BEAT_INTERVAL_S,
    MAX_BLOBS_BYTES,
    STOP,
    Arrive,
    Beat,
    ClockMessage,
    Done,
    Failed,
    Fault,
    Go,
    Hello,
    MemberMessage,
    Ready,
    Release,
    Welcome,
)

logger = logging.getLogger(__name__)

MAX_LEAD: Final = 2  # released steps that are not committed: one that runs and one that waits for it
SILENT_S: Final = 4 * BEAT_INTERVAL_S  # in a stalled step, who has not been heard for so long is the one to blame
MAX_TICK_S: Final = 4 * BEAT_INTERVAL_S  # ticks further apart than this mean that the master itself was paused


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings:
    """What a group agrees on, and how long it waits."""

    group: str
    size: int  # members
    config: Mapping[str, str]  # what every Hello's config must equal
    startup_deadline_s: float = 600.0  # from the master's start until all are ready
    progress_deadline_s: float = 10.0
    prefill_delay_s: float = 0.02  # a prompt may wait so long for others' prompts; 0 never holds one


class Phase(StrEnum):
    """Where a group is in its life."""

    GATHERING = "gathering"  # not all have said Hello
    FORMING = "forming"  # not all are ready
    RUNNING = "running"
    STOPPING = "stopping"  # the last step is released; members leave when they have done it
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class _Member:
    hello: Hello
    heard_s: float
    blob: bytes | None = None
    arrival: Arrive | None = None  # for the clock's step
    done: int = -1  # the last step it has done
    collectives: tuple[int, ...] = ()  # entered by each rank, as of its last beat
    prefill_since_s: float | None = None  # it has had prefill tokens to run since then
    prefilled: bool = False  # its prefill part ran in the last released step

    @property
    def name(self) -> str:
        return f"member {self.hello.dp_rank} ({self.hello.replica_id})"


@dataclass(slots=True)
class Clock:
    """One group's clock. `started_s` and every `now_s` come from the same monotonic clock."""

    settings: ClockSettings
    started_s: float
    phase: Phase = Phase.GATHERING
    epoch: int = 0
    step: int = 0  # the next to be released
    committed: int = -1  # the last step that all have done
    failure: str = ""  # the verdict's reason
    _members: dict[int, _Member] = field(default_factory=dict)  # by dp rank
    _refusals: dict[int, str] = field(default_factory=dict)  # the last one's reason, by the rank it spoke for
    _commands: list[str] = field(default_factory=list)
    _num_arrived: int = 0
    _num_done: Counter[int] = field(default_factory=Counter)  # how many have done each step that not all have
    _progress_s: float = 0.0  # when a step was last committed, or released with none before it under way
    _work_s: float = math.inf  # when the first work for the next step came
    _ticked_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._ticked_s = self.started_s

    @property
    def missing(self) -> list[int]:
        """The dp ranks that are not here."""
        return [rank for rank in range(self.settings.size) if rank not in self._members]

    @property
    def is_parked(self) -> bool:
        """Whether all stand arrived and idle, and every released step is committed."""
        all_arrived = self._num_arrived == self.settings.size
        return self.phase is Phase.RUNNING and all_arrived and not self._is_stepping() and not self._has_work()

    def hello(self, hello: Hello, now_s: float) -> tuple[ClockMessage, ...]:
        """Admits a member whose proof was checked. Raises JoinRefused with the reason that it is told."""
        if reason := self._why_not(hello):
            if hello.dp_rank < self.settings.size:
                self._refusals[hello.dp_rank] = reason
            raise JoinRefused(reason)
        self._members[hello.dp_rank] = _Member(hello=hello, heard_s=now_s)
        who = (hello.dp_rank, hello.replica_id, hello.incarnation, hello.url)
        logger.info("member joined dp_rank=%d replica_id=%s incarnation=%s url=%s", *who)
        if self.missing:
            return ()
        self._members = dict(sorted(self._members.items()))
        self.phase = Phase.FORMING
        return (Welcome(epoch=self.epoch, members=tuple(self._members)),)

    def receive(self, dp_rank: int, message: MemberMessage, now_s: float) -> tuple[ClockMessage, ...]:
        """Takes a message of a member that was admitted."""
        member = self._members.get(dp_rank)
        if member is None or self.phase in (Phase.STOPPED, Phase.FAILED):
            return ()
        member.heard_s = now_s
        if message.epoch != self.epoch:
            return ()
        match message:
            case Beat():
                member.collectives = message.collectives
                return ()
            case Arrive():
                return self._arrive(member, message, now_s)
            case Done():
                return self._done(member, message, now_s)
            case Ready():
                return self._ready(member, message, now_s)
            case Fault():
                return self._fail(f"{member.name} failed in step {message.step}: {message.what}")

    def lost(self, dp_rank: int, why: str) -> tuple[ClockMessage, ...]:
        """The member's connection has ended. Before the epoch has begun it may come again."""
        member = self._members.get(dp_rank)
        if member is None or self.phase in (Phase.STOPPED, Phase.FAILED):
            return ()
        has_left = self.phase is Phase.STOPPING and member.done == self.step - 1
        if self.phase is not Phase.GATHERING and not has_left:
            return self._fail(f"{member.name} was lost before step {self.step}: {why}")
        del self._members[dp_rank]
        logger.info("member left dp_rank=%d reason=%s", dp_rank, why)
        if has_left and not self._members:
            self.phase = Phase.STOPPED
        return ()

    def command(self, name: str, now_s: float) -> tuple[ClockMessage, ...]:
        """Puts a command into the next release; a parked group steps at once for it."""
        if name not in self._commands:
            self._commands.append(name)
        self._work_s = min(self._work_s, now_s)
        return self._release(now_s)

    def tick(self, now_s: float) -> tuple[ClockMessage, ...]:
        """Looks at the deadlines. To be called every BEAT_INTERVAL_S, after the frames that have come are in."""
        self._forgive_pause(now_s)
        if self.phase in (Phase.STOPPED, Phase.FAILED):
            return ()
        settings = self.settings
        for member in self._members.values():
            if now_s - member.heard_s > settings.progress_deadline_s:
                return self._fail(f"{member.name} was silent for {settings.progress_deadline_s:g} s")
        if self.phase in (Phase.GATHERING, Phase.FORMING):
            late = now_s - self.started_s > settings.startup_deadline_s
            return self._fail(self._startup_verdict()) if late else ()
        limit_s = settings.progress_deadline_s if self.committed >= 0 else settings.startup_deadline_s
        if self._is_stepping() or self.phase is Phase.STOPPING:
            if now_s - self._progress_s > limit_s:
                return self._fail(self._stall_verdict(now_s, limit_s))
        elif not self._has_work():
            self._work_s = math.inf  # it was withdrawn
        elif now_s - max(self._progress_s, self._work_s) > limit_s:
            waited_for = _names(m for m in self._members.values() if m.arrival is None)
            return self._fail(f"{waited_for} did not arrive for step {self.step} within {limit_s:g} s")
        return ()

    def _why_not(self, hello: Hello) -> str:
        """Why this Hello is refused; empty where it is not."""
        settings = self.settings
        if hello.group != settings.group:
            return f"group is {hello.group!r}, this master's is {settings.group!r}"
        for name in sorted(settings.config.keys() | hello.config.keys()):
            wanted, got = settings.config.get(name, "absent"), hello.config.get(name, "absent")
            if got != wanted:
                return f"{name} is {got}, the group's is {wanted}: all members need the same"
        if hello.dp_rank >= settings.size:
            return f"dp_rank is {hello.dp_rank}, the group has {settings.size} members"
        if first := self._members.get(hello.dp_rank):
            return f"dp_rank {hello.dp_rank} is taken by {first.hello.replica_id}, which is alive"
        if self.phase is not Phase.GATHERING:
            return f"the group is {self.phase}: {self.failure or 'it takes no new members'}"
        return ""

    def _ready(self, member: _Member, ready: Ready, now_s: float) -> tuple[ClockMessage, ...]:
        if self.phase is not Phase.FORMING or member.blob is not None:
            return self._fail(f"{member.name} was ready while the group is {self.phase}")
        if len(ready.blob) > (limit := MAX_BLOBS_BYTES // self.settings.size):
            return self._fail(f"{member.name} has a blob of {len(ready.blob)} bytes, limit is {limit}")
        member.blob = ready.blob
        blobs = tuple(m.blob for m in self._members.values() if m.blob is not None)
        if len(blobs) < self.settings.size:
            return ()
        self.phase = Phase.RUNNING
        self._progress_s = now_s
        return (Go(epoch=self.epoch, blobs=blobs),)

    def _arrive(self, member: _Member, arrive: Arrive, now_s: float) -> tuple[ClockMessage, ...]:
        if arrive.step < self.step:
            return ()
        if arrive.step > self.step or self.phase is not Phase.RUNNING:
            return self._fail(f"{member.name} arrived for step {arrive.step} while step {self.step} is {self.phase}")
        if arrive.has_work:
            self._work_s = min(self._work_s, now_s)
        if member.arrival is None:
            self._num_arrived += 1
        member.arrival = arrive
        if not arrive.prefill_tokens:
            member.prefill_since_s = None
        elif member.prefill_since_s is None:
            member.prefill_since_s = now_s
        return self._release(now_s)

    def _done(self, member: _Member, done: Done, now_s: float) -> tuple[ClockMessage, ...]:
        if done.step != member.done + 1 or done.step >= self.step:
            return self._fail(f"{member.name} reported step {done.step}, its next is {member.done + 1}")
        member.done = done.step
        self._num_done[done.step] += 1
        if self._num_done[done.step] < self.settings.size:
            return ()
        del self._num_done[done.step]
        self.committed = done.step
        self._progress_s = now_s
        return self._release(now_s)

    def _release(self, now_s: float) -> tuple[ClockMessage, ...]:
        """Releases the next step if every rule allows it."""
        if self.phase is not Phase.RUNNING or self._num_arrived < self.settings.size:
            return ()
        if self.step - 1 - self.committed >= MAX_LEAD or not self._has_work():
            return ()
        members = self._members.values()
        arrivals = [m.arrival for m in members if m.arrival is not None]
        runs_prefill = self._may_prefill(arrivals, now_s)
        commands = dict.fromkeys([*self._commands, *(want for arrival in arrivals for want in arrival.wants)])
        release = Release(
            epoch=self.epoch,
            step=self.step,
            decode_tokens=tuple(arrival.decode_tokens for arrival in arrivals),
            prefill_tokens=tuple(arrival.prefill_tokens if runs_prefill else 0 for arrival in arrivals),
            commands=tuple(commands),
        )
        if not self._is_stepping():
            self._progress_s = now_s
        for member, prefill_tokens in zip(members, release.prefill_tokens, strict=True):
            member.arrival = None
            member.prefilled = prefill_tokens > 0
            if member.prefilled:
                member.prefill_since_s = None
        self._num_arrived = 0
        self._work_s = math.inf
        self._commands.clear()
        self.step += 1
        if STOP in commands:
            self.phase = Phase.STOPPING
        return (release,)

    def _may_prefill(self, arrivals: list[Arrive], now_s: float) -> bool:
        """Whether prefill parts run in the step that is about to be released."""
        members = self._members.values()
        since_s = [m.prefill_since_s for m in members if m.prefill_since_s is not None]
        return (
            len(since_s) == self.settings.size
            or not any(arrival.decode_tokens for arrival in arrivals)
            or any(now_s - began_s >= self.settings.prefill_delay_s for began_s in since_s)
            or any(m.prefilled and m.prefill_since_s is not None for m in members)
        )

    def _is_stepping(self) -> bool:
        return self.committed < self.step - 1

    def _has_work(self) -> bool:
        arrivals = (m.arrival for m in self._members.values())
        return bool(self._commands) or any(arrival is not None and arrival.has_work for arrival in arrivals)

    def _forgive_pause(self, now_s: float) -> None:
        pause_s = now_s - self._ticked_s - MAX_TICK_S
        self._ticked_s = now_s
        if pause_s <= 0:
            return
        logger.warning("the clock was paused pause_s=%.1f", pause_s)
        self.started_s += pause_s
        self._progress_s = min(now_s, self._progress_s + pause_s)
        self._work_s = min(now_s, self._work_s + pause_s)
        for member in self._members.values():
            member.heard_s = min(now_s, member.heard_s + pause_s)

    def _startup_verdict(self) -> str:
        waited_for = [f"dp_rank {rank} {self._absence(rank)}" for rank in self.missing]
        waited_for += [f"{m.name} is not ready" for m in self._members.values() if m.blob is None and not self.missing]
        return f"the group did not start within {self.settings.startup_deadline_s:g} s: {', '.join(waited_for)}"

    def _absence(self, dp_rank: int) -> str:
        reason = self._refusals.get(dp_rank)
        return f"was refused: {reason}" if reason else "has not joined"

    def _stall_verdict(self, now_s: float, limit_s: float) -> str:
        """Names who is silent, else whose ranks have entered the fewest collectives, else all that are not done."""
        if not self._is_stepping():
            return f"{_names(self._members.values())} did not leave within {limit_s:g} s after the last step"
        what = f"step {self.committed + 1} was not done within {limit_s:g} s"
        late = [m for m in self._members.values() if m.done <= self.committed]
        if silent := [m for m in late if now_s - m.heard_s > SILENT_S]:
            return f"{what}: {_names(silent)} is silent"
        entered = [min(m.collectives, default=0) for m in self._members.values()]
        behind = [m for m, count in zip(self._members.values(), entered, strict=True) if count == min(entered)]
        if len(behind) < len(self._members):
            return f"{what}: {_names(behind)} is furthest behind in collectives ({min(entered)} of {max(entered)})"
        return f"{what}: waiting for {_names(late)}, no rank is behind another in collectives"

    def _fail(self, reason: str) -> tuple[ClockMessage, ...]:
        self.phase = Phase.FAILED
        self.failure = reason
        return (Failed(epoch=self.epoch, step=self.step, reason=reason),)


def _names(members: Iterable[_Member]) -> str:
    return " and ".join(member.name for member in members)
