"""A supervisor under simulation: it serves the group's real clock while it has the lease, and watches it otherwise."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from coordinator.clock import ENDED, Clock, Commit, Expel, Output, Phase
from coordinator.errors import Fenced, JoinRefused, StoreUnavailable
from coordinator.master import COMMIT_RETRY_S, RENEW_S
from coordinator.messages import BEAT_INTERVAL_S, Accepted, Beat, Challenge, Hello, Refused
from coordinator.simulation.stores import StoreClient
from coordinator.simulation.world import End, Process
from coordinator.standby import POLL_S, PROBE_S, LeaseWatch, Probe
from coordinator.store import Lease, Record, View, split_address

if TYPE_CHECKING:
    from coordinator.simulation.engines import Engine
    from coordinator.simulation.group import Group

FOLLOW_S: Final = 0.005  # engines end so long after their supervisor


class Supervisor(Process):
    """One node's supervisor. That of node 0 is the first master."""

    def __init__(self, group: Group, place: int) -> None:
        super().__init__(group.world, f"node {place}")
        self.place = place
        self.engines: list[Engine] = []
        self.master: Master | None = None
        self.holder = f"supervisor of node {place}"
        self._group = group
        self._store = StoreClient(group.store, self, place)
        self._watch = LeaseWatch()
        self._is_over = False  # the group has ended
        self.at_end(self._end_engines)

    def start(self) -> None:
        """Node 0 takes the lease; the others stand by."""
        if self.place == 0:
            self._begin()
        else:
            self.world.after(self.world.random.random() * POLL_S, self, self._look)

    def command(self, name: str) -> None:
        """An operator's, for whoever is master."""
        if self.master is not None:
            self.master.command(name)

    def master_ended(self) -> None:
        """The clock has come to its end: with the group, or because another master took over."""
        assert self.master is not None
        if self.master.clock.phase is Phase.DEPOSED:
            self.master = None
            self.world.after(POLL_S, self, self._look)
        else:
            self._is_over = True

    def _end_engines(self) -> None:
        for engine in self.engines:
            self.world.after(FOLLOW_S, None, engine.kill, "its supervisor has ended")

    def _begin(self) -> None:
        seen: dict[str, Any] = {"seen_token": 0, "seen_epoch": 0, "replaces": None}
        self._store.take_lease(self._began, holder=self.holder, address=f"{self.place}:1", **seen)

    def _began(self, answer: Any) -> None:
        if isinstance(answer, Lease):
            members = tuple(range(self._group.settings.size))
            self._serve(answer, partial(Clock, epoch=answer.epoch, members=members))
        else:
            self.world.after(POLL_S, self, self._begin)

    def _serve(self, lease: Lease, new_clock: Any) -> None:
        self._group.account.leased(lease.token, self.holder)
        self.world.note("%s is master with token %d", self.name, lease.token)
        self.master = Master(self._group, self, self._store, lease, new_clock(self._group.settings, self.world.now_s))
        self.master.start()

    # Standing by, as standby.take_over does

    def _look(self) -> None:
        if self.master is None and not self._is_over:
            self._store.view(self._viewed)

    def _viewed(self, answer: Any) -> None:
        if not isinstance(answer, View):
            self._watch.missed()
            self._look_again()
            return
        if not answer.address:
            self._probed(answer, [], Probe.SILENT)
            return
        host, _ = split_address(answer.address)
        outcome: list[Probe] = []
        self.world.after(PROBE_S, self, self._probed, answer, outcome, Probe.SILENT)
        self._group.connect(self, int(host), partial(self._connected, answer, outcome))

    def _connected(self, view: View, outcome: list[Probe], end: End | None) -> None:
        if end is None:
            self._probed(view, outcome, Probe.REFUSED)
            return

        def greeted(message: Any) -> None:
            end.close()
            self._probed(view, outcome, Probe.GREETED)

        end.listen(greeted, lambda: None)

    def _probed(self, view: View, outcome: list[Probe], probe: Probe) -> None:
        if outcome or self.master is not None:
            return
        outcome.append(probe)
        told_epoch = max(engine.state.told_epoch for engine in self.engines)  # also of those that have died
        self._watch.saw(view, probe, told_epoch, self.world.now_s)
        claim = self._watch.claim(self.world.now_s)
        if claim is None:
            self._look_again()
            return
        self.world.note("%s claims the lease: %s", self.name, claim.why)
        seen = {"seen_token": self._watch.seen_token, "seen_epoch": self._watch.seen_epoch}
        address = f"{self.place}:1"
        self._store.take_lease(self._claimed, holder=self.holder, address=address, replaces=claim.replaces, **seen)

    def _claimed(self, answer: Any) -> None:
        if isinstance(answer, Lease) and answer.record is not None:
            record = answer.record
            clock = partial(
                Clock,
                epoch=answer.epoch,
                members=record.members,
                evicted=record.evicted,
                is_takeover=True,
            )
            self._serve(answer, clock)
            self._group.reach("takeover")
            return
        if isinstance(answer, StoreUnavailable):
            self._watch.missed()
        self._look_again()

    def _look_again(self) -> None:
        self.world.after(POLL_S, self, self._look)


