"""Random events between a Clock and the members' real state, held against a second, independent account of the rules.

Each connection delivers in order and at random times; members step, die and are evicted; commits take their time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from coordinator.clock import Clock, Commit, Expel, Phase
from coordinator.errors import Superseded
from coordinator.member_state import MemberState
from coordinator.messages import Arrive, Done, Go, MemberMessage, Ready, Reconfigure, Release
from coordinator.steps import MAX_LEAD
from tests.clock_driver import make_hello, make_settings


@dataclass
class _Engine:
    """A member as an engine would be: it says, takes, runs and reports, in its own time."""

    dp_rank: int
    state: MemberState
    to_clock: deque[MemberMessage | None] = field(default_factory=deque)  # None: the connection ends
    from_clock: deque[Any] = field(default_factory=deque)
    said: list[tuple[int, int]] = field(default_factory=list)  # for the state's step
    running: deque[int] = field(default_factory=deque)
    wants: set[str] = field(default_factory=set)
    acted: list[tuple[int, int, str]] = field(default_factory=list)  # epoch, step, command
    ran: list[Release] = field(default_factory=list)
    is_alive: bool = True


@dataclass
class _Standing:
    """What the account holds of one member in this epoch."""

    arrive: Arrive | None = None
    prefill_since_s: float | None = None
    prefilled: bool = False
    done: int = -1
    is_ready: bool = False


class RandomGroup:
    """Members that act in a random order. Every event is checked."""

    def __init__(self, clock_class: type[Clock], seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([1, 2, 2, 3, 4, 8])
        settings = make_settings(self.size, prefill_delay_s=0.05, progress_deadline_s=1e6, startup_deadline_s=1e6)
        self.delay_s = settings.prefill_delay_s
        self.now_s = 100.0
        self.clock = clock_class(settings, self.now_s, epoch=1, members=tuple(range(self.size)))
        self.engines = [_Engine(rank, MemberState(silence_s=1e6, redial_s=1e6)) for rank in range(self.size)]
        self.account: dict[int, _Standing] = {}  # of the epoch's members
        self.epoch = 0
        self.members_by_epoch: dict[int, list[int]] = {}
        self.evicted: list[int] = []
        self.lost: list[int] = []  # and not yet evicted by a committed epoch
        self.is_open = False
        self.has_stepped = False
        self.commit: Commit | None = None  # under way
        self.commands: list[str] = []  # the master's own, not yet released
        self.carried: list[tuple[int, str]] = []  # commands of released steps that are not committed
        self.num_commands = 0
        self.idleness = self.random.random()
        self.deadliness = self.random.choice([0.0, 0.001, 0.01])
        self.num_released = 0  # in this epoch
        self.total_released = 0
        for engine in self.engines:
            self._apply(self.clock.hello(make_hello(engine.dp_rank), self.now_s))
            engine.state.accepted(self.now_s)

    def run(self, num_events: int) -> None:
        """Random events, then an orderly end at which all that are left must have run the same."""
        for _ in range(num_events):
            self.now_s += self.random.expovariate(1000.0)  # so a step takes some tens of ms
            self._act(self.random.choice(self.engines), self.random.random())
        self._settle()

    def _act(self, engine: _Engine, choice: float) -> None:
        if self.random.random() < self.deadliness and self._may_die(engine):
            engine.is_alive = False
            engine.to_clock.append(None)
        elif choice < 0.02:
            self.num_commands += 1
            engine.wants.add(f"want{self.num_commands}")
            self._send(engine, engine.state.want(f"want{self.num_commands}"))
        elif choice < 0.03:
            self.num_commands += 1
            self.commands.append(f"command{self.num_commands}")
            self._apply(self.clock.command(self.commands[-1], self.now_s))
        elif choice < 0.05:
            self._apply(self.clock.tick(self.now_s))
        elif choice < 0.1:
            self._commit()
        elif choice < 0.4 and engine.to_clock:
            self._deliver(engine)
        elif choice < 0.6 and engine.from_clock and engine.is_alive:
            self._take(engine)
        elif choice < 0.8 and engine.running and engine.is_alive:
            self._report(engine)
        elif engine.is_alive and engine.state.go and (not engine.said or choice > 0.95):
            self._say(engine)

    def _may_die(self, engine: _Engine) -> bool:
        return self.has_stepped and engine.is_alive and sum(e.is_alive for e in self.engines) > 1

    # What members do

    def _send(self, engine: _Engine, message: MemberMessage | None) -> None:
        if message is not None and engine.is_alive:
            engine.to_clock.append(message)

    def _say(self, engine: _Engine, counts: tuple[int, int] | None = None) -> None:
        if counts is None:
            is_idle = self.random.random() < self.idleness
            counts = (0, 0) if is_idle else (self.random.randrange(4), self.random.choice([0, 0, 0, 5, 9]))
        engine.said.append(counts)
        self._send(engine, engine.state.arrive(decode_tokens=counts[0], prefill_tokens=counts[1]))
        if self.random.random() < 0.05:  # a late frame of another epoch, which nobody may heed
            step, epoch = engine.state.step, engine.state.epoch + self.random.choice([-1, 6])
            stray = Arrive(epoch=epoch, step=step, decode_tokens=99, prefill_tokens=99, wants=())
            self._send(engine, stray)

    def _report(self, engine: _Engine) -> None:
        self._send(engine, engine.state.done(engine.running.popleft()))

    def _take(self, engine: _Engine) -> None:
        """One frame of the master, and what an engine does with it."""
        if not engine.from_clock:
            return
        state = engine.state
        state.take(engine.from_clock.popleft())
        assert state.error is None
        if state.is_superseded:
            if self.random.random() < 0.3 and engine.running:  # a step that ends while it is being cut off
                self._report(engine)
            if state.epoch:
                engine.said.append((0, 0))
                state.arrive(decode_tokens=0, prefill_tokens=0)
                try:
                    state.next_release()
                    raise AssertionError("an epoch is superseded without notice")
                except Superseded:
                    pass
            reconfigure = state.offer(state.epoch)
            assert reconfigure is not None
            assert engine.dp_rank in reconfigure.members
            engine.running.clear()
            engine.said.clear()
            self._send(engine, state.ready(b"%d" % engine.dp_rank))
        elif state.go is not None and engine.said:
            self._take_release(engine)

    def _take_release(self, engine: _Engine) -> None:
        release = engine.state.next_release()
        if release is None:
            return
        position = self.members_by_epoch[release.epoch].index(engine.dp_rank)
        mine = release.decode_tokens[position], release.prefill_tokens[position]
        assert any(mine in (said, (said[0], 0)) for said in engine.said), "it runs what it has said"
        engine.acted += [(release.epoch, release.step, command) for command in release.commands]
        engine.wants -= set(release.commands)
        engine.ran.append(release)
        engine.running.append(release.step)
        engine.said.clear()

    # What reaches the clock

    def _commit(self) -> None:
        if self.commit is not None:
            commit, self.commit = self.commit, None
            left_out = [rank for event in commit.evicted for rank in event]
            self.lost = [rank for rank in self.lost if rank not in left_out]
            self.evicted = left_out
            self._apply(self.clock.committed(commit.epoch, self.now_s))

    def _deliver(self, engine: _Engine) -> None:
        if not engine.to_clock:
            return
        message = engine.to_clock.popleft()
        if message is None:
            self.lost.append(engine.dp_rank)
            self.is_open = False
            self._apply(self.clock.lost(engine.dp_rank, "EOF", self.now_s))
            return
        standing = self.account.get(engine.dp_rank)
        is_heeded = message.epoch == self.epoch and not self.lost
        if is_heeded and standing is not None:
            self._account(standing, message)
        self._apply(self.clock.receive(engine.dp_rank, message, self.now_s))

    def _account(self, standing: _Standing, message: MemberMessage) -> None:
        if isinstance(message, Ready):
            standing.is_ready = True
        elif isinstance(message, Done):
            standing.done = message.step
        elif isinstance(message, Arrive) and self.is_open and message.step == self.num_released:
            standing.arrive = message
            if not message.prefill_tokens:
                standing.prefill_since_s = None
            elif standing.prefill_since_s is None:
                standing.prefill_since_s = self.now_s

    # The invariants, after each event

    def _apply(self, outputs: tuple[Any, ...]) -> None:
        if self.is_open:
            committed = min(standing.done for standing in self.account.values())
            self.has_stepped |= committed >= 0
            self.carried = [(step, name) for step, name in self.carried if step > committed]
            assert self.clock.committed_step == committed
        self._check_release([output for output in outputs if isinstance(output, Release)])
        for output in outputs:
            match output:
                case Release():
                    self._broadcast(output)
                case Commit():
                    self._check_commit(output)
                case Reconfigure():
                    self._check_reconfigure(output)
                    self._broadcast(output)
                case Go():
                    assert all(standing.is_ready for standing in self.account.values()), (
                        "steps begin when all are ready"
                    )
                    assert output.blobs == tuple(b"%d" % rank for rank in self.account)
                    self.is_open = True
                    self._broadcast(output)
                case Expel():
                    assert output.dp_rank in self.evicted, "only who is evicted by a committed epoch is told so"
                case _:
                    raise AssertionError(output)

    def _broadcast(self, message: Any) -> None:
        for dp_rank in self.account:
            self.engines[dp_rank].from_clock.append(message)

    def _check_commit(self, commit: Commit) -> None:
        assert self.commit is None, "one commit at a time"
        assert commit.epoch > self.epoch
        left_out = sorted(rank for event in commit.evicted for rank in event)
        assert left_out == sorted([*self.evicted, *self.lost]), "exactly who is lost is left out"
        assert sorted([*commit.members, *left_out]) == list(range(self.size))
        self.commit = commit
        self.is_open = False

    def _check_reconfigure(self, reconfigure: Reconfigure) -> None:
        assert self.commit is None and reconfigure.epoch > self.epoch
        assert not self.lost, "nobody is told of an epoch with a member that is known to be lost"
        assert set(reconfigure.members) == set(range(self.size)) - set(self.evicted)
        assert list(reconfigure.members) == sorted(reconfigure.members)
        self.epoch, self.num_released = reconfigure.epoch, 0
        self.members_by_epoch[self.epoch] = list(reconfigure.members)
        self.account = {rank: _Standing() for rank in reconfigure.members}
        again = [name for _, name in self.carried]
        self.commands = list(dict.fromkeys([*again, *self.commands]))
        self.carried.clear()

    def _check_release(self, releases: list[Release]) -> None:
        arrivals = [standing.arrive for standing in self.account.values() if standing.arrive is not None]
        wants = dict.fromkeys(want for arrive in arrivals for want in arrive.wants)
        has_work = bool(self.commands) or any(arrive.has_work for arrive in arrivals)
        committed = min((standing.done for standing in self.account.values()), default=-1)
        is_due = len(arrivals) == len(self.account) and has_work and self.num_released - 1 - committed < MAX_LEAD
        assert len(releases) == (self.is_open and is_due), (
            "released exactly when all have arrived, with work, in the lead"
        )
        for release in releases:
            assert (release.epoch, release.step) == (self.epoch, self.num_released)
            assert release.decode_tokens == tuple(arrive.decode_tokens for arrive in arrivals)
            self._check_prefills(release, [arrive.prefill_tokens for arrive in arrivals])
            assert release.commands == tuple(dict.fromkeys([*self.commands, *wants])), "none forgotten"
            self.carried += [(release.step, name) for name in release.commands]
            self.commands.clear()
            self.num_released += 1
            self.total_released += 1
            for standing in self.account.values():
                standing.arrive = None

    def _check_prefills(self, release: Release, wanted: list[int]) -> None:
        account = list(self.account.values())
        waits_s = [self.now_s - s.prefill_since_s for s in account if s.prefill_since_s is not None]
        is_alone = any(release.decode_tokens) and len(waits_s) < len(account)
        goes_on = any(s.prefilled and s.prefill_since_s is not None for s in account)
        is_held = is_alone and not goes_on and all(wait_s < self.delay_s for wait_s in waits_s)
        assert list(release.prefill_tokens) == ([0] * len(account) if is_held else wanted), "prefills run together"
        for standing, prefill_tokens in zip(account, release.prefill_tokens, strict=True):
            standing.prefilled = prefill_tokens > 0
            if standing.prefilled:
                standing.prefill_since_s = None

    # The end

    def _settle(self) -> None:
        """The living become idle and report what they run; then they stand where the clock stands, and agree."""
        for _ in range(12):
            self._commit()
            for engine in self.engines:
                while engine.from_clock and engine.is_alive:
                    self._take(engine)
                if engine.is_alive and engine.state.go:
                    self._say(engine, (0, 0))
                    self._take_release(engine)
                    while engine.running:
                        self._report(engine)
                    self._say(engine, (0, 0))
                while engine.to_clock:
                    self._deliver(engine)
        living = [engine for engine in self.engines if engine.is_alive]
        assert self.clock.phase is Phase.RUNNING and self.clock.is_parked
        assert self.clock.members == tuple(engine.dp_rank for engine in living)
        assert {engine.state.epoch for engine in living} == {self.clock.epoch}
        assert {engine.state.step for engine in living} == {self.clock.step} == {self.clock.committed_step + 1}
        self._check_histories(living)

    def _check_histories(self, living: list[_Engine]) -> None:
        steps: dict[tuple[int, int], Release] = {}
        for engine in self.engines:
            for release in engine.ran:
                assert steps.setdefault((release.epoch, release.step), release) == release, "all run the same step"
        for engine in living:
            expected = [release for (epoch, _), release in sorted(steps.items()) if epoch == self.clock.epoch]
            assert [release for release in engine.ran if release.epoch == self.clock.epoch] == expected
            assert not engine.wants
        done = [set(command for _, _, command in engine.acted) for engine in living]
        assert all(commands == done[0] for commands in done), "what one has acted on, all have"
