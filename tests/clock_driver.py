"""Drives a Clock by hand, and by seeded random events against a second, independent account of its rules."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from coordinator.clock import MAX_LEAD, Clock, ClockSettings
from coordinator.messages import Arrive, Beat, Done, Hello, MemberMessage, Ready, Release

CONFIG = {"model_hash": "abc", "dtype": "float32", "tp": "4"}


def make_hello(dp_rank: int, **changes: Any) -> Hello:
    """A Hello that the group of `CONFIG` takes."""
    name = f"r{dp_rank}"
    values = {"group": "g", "replica_id": name, "incarnation": name, "dp_rank": dp_rank, "config": CONFIG, "url": ""}
    return Hello(**{**values, **changes})


class Group:
    """A clock and the hand that moves it. `now_s` is the time of whatever is called next."""

    def __init__(self, clock_class: type[Clock] = Clock, *, size: int = 3, is_started: bool = True, **settings: Any):
        self.now_s = 100.0
        self.size = size
        limits = {"startup_deadline_s": 60.0, "progress_deadline_s": 10.0, "prefill_delay_s": 0.5, **settings}
        self.clock = clock_class(ClockSettings(group="g", size=size, config=CONFIG, **limits), started_s=self.now_s)
        if is_started:
            for dp_rank in range(size):
                self.clock.hello(make_hello(dp_rank), self.now_s)
            for dp_rank in range(size):
                self.send(dp_rank, Ready(epoch=0, blob=b"%d" % dp_rank))

    def send(self, dp_rank: int, message: MemberMessage) -> Any:
        """The one output that the message caused, or None."""
        outputs = self.clock.receive(dp_rank, message, self.now_s)
        assert len(outputs) <= 1
        return outputs[0] if outputs else None

    def arrive(
        self,
        dp_rank: int,
        decode: int = 0,
        prefill: int = 0,
        *,
        step: int | None = None,
        wants: tuple[str, ...] = (),
        epoch: int = 0,
    ) -> Any:
        """One member arrives, for the clock's step unless told otherwise."""
        at = self.clock.step if step is None else step
        arrive = Arrive(epoch=epoch, step=at, decode_tokens=decode, prefill_tokens=prefill, wants=wants)
        return self.send(dp_rank, arrive)

    def arrive_all(self, *counts: tuple[int, int]) -> Any:
        """All arrive with (decode, prefill) tokens each; returns the last one's output."""
        outputs = [self.arrive(dp_rank, *count) for dp_rank, count in enumerate(counts)]
        return outputs[-1]

    def done(self, dp_rank: int, step: int) -> Any:
        """One member reports a step."""
        return self.send(dp_rank, Done(epoch=0, step=step))

    def run_step(self, *counts: tuple[int, int]) -> Release:
        """One whole step of everybody."""
        release = self.arrive_all(*counts)
        assert isinstance(release, Release)
        for dp_rank in range(self.size):
            self.done(dp_rank, release.step)
        return release

    def pass_time(self, seconds: float, beating: set[int] | None = None, collectives: tuple[int, ...] = ()) -> Any:
        """Ticks as the master does; those in `beating` (None: all) beat. Returns the verdict, if there is one."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            for dp_rank in range(self.size) if beating is None else beating:
                self.send(dp_rank, Beat(epoch=0, step=0, collectives=collectives))
            if outputs := self.clock.tick(self.now_s):
                return outputs[0]
        return None


@dataclass
class _Member:
    """A member as an engine would be: it says, takes, runs and reports, in its own time."""

    to_clock: deque[MemberMessage] = field(default_factory=deque)
    from_clock: deque[Release] = field(default_factory=deque)
    step: int = 0
    said: list[tuple[int, int]] = field(default_factory=list)  # for `step`
    running: deque[int] = field(default_factory=deque)
    wants: set[str] = field(default_factory=set)
    acted: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Standing:
    """What the account holds of one member."""

    arrive: Arrive | None = None
    prefill_since_s: float | None = None
    prefilled: bool = False
    done: int = -1


class RandomGroup:
    """Members that act in a random order over connections of random delay. Every event is checked."""

    def __init__(self, clock_class: type[Clock], seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([1, 2, 2, 3, 4, 8])
        no_deadlines: dict[str, Any] = {"progress_deadline_s": 1e6, "startup_deadline_s": 1e6}
        self.group = Group(clock_class, size=self.size, prefill_delay_s=0.05, **no_deadlines)
        self.clock = self.group.clock
        self.members = [_Member() for _ in range(self.size)]
        self.account = [_Standing() for _ in range(self.size)]
        self.commands: list[str] = []  # the master's own, not yet released
        self.num_commands = 0
        self.idleness = self.random.random()
        self.num_released = 0

    def run(self, num_events: int) -> None:
        """Random events, then an orderly end at which all must have run the same."""
        for _ in range(num_events):
            self.group.now_s += self.random.expovariate(1000.0)  # so a step takes some tens of ms
            self._act(self.random.randrange(self.size), self.random.random())
        self._settle()

    def _act(self, dp_rank: int, choice: float) -> None:
        member = self.members[dp_rank]
        if choice < 0.03:
            self.num_commands += 1
            member.wants.add(f"want{self.num_commands}")
        elif choice < 0.04:
            self.num_commands += 1
            self.commands.append(f"command{self.num_commands}")
            self._check(self.clock.command(self.commands[-1], self.group.now_s))
        elif choice < 0.05:
            self._check(self.clock.tick(self.group.now_s))
        elif choice < 0.4 and member.to_clock:
            self._deliver(dp_rank)
        elif choice < 0.6 and member.from_clock:
            self._take(dp_rank)
        elif choice < 0.8 and member.running:
            member.to_clock.append(Done(epoch=0, step=member.running.popleft()))
        elif not member.said or choice > 0.95:
            self._say(dp_rank)

    def _say(self, dp_rank: int, counts: tuple[int, int] | None = None) -> None:
        member = self.members[dp_rank]
        if counts is None:
            is_idle = self.random.random() < self.idleness
            counts = (0, 0) if is_idle else (self.random.randrange(4), self.random.choice([0, 0, 0, 5, 9]))
        member.said.append(counts)
        wants = tuple(sorted(member.wants))
        arrive = Arrive(epoch=0, step=member.step, decode_tokens=counts[0], prefill_tokens=counts[1], wants=wants)
        member.to_clock.append(arrive)
        if self.random.random() < 0.05:  # a late frame of another epoch, which nobody may heed
            stray = Arrive(epoch=7, step=member.step, decode_tokens=99, prefill_tokens=99, wants=())
            member.to_clock.append(stray)

    def _take(self, dp_rank: int) -> None:
        member = self.members[dp_rank]
        if not member.from_clock:
            return
        release = member.from_clock.popleft()
        assert release.step == member.step, "every member runs every step, in order"
        mine = release.decode_tokens[dp_rank], release.prefill_tokens[dp_rank]
        assert any(mine in (said, (said[0], 0)) for said in member.said), "it runs what it has said"
        member.acted += [(release.step, command) for command in release.commands]
        member.wants -= set(release.commands)
        member.running.append(release.step)
        member.step += 1
        member.said.clear()

    def _deliver(self, dp_rank: int) -> None:
        if not self.members[dp_rank].to_clock:
            return
        message = self.members[dp_rank].to_clock.popleft()
        standing = self.account[dp_rank]
        if isinstance(message, Done):
            standing.done = message.step
        elif isinstance(message, Arrive) and message.epoch == 0 and message.step == self.num_released:
            standing.arrive = message
            if not message.prefill_tokens:
                standing.prefill_since_s = None
            elif standing.prefill_since_s is None:
                standing.prefill_since_s = self.group.now_s
        self._check(self.clock.receive(dp_rank, message, self.group.now_s))

    def _check(self, outputs: tuple[Any, ...]) -> None:
        """The invariants, after each event."""
        committed = min(standing.done for standing in self.account)
        arrivals = [standing.arrive for standing in self.account if standing.arrive is not None]
        wants = dict.fromkeys(want for arrive in arrivals for want in arrive.wants)
        has_work = bool(self.commands) or any(arrive.has_work for arrive in arrivals)
        may_release = len(arrivals) == self.size and has_work and self.num_released - 1 - committed < MAX_LEAD
        assert bool(outputs) == may_release, "a step is released exactly when all have arrived, with work, in the lead"
        assert self.clock.committed == committed
        if not outputs:
            return
        (release,) = outputs
        assert isinstance(release, Release), release
        assert release.step == self.num_released
        assert release.decode_tokens == tuple(arrive.decode_tokens for arrive in arrivals)
        self._check_prefills(release, [arrive.prefill_tokens for arrive in arrivals])
        assert release.commands == tuple(dict.fromkeys([*self.commands, *wants])), "each command once, none forgotten"
        self.commands.clear()
        self.num_released += 1
        for member, standing in zip(self.members, self.account, strict=True):
            standing.arrive = None
            member.from_clock.append(release)

    def _check_prefills(self, release: Release, wanted: list[int]) -> None:
        waits_s = [self.group.now_s - s.prefill_since_s for s in self.account if s.prefill_since_s is not None]
        is_alone = any(release.decode_tokens) and len(waits_s) < self.size
        goes_on = any(s.prefilled and s.prefill_since_s is not None for s in self.account)
        delay_s = self.clock.settings.prefill_delay_s
        is_held = is_alone and not goes_on and all(wait_s < delay_s for wait_s in waits_s)
        assert list(release.prefill_tokens) == ([0] * self.size if is_held else wanted), "prefills run together"
        for standing, prefill_tokens in zip(self.account, release.prefill_tokens, strict=True):
            standing.prefilled = prefill_tokens > 0
            if standing.prefilled:
                standing.prefill_since_s = None

    def _settle(self) -> None:
        """All become idle and report what they run; then all have run the same steps and acted on the same commands."""
        for _ in range(8):
            for dp_rank, member in enumerate(self.members):
                while member.from_clock:
                    self._take(dp_rank)
                self._say(dp_rank, (0, 0))
                member.to_clock += [Done(epoch=0, step=step) for step in member.running]
                member.running.clear()
                while member.to_clock:
                    self._deliver(dp_rank)
        assert {member.step for member in self.members} == {self.clock.step} == {self.clock.committed + 1}
        assert self.clock.is_parked
        assert all(member.acted == self.members[0].acted for member in self.members)
        assert len({command for _, command in self.members[0].acted}) == self.num_commands