class Master:
    """The clock's driver, as master.py is on real connections. It runs in its supervisor."""

    def __init__(self, group: Group, supervisor: Supervisor, store: StoreClient, lease: Lease, clock: Clock) -> None:
        self.clock = clock
        self.token = lease.token
        self._group = group
        self._supervisor = supervisor
        self._store = store
        self.committing_s: float | None = None  # since when a commit has been under way, if one is
        self._members: dict[int, End] = {}
        self._strangers: dict[End, None] = {}
        self.is_over = False  # its clock has come to its end

    def start(self) -> None:
        """Begins to beat, to renew and to serve."""
        self._supervisor.every(lambda: self.clock.beat_interval_s, self._tick, first_s=BEAT_INTERVAL_S)
        self._renew()

    def command(self, name: str) -> None:
        """All members act on it at the same step."""
        if not self.is_over:
            self._group.account.commanded(name, self.token)
            self._output(self.clock.command(name, self._now_s))

    def connected(self, end: End) -> None:
        """Somebody has connected, and is greeted."""
        if self.is_over:
            end.close()
            return
        self._strangers[end] = None
        end.listen(partial(self._introduced, end), partial(self._strangers.pop, end, None))
        end.send(Challenge(nonce=b""))

    @property
    def _now_s(self) -> float:
        return self._supervisor.world.now_s

    def _introduced(self, end: End, hello: Any) -> None:
        assert isinstance(hello, Hello)
        self._strangers.pop(end, None)
        try:
            outputs = self.clock.hello(hello, self._now_s)
        except JoinRefused as refusal:
            end.send(Refused(reason=str(refusal)))
            end.close()
            return
        self._members[hello.dp_rank] = end
        end.listen(partial(self._received, end, hello.dp_rank), partial(self._lost, end, hello.dp_rank))
        end.send(Accepted(proof=b""))
        self._output(outputs)

    def _received(self, end: End, dp_rank: int, message: Any) -> None:
        if self._members.get(dp_rank) is end:
            self._output(self.clock.receive(dp_rank, message, self._now_s))

    def _lost(self, end: End, dp_rank: int) -> None:
        if self._members.get(dp_rank) is end:
            del self._members[dp_rank]
            self._output(self.clock.lost(dp_rank, "its connection ended (EOF)", self._now_s))

    def _tick(self) -> None:
        if not self.is_over:
            self._broadcast(Beat(epoch=self.clock.epoch, step=self.clock.step, collectives=()))
            self._output(self.clock.tick(self._now_s))

    def _output(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            match output:
                case Commit():
                    self._commit(output)
                case Expel():
                    if end := self._members.pop(output.dp_rank, None):
                        end.send(output.message)
                        end.close()
                case _:
                    self._group.account.said(self.token, output)
                    self._broadcast(output)
        if self.clock.phase in ENDED and not self.is_over:
            self._end()

    def _broadcast(self, message: Any) -> None:
        for end in list(self._members.values()):
            end.send(message)

    def _commit(self, commit: Commit) -> None:
        if self.is_over:
            return
        self._group.reach("commit")
        if self.committing_s is None:
            self.committing_s = self._now_s
        record = Record(
            epoch=commit.epoch,
            members=commit.members,
            evicted=commit.evicted,
            config_hash=self.clock.settings.config_hash,
        )
        self._store.commit(partial(self._committed, commit), self.token, record)

    def _committed(self, commit: Commit, answer: Any) -> None:
        if self.is_over:
            return
        match answer:
            case StoreUnavailable():
                self._supervisor.world.after(COMMIT_RETRY_S, self._supervisor, self._commit, commit)
            case Fenced():
                self._step_down(str(answer))
            case _:
                self._group.reach("committed")
                self.committing_s = None
                self._output(self.clock.committed(commit.epoch, self._now_s))

    def _renew(self) -> None:
        if not self.is_over:
            self._store.renew(self._renewed, self.token, self.clock.epoch)

    def _renewed(self, answer: Any) -> None:
        if isinstance(answer, Fenced):
            self._step_down(str(answer))
        else:
            self._supervisor.world.after(RENEW_S, self._supervisor, self._renew)

    def _step_down(self, reason: str) -> None:
        self._group.account.deposed(self.token)
        self._output(self.clock.deposed(reason, self._now_s))

    def _end(self) -> None:
        self.is_over = True
        clock, world = self.clock, self._supervisor.world
        world.note("%s's clock has ended: %s %s", self._supervisor.name, clock.phase, clock.failure)
        self._group.account.clock_ended(clock)
        if clock.phase is not Phase.DEPOSED:
            self._store.release(self.token)
        for end in [*self._members.values(), *self._strangers]:
            end.close()
        self._members.clear()
        self._strangers.clear()
        self._supervisor.master_ended()
