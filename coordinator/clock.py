"""The master's state machine: Hellos, arrivals and Dones in, releases and epochs out. Pure state; time is passed in.

A message that a method returns is to be sent to every member that is connected, in order; epochs.py has what else may
be returned. steps.py has the rules of stepping within an epoch, verdicts.py those of who is to blame, and epochs.py
those of how a verdict becomes an epoch. The others:

- **Alike.** A group has one configuration; a Hello that differs from it is refused, naming the field. A rank that
  is there already is refused while the first lives, and one that was evicted for ever: nobody joins a group that runs.
- **Every epoch begins alike.** Its members are committed; they are told (Reconfigure) and drop what is not committed;
  when all are ready they get Go, and steps begin at 0. Whoever is lost meanwhile is left out of the next epoch, which
  supersedes that one.
- **Start together.** The first epoch begins when all have said Hello. Until it has committed its first step a loss
  fails the group: no client has a request there yet, and whoever starts it should see what is wrong with it. Who is
  missing when the start-up deadline passes is named.
- **Stop.** After the release that carries `stop` members leave. Then a loss fails what is left of the group.
- **Late frames.** What was said in another epoch, or for one that is at its end, is ignored. Beats count in any.
- **Nobody waits for ever.** A connection that ends, a silent member, a step that is not committed by the progress
  deadline, a member that does not arrive while others have work, one that is not ready by the start-up deadline, and
  one that breaks the protocol: each is evicted. A parked member is judged by its beats alone. Until step 0 is committed
  the start-up deadline stands in for the progress deadline in the first epoch, since a first forward may compile, and
  FIRST_STEP_DEADLINES of them in a later one, whose shards are new.
- **Faults wait for their evidence.** A collective that raises tells that something is wrong, not who is to blame. The
  end of a connection or silence does, if it follows within FAULT_WAIT_S.
- **Nobody to blame.** Then the same members begin a new epoch: at most MAX_REFORMS times without a committed step in
  between, after which the group fails.
- **Fit.** Members that could not go on alone (`ClockSettings.why_not`) do not try: the group fails with the arithmetic.
- **The store decides.** Between a verdict and its commit nothing is released. A membership that is not committed by the
  progress deadline fails the group.
- **Takeover.** A new master waits REJOIN_S for the last members, which must have been told of an epoch, evicts who has
  not come, and begins the next epoch. A deposed master says nothing any more.
- **Fair judge.** Time in which the master itself did not run counts against nobody, and a member that took it for dead
  meanwhile may come back within REJOIN_S, as in a takeover.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator import verdicts
from coordinator.epochs import Commit, Epochs, Expel, Output
from coordinator.errors import JoinRefused, ProtocolError
from coordinator.messages import (
    BEAT_INTERVAL_S,
    MAX_BLOBS_BYTES,
    MAX_TICK_S,
    PARKED_BEAT_S,
    STOP,
    Arrive,
    Beat,
    Done,
    Failed,
    Fault,
    Go,
    Hello,
    MemberMessage,
    Ready,
    Reconfigure,
    Release,
)
from coordinator.standing import Standing
from coordinator.steps import Steps
from coordinator.verdicts import Kind, Verdict

__all__ = ["Clock", "ClockSettings", "Commit", "Expel", "Output", "Phase"]

logger = logging.getLogger(__name__)

MAX_REFORMS: Final = 2
FIRST_STEP_DEADLINES: Final = 3
FAULT_WAIT_S: Final = verdicts.SILENT_S + BEAT_INTERVAL_S  # by then a dead peer is lost, and a frozen one silent
REJOIN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings:
    """What a group agrees on, and how long it waits."""

    group: str
    size: int  # members of the whole group
    config: Mapping[str, str]  # what every Hello's config must equal
    startup_deadline_s: float  # from the master's start, or a later epoch's, until all are ready
    progress_deadline_s: float
    prefill_delay_s: float  # a prompt may wait so long for others' prompts; 0 never holds one
    why_not: Callable[[tuple[int, ...]], str] = lambda members: ""  # why these alone could not go on; "" if they could

    @property
    def config_hash(self) -> str:
        """Of what all members have in common."""
        return hashlib.sha256(repr(sorted(self.config.items())).encode()).hexdigest()


class Phase(StrEnum):
    """Where a group is in its life."""

    GATHERING = "gathering"  # not all have said Hello
    COMMITTING = "committing"  # a membership is being committed
    FORMING = "forming"  # not all are ready for the epoch
    RUNNING = "running"
    STOPPING = "stopping"  # the last step is released; members leave when they have done it
    STOPPED = "stopped"
    FAILED = "failed"
    DEPOSED = "deposed"  # another master has taken over


ENDED: Final = (Phase.STOPPED, Phase.FAILED, Phase.DEPOSED)


class Clock:
    """One group's clock. `started_s` and every `now_s` come from the same monotonic clock."""

    def __init__(
        self,
        settings: ClockSettings,
        started_s: float,
        *,
        epoch: int,
        members: tuple[int, ...],
        evicted: tuple[tuple[int, ...], ...] = (),
        is_takeover: bool = False,
    ) -> None:
        """`epoch` is the first that begins here, with `members` or, in a takeover, those of them that come."""
        self.settings = settings
        self.phase = Phase.GATHERING
        self.failure = ""  # why the group has failed, or this master is deposed
        self._epochs = Epochs(epoch, members, evicted)
        self._steps = Steps(settings.prefill_delay_s)
        self._members: dict[int, Standing] = {}  # connected and not evicted, by dp rank; ascending in an epoch
        self._refusals: dict[int, str] = {}  # the last one's reason, by the rank it spoke for
        self._lives: dict[int, str] = {}  # the incarnation that has each rank
        self._has_stepped = is_takeover  # a step of this group was ever committed
        self._num_reforms = 0  # since then, or since a later commit
        self._gathered_for = "a new master has taken over" if is_takeover else "all members have joined"
        self._began_s = started_s  # when this phase of waiting for all began: for Hellos, or for Readies
        self._fault = ""  # what the first Fault of this epoch said
        self._fault_s = 0.0  # when it came
        self._ticked_s = started_s
        self._paused_s = -math.inf  # when the master was last seen to have been paused

    @property
    def epoch(self) -> int:
        """The one in force; before the first, the number below it."""
        return self._epochs.epoch

    @property
    def last_epoch(self) -> int:
        """The highest that is in force or may yet come into force: what follows this clock must begin above it."""
        return self._epochs.last_epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Its dp ranks; before it begins, those that it waits for."""
        return self._epochs.members

    @property
    def evicted(self) -> tuple[tuple[int, ...], ...]:
        """The dp ranks of each eviction so far, in order."""
        return self._epochs.evicted

    @property
    def missing(self) -> list[int]:
        """Its dp ranks that are not here."""
        return [rank for rank in self._epochs.remaining if rank not in self._members]

    @property
    def step(self) -> int:
        """The next to be released."""
        return self._steps.step

    @property
    def committed_step(self) -> int:
        """The last of this epoch that all have done; -1 for none."""
        return self._steps.committed

    @property
    def pending_commands(self) -> frozenset[str]:
        """Commands that not all members have acted on yet."""
        return self._steps.pending_commands

    @property
    def is_parked(self) -> bool:
        """Whether all stand arrived and idle, and every released step is committed."""
        return self.phase is Phase.RUNNING and self._steps.is_parked

    @property
    def beat_interval_s(self) -> float:
        """How often the master is to beat, and to call `tick`."""
        return PARKED_BEAT_S if self.is_parked else BEAT_INTERVAL_S

    # What happens

    def hello(self, hello: Hello, now_s: float) -> tuple[Output, ...]:
        """Admits a member whose proof was checked. Raises JoinRefused with the reason that it is told."""
        self._forgive_pause(now_s)
        if reason := self._why_refused(hello):
            if hello.dp_rank < self.settings.size:
                self._refusals[hello.dp_rank] = reason
            raise JoinRefused(reason)
        self._members[hello.dp_rank] = Standing(hello=hello, heard_s=now_s, beat_s=now_s)
        self._lives[hello.dp_rank] = hello.incarnation
        self._epochs.rise_above(hello.epoch)
        who = (hello.dp_rank, hello.replica_id, hello.incarnation, hello.url)
        logger.info("member joined dp_rank=%d replica_id=%s incarnation=%s url=%s", *who)
        return () if self.missing else self._end_gathering(now_s)

    def receive(self, dp_rank: int, message: MemberMessage, now_s: float) -> tuple[Output, ...]:
        """Takes a message of a member that was admitted."""
        member = self._members.get(dp_rank)
        if member is None or self.phase in ENDED:
            return ()
        member.heard_s = now_s
        epoch = self._epochs.epoch
        if isinstance(message, Beat):
            member.beat_s = now_s
            if message.epoch == epoch and member.blob is not None:  # before, they count those of the last epoch
                member.enter(message.collectives, now_s)
            return ()
        if message.epoch != epoch or self.phase in (Phase.GATHERING, Phase.COMMITTING):
            return ()
        try:
            return self._take(member, message, now_s)
        except ProtocolError as broken:
            return self._blame(member, str(broken), now_s)

    def lost(self, dp_rank: int, why: str, now_s: float) -> tuple[Output, ...]:
        """The member's connection has ended. While members gather it may come again."""
        self._forgive_pause(now_s)
        member = self._members.get(dp_rank)
        if member is None or self.phase in ENDED:
            return ()
        has_left = self.phase is Phase.STOPPING and member.done == self.step - 1
        if self._may_rejoin(now_s):
            self._enter(Phase.GATHERING)
            self._began_s, self._gathered_for = now_s, "the master was paused"
        if self.phase is not Phase.GATHERING and not has_left:
            reason = f"{member.name} was lost before step {self.step}: {why}"
            verdict = Verdict(blamed=(dp_rank,), kind=Kind.LOST, reason=reason, evidence_s=member.heard_s)
            return self._judge(verdict, now_s)
        del self._members[dp_rank]
        logger.info("member left dp_rank=%d reason=%s", dp_rank, why)
        if has_left and not self._members:
            self._enter(Phase.STOPPED)
        return ()

    def command(self, name: str, now_s: float) -> tuple[Output, ...]:
        """Puts a command into the next release; a parked group steps at once for it."""
        return self._stepped(self._steps.command(name, now_s))

    def committed(self, epoch: int, now_s: float) -> tuple[Output, ...]:
        """What the Commit of this epoch asked for has happened."""
        if self.phase is not Phase.COMMITTING:
            return ()
        outputs = self._epochs.commit(epoch, now_s)
        if outputs and isinstance(outputs[-1], Reconfigure):
            self._begin_epoch(now_s)
        return outputs

    def deposed(self, reason: str, now_s: float) -> tuple[Output, ...]:
        """Another master has the lease: nothing may be said any more."""
        if self.phase not in ENDED:
            self._enter(Phase.DEPOSED)
            self.failure = reason
        return ()

    def tick(self, now_s: float) -> tuple[Output, ...]:
        """Looks at the deadlines. To be called every `beat_interval_s`, after the frames that have come are in."""
        self._forgive_pause(now_s)
        settings, members = self.settings, list(self._members.values())
        if self.phase in ENDED:
            return ()
        if self.phase is Phase.GATHERING and self._has_stepped:
            return self._end_gathering(now_s) if now_s - self._began_s > REJOIN_S else ()
        if mute := verdicts.silent(members, max(settings.progress_deadline_s, verdicts.SILENT_S), now_s):
            return self._judge(mute, now_s)
        match self.phase:
            case Phase.COMMITTING if now_s - self._epochs.proposed_s > settings.progress_deadline_s:
                limit = f"{settings.progress_deadline_s:g} s"
                return self._fail(f"{self._epochs.reason}; the new membership could not be committed within {limit}")
            case Phase.GATHERING | Phase.FORMING if now_s - self._began_s > settings.startup_deadline_s:
                return self._judge(self._startup_verdict(), now_s)
            case Phase.RUNNING | Phase.STOPPING:
                return self._watch_steps(members, now_s)
        return ()

    # Members

    def _why_refused(self, hello: Hello) -> str:
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
        if reason := self._epochs.departed.get(hello.dp_rank):
            return f"{hello.replica_id} ({hello.incarnation}), dp_rank {hello.dp_rank}, was evicted: {reason}"
        if first := self._members.get(hello.dp_rank):
            return f"dp_rank {hello.dp_rank} is taken by {first.hello.replica_id}, which is alive"
        if self.phase is not Phase.GATHERING:
            return f"the group is {self.phase}: {self.failure or 'it takes no new members'}"
        is_known = self._lives.get(hello.dp_rank, hello.incarnation) == hello.incarnation
        if self._has_stepped and not (hello.epoch and is_known):
            return f"dp_rank {hello.dp_rank} is of a group that runs, which takes no new members"
        if hello.epoch and not self._has_stepped:
            return f"{hello.replica_id} was a member in epoch {hello.epoch} of an earlier life of the group"
        return ""

    def _may_rejoin(self, now_s: float) -> bool:
        """Whether a connection may have ended because its member took this master for dead."""
        is_under_way = self.phase in (Phase.FORMING, Phase.RUNNING) and self._has_stepped
        return is_under_way and now_s - self._paused_s < REJOIN_S

    def _end_gathering(self, now_s: float) -> tuple[Output, ...]:
        """All are here, or those that are not have had their time."""
        reason, missing = self._gathered_for, tuple(self.missing)
        if missing:
            names = " and ".join(f"dp_rank {rank}" for rank in missing)
            reason = f"{reason}, and {names} has not come back within {REJOIN_S:g} s"
        verdict = Verdict(blamed=missing, kind=Kind.UNSEEN, reason=reason, evidence_s=self._began_s)
        return self._carry_out(verdict, now_s)

    def _begin_epoch(self, now_s: float) -> None:
        """Its members are being told of it."""
        self._enter(Phase.FORMING)
        if self._has_stepped:  # else it is part of the start-up
            self._began_s = now_s
        self._members = dict(sorted(self._members.items()))
        for member in self._members.values():
            member.begin_epoch()
        self._steps.begin(self.epoch, list(self._members.values()))
        self._fault = ""
        logger.info("epoch begins epoch=%d members=%s", self.epoch, self.members)

    # Steps

    def _take(self, member: Standing, message: Ready | Arrive | Done | Fault, now_s: float) -> tuple[Output, ...]:
        """A frame of this epoch. Raises ProtocolError."""
        match message:
            case Arrive():
                return self._stepped(self._steps.arrive(member, message, now_s))
            case Done():
                releases = self._steps.done(member, message, now_s)
                if self.committed_step == message.step:
                    self._has_stepped, self._num_reforms = True, 0
                return self._stepped(releases)
            case Ready():
                return self._ready(member, message, now_s)
            case Fault():
                if not self._fault:
                    self._fault_s, self._fault = now_s, f"{member.name} failed in step {message.step}: {message.what}"
                return ()

    def _ready(self, member: Standing, ready: Ready, now_s: float) -> tuple[Output, ...]:
        if self.phase is not Phase.FORMING or member.blob is not None:
            raise ProtocolError(f"was ready while the group is {self.phase}")
        if len(ready.blob) > (limit := MAX_BLOBS_BYTES // self.settings.size):
            raise ProtocolError(f"has a blob of {len(ready.blob)} bytes, limit is {limit}")
        member.blob = ready.blob
        blobs = tuple(m.blob for m in self._members.values() if m.blob is not None)
        if len(blobs) < len(self.members):
            return ()
        self._enter(Phase.RUNNING)
        self._steps.open(now_s)
        return (Go(epoch=self.epoch, blobs=blobs),)

    def _stepped(self, releases: tuple[Release, ...]) -> tuple[Output, ...]:
        if releases and STOP in releases[0].commands:
            self._enter(Phase.STOPPING)
        return releases

    # Verdicts

    def _watch_steps(self, members: list[Standing], now_s: float) -> tuple[Output, ...]:
        steps, limit_s = self._steps, self._step_limit_s()
        if self._fault:
            if now_s - self._fault_s > FAULT_WAIT_S:
                return self._judge(verdicts.faulty(members, self._fault, self._fault_s, now_s), now_s)
        elif steps.is_running:
            if now_s - steps.progress_s > limit_s:
                verdict = verdicts.stalled(members, steps.committed + 1, steps.progress_s, limit_s, now_s)
                return self._judge(verdict, now_s) if verdict else ()
        elif self.phase is Phase.STOPPING:
            if now_s - steps.progress_s > limit_s:
                names = " and ".join(member.name for member in members)
                return self._fail(f"{names} did not leave within {limit_s:g} s after the last step")
        else:
            steps.forget_withdrawn_work()
            since_s = max(steps.progress_s, steps.work_s)
            if now_s - since_s > limit_s:
                return self._judge(verdicts.absent(members, steps.step, since_s, limit_s), now_s)
        return ()

    def _step_limit_s(self) -> float:
        if not self._has_stepped:
            return self.settings.startup_deadline_s
        return self.settings.progress_deadline_s * (1 if self.committed_step >= 0 else FIRST_STEP_DEADLINES)

    def _startup_verdict(self) -> Verdict:
        since_s, limit_s = self._began_s, self.settings.startup_deadline_s
        if self.phase is Phase.FORMING:
            return verdicts.unready(list(self._members.values()), self.epoch, since_s, limit_s)
        return verdicts.missing({rank: self._refusals.get(rank, "") for rank in self.missing}, since_s, limit_s)

    def _blame(self, member: Standing, what: str, now_s: float) -> tuple[Output, ...]:
        """The member has broken the protocol."""
        reason = f"{member.name} {what}"
        verdict = Verdict(blamed=(member.dp_rank,), kind=Kind.PROTOCOL, reason=reason, evidence_s=now_s)
        return self._judge(verdict, now_s)

    def _judge(self, verdict: Verdict, now_s: float) -> tuple[Output, ...]:
        """Carries a verdict out: a new epoch without those it blames, or with the same members where it blames none."""
        if not self._has_stepped or self.phase is Phase.STOPPING:
            return self._fail(verdict.reason)
        if not verdict.blamed:
            if self._num_reforms == MAX_REFORMS:
                return self._fail(f"{verdict.reason}; no step was done in the {MAX_REFORMS} epochs before either")
            self._num_reforms += 1
        return self._carry_out(verdict, now_s)

    def _carry_out(self, verdict: Verdict, now_s: float) -> tuple[Output, ...]:
        if self._has_stepped:
            detect_ms = round((now_s - verdict.evidence_s) * 1000)
            fields = (self.epoch, list(verdict.blamed), detect_ms, verdict.reason)
            logger.warning("verdict epoch=%d evicted=%s detect_ms=%d reason=%s", *fields)
        self._epochs.judge(verdict, now_s)
        for dp_rank in verdict.blamed:
            self._members.pop(dp_rank, None)
        members = self._epochs.remaining
        if not members:
            return self._fail(f"{self._epochs.reason}; no member is left")
        if why := self.settings.why_not(members):
            return self._fail(f"{self._epochs.reason}; the others cannot go on: {why}")
        self._enter(Phase.COMMITTING)
        commit = self._epochs.propose(now_s)
        return (commit,) if commit else ()

    def _fail(self, reason: str) -> tuple[Output, ...]:
        self._enter(Phase.FAILED)
        self.failure = reason
        return (Failed(epoch=self.epoch, step=self.step, reason=reason),)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is not Phase.RUNNING:
            self._steps.close()

    def _forgive_pause(self, now_s: float) -> None:
        pause_s = now_s - self._ticked_s - BEAT_INTERVAL_S
        self._ticked_s = now_s
        if pause_s <= MAX_TICK_S - BEAT_INTERVAL_S:
            return
        logger.warning("the clock was paused pause_s=%.1f", pause_s)
        self._paused_s = now_s
        self._began_s = min(now_s, self._began_s + pause_s)
        self._fault_s = min(now_s, self._fault_s + pause_s)
        self._epochs.proposed_s = min(now_s, self._epochs.proposed_s + pause_s)
        self._steps.forgive(pause_s, now_s)
        for member in self._members.values():
            member.heard_s = min(now_s, member.heard_s + pause_s)
            member.beat_s = min(now_s, member.beat_s + pause_s)
