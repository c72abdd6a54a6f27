"""A replica under simulation: the member's real state machine, a link to the master, a step loop, and its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from coordinator.errors import JoinFailed, Superseded
from coordinator.member import CONNECT_S, FIND_S, LOOK_S, MAX_SILENCE_S, REDIAL_PAUSE_S, REDIAL_S
from coordinator.member_state import MemberState
from coordinator.messages import BEAT_INTERVAL_S, STOP, Accepted, Challenge, Hello, Refused, Release
from coordinator.simulation.collectives import Collective, ProcessGroup
from coordinator.simulation.stores import StoreClient
from coordinator.simulation.work import Batch, Request, Work
from coordinator.simulation.world import End, Process, Violation
from coordinator.steps import MAX_LEAD
from coordinator.store import MasterAddress

if TYPE_CHECKING:
    from coordinator.simulation.group import Group

HEARTBEAT_S: Final = 1.0  # ranks that have not moved for so long are not alive, for the beats
COLLECTIVES_PER_STEP: Final = 2


class Stage(Enum):
    """Where the step loop is."""

    WAITING = auto()  # for an epoch
    REBUILDING = auto()  # its ranks leave the old process groups and load what they take over
    READY = auto()  # for Go
    STEPPING = auto()
    FAULTED = auto()  # a collective has raised; the next epoch, or the end, follows
    LEAVING = auto()  # the last step is done


@dataclass(slots=True)
class _Run:
    """A released step with the batch that it runs."""

    release: Release
    batch: Batch


class Engine(Process):
    """One life of one replica."""

    def __init__(self, group: Group, dp_rank: int, place: int) -> None:
        super().__init__(group.world, f"member {dp_rank}")
        self.dp_rank = dp_rank
        self.place = place
        self.ranks = Process(group.world, f"ranks of member {dp_rank}")
        self.state = MemberState(silence_s=min(group.settings.progress_deadline_s, MAX_SILENCE_S), redial_s=LOOK_S)
        self.work = Work()
        self.stage = Stage.WAITING
        self.end_error: Exception | None = None
        self.committed_s = 0.0  # when it last committed a step
        self.slow_downs_s: list[float] = []  # what a step takes at least, by each fault that slows it down now
        self._usual_step_s = group.world.random.uniform(0.03, 0.12)
        self._group = group
        self._store = StoreClient(group.store, self, place)
        self._address = 0  # the place of the node whose master it knows
        self._link: End | None = None
        self._is_accepted = False
        self._attempt = 0
        self._process_group: ProcessGroup | None = None
        self._said: dict[tuple[int, int], Batch] = {}  # counts that were said for the next step -> what they stand for
        self._runs: deque[_Run] = deque()
        self.at_end(self._bury)
        self.ranks.at_end(lambda: self.kill("one of its ranks has died"))

    def start(self) -> None:
        """The process begins; it dials when it has loaded its weights."""
        world = self.world
        self.every(lambda: self.state.beat_interval_s, self._tick, first_s=world.random.random() * BEAT_INTERVAL_S)
        self.every(lambda: self.state.beat_interval_s, self._beat, first_s=world.random.random() * BEAT_INTERVAL_S)
        world.after(world.random.uniform(0.0, 0.5), self, self._dial)

    @property
    def step_s(self) -> float:
        """How long a forward takes now."""
        return max([self._usual_step_s, *self.slow_downs_s])

    def submit(self, request: Request) -> None:
        """A client's request comes."""
        self.work.requests.append(request)
        if self.stage is Stage.STEPPING and self._said:
            self._arrive(self.state.epoch)

    def _bury(self) -> None:
        self.work.fail()
        self.ranks.kill("its engine has died")
        if self._process_group is not None:
            self._process_group.leave(self.dp_rank)

    # The link, as in member.py

    def _dial(self) -> None:
        """One attempt to reach a master."""
        if self.state.error is not None or self._link is not None:
            return
        self._attempt = attempt = self._attempt + 1
        if self.state.told_epoch:
            self.world.after(FIND_S, self, self._found, attempt, None)
            self._store.master(lambda answer: self._found(attempt, answer))
        else:
            self._connect(attempt)

    def _found(self, attempt: int, answer: Any) -> None:
        """Where the master is; anything but an address when that is not known, or not in time."""
        if attempt != self._attempt:
            return
        if isinstance(answer, MasterAddress):
            self._address = int(answer.host)
        self._attempt += 1
        self._connect(self._attempt)

    def _connect(self, attempt: int) -> None:
        self.world.after(REDIAL_S if self.state.told_epoch else CONNECT_S, self, self._give_up, attempt)

        def connected(end: End | None) -> None:
            if attempt != self._attempt or end is None:
                if end is not None:
                    end.close()
                elif attempt == self._attempt:
                    self._retry()
                return
            self._link, self._is_accepted = end, False
            end.listen(self._receive, self._link_ended)

        self._group.connect(self, self._address, connected)

    def _give_up(self, attempt: int) -> None:
        if attempt == self._attempt and not self._is_accepted:
            self._disconnect()
            self._retry()

    def _retry(self) -> None:
        self._attempt += 1
        if not self.state.told_epoch and self.world.now_s > self._group.settings.startup_deadline_s:
            self.state.end(JoinFailed("no master within the start-up deadline"))
            self._turn()
        elif self.state.error is None and (self.state.is_looking or not self.state.told_epoch):
            self.world.after(REDIAL_PAUSE_S, self, self._dial)

    def _disconnect(self) -> None:
        link, self._link, self._is_accepted = self._link, None, False
        if link is not None:
            link.close()

    def _link_ended(self) -> None:
        was_accepted = self._is_accepted
        self._disconnect()
        if was_accepted:
            self.state.lose_master("the master closed the connection", self.world.now_s)
            self.world.note("%s has lost its master", self.name)
        self._turn()
        if self.state.error is None:
            self._retry()

    def _receive(self, message: Any) -> None:
        self.state.heard(self.world.now_s)
        match message:
            case Challenge():
                assert self._link is not None
                self._link.send(self._hello())
            case Accepted():
                self._attempt += 1
                self._is_accepted = True
                self.state.accepted(self.world.now_s)
            case Refused():
                self.world.note("%s is refused: %s", self.name, message.reason)
                self.state.refused(message.reason)
            case _:
                self.state.take(message)
        self._turn()

    def _hello(self) -> Hello:
        return Hello(
            group="simulated",
            replica_id=f"r{self.dp_rank}",
            incarnation=f"life of {self.dp_rank}",
            dp_rank=self.dp_rank,
            config=dict(self._group.settings.config),
            url="",
            epoch=self.state.told_epoch,
        )

    def _send(self, message: Any) -> None:
        if self._link is not None and self._is_accepted:
            self._link.send(message)

    def _tick(self) -> None:
        was_connected = self.state.is_connected
        self.state.tick(self.world.now_s)
        if was_connected and not self.state.is_connected:
            self.world.note("%s hears nothing from its master", self.name)
            self._disconnect()
            self._retry()
        self._turn()

    def _beat(self) -> None:
        """From a thread of its own, so that a busy engine still beats; but only for ranks that live."""
        if not (self.ranks.is_frozen and self.world.now_s - self.ranks.frozen_s > HEARTBEAT_S):
            entered = self._process_group.entered(self.dp_rank) if self._process_group is not None else 0
            self._send(self.state.beat((entered,)))

    # The step loop

    def _turn(self) -> None:
        """Goes on as far as what has come allows."""
        if self.state.error is not None:
            self._end(self.state.error)
        elif reconfigure := self.state.offer(self.state.offered_epoch):
            self._group.account.told(self.dp_rank, reconfigure)
            self._cut_off()
            self.stage = Stage.REBUILDING
            rebuild_s = self.world.random.uniform(0.01, 0.3)
            self.world.after(rebuild_s, self.ranks, self._rebuilt, reconfigure.epoch)
            self._group.reach("reconfigure")
        elif self.stage is Stage.READY and self.state.go is not None:
            self._group.account.going(self.dp_rank, self.state.go)
            self._process_group = self._group.process_group(self.state.go.epoch)
            self.stage = Stage.STEPPING
            self._group.reach("go")
            self._arrive(self.state.epoch)
        elif self.stage is Stage.STEPPING and self._said and (release := self.state.next_release()):
            self._take(release)

    def _cut_off(self) -> None:
        """Drops what is not committed; a collective that is under way ends here."""
        if self._process_group is not None:
            self._process_group.leave(self.dp_rank)
            self._process_group = None
        self._runs.clear()
        self._said.clear()
        self.work.roll_back()

    def _rebuilt(self, epoch: int) -> None:
        """In the ranks: the new groups stand."""
        self.world.after(0.0005, self, self._ready, epoch)

    def _ready(self, epoch: int) -> None:
        if self.stage is not Stage.REBUILDING or epoch != self.state.offered_epoch:
            return
        try:
            message = self.state.ready(f"{self.dp_rank}@{epoch}".encode())
        except Superseded:
            return  # the turn that took the newer one has begun again
        self.stage = Stage.READY
        self._send(message)
        self._group.reach("ready")
        self._turn()

    def _arrive(self, epoch: int) -> None:
        if self.stage is not Stage.STEPPING or epoch != self.state.epoch:
            return
        batch = self.work.plan()
        decode_tokens, prefill_tokens = batch.counts
        self._said[batch.counts] = batch
        self._send(self.state.arrive(decode_tokens=decode_tokens, prefill_tokens=prefill_tokens))
        self._turn()

    def _take(self, release: Release) -> None:
        assert self._process_group is not None
        place = self._process_group.members.index(self.dp_rank)
        counts = release.decode_tokens[place], release.prefill_tokens[place]
        batch = self._said.get(counts)
        if batch is None:
            # A prefill that was held back: the decodes of what was said last run alone.
            matching = [said for (decodes, _), said in self._said.items() if (decodes, 0) == counts]
            if not matching:
                raise Violation(f"{self.name} is to run {counts} in {release}, but has said {list(self._said)}")
            batch = Batch(decodes=matching[-1].decodes)
        self._group.account.released(release)
        self._said.clear()
        self.work.run(batch)
        self._runs.append(_Run(release, batch))
        if len(self._runs) > MAX_LEAD:
            raise Violation(f"{self.name} has {len(self._runs)} steps to run at once")
        if len(self._runs) == 1:
            self._forward(self._runs[0], 0)
        if STOP not in release.commands:
            self.world.after(self.world.random.uniform(0.0005, 0.005), self, self._arrive, release.epoch)

    def _forward(self, run: _Run, number: int) -> None:
        """Computes, then enters the next collective of the step, or reports it when there is none left."""
        if not self._is_running(run):
            return
        compute_s = self.step_s / (COLLECTIVES_PER_STEP + 1) * (0.8 + 0.4 * self.world.random.random())
        if number < COLLECTIVES_PER_STEP:
            self.world.after(compute_s, self.ranks, self._enter, run, number)
        else:
            self.world.after(compute_s, self.ranks, self._hand_over, lambda: self._reported(run))

    def _enter(self, run: _Run, number: int) -> None:
        if self._process_group is None or not self._is_running(run):
            return
        collective = Collective(run.release.step, number, run.release.tokens)
        self._process_group.enter(
            self.dp_rank,
            collective,
            lambda: self.world.after(0.0, self.ranks, self._forward, run, number + 1),
            lambda why: self.world.after(0.0, self.ranks, self._hand_over, lambda: self._raised(run, why)),
        )

    def _hand_over(self, action: Callable[[], None]) -> None:
        """From the ranks to the engine."""
        self.world.after(0.0005, self, action)

    def _is_running(self, run: _Run) -> bool:
        return bool(self._runs) and self._runs[0] is run

    def _reported(self, run: _Run) -> None:
        if self.stage is not Stage.STEPPING or not self._is_running(run):
            return
        self._runs.popleft()
        release = run.release
        self._group.account.done(self.dp_rank, release)
        self.work.commit(release.epoch, release.step, run.batch)
        self.committed_s = self.world.now_s
        self._send(self.state.done(release.step))
        if self._runs:
            self._forward(self._runs[0], 0)
        elif STOP in release.commands:
            self.stage = Stage.LEAVING
            self.world.after(0.01, self, self.kill, "it was asked to stop")

    def _raised(self, run: _Run, why: str) -> None:
        if self.stage is Stage.STEPPING and self._is_running(run):
            self.stage = Stage.FAULTED
            self._send(self.state.fault(run.release.step, why))

    def _end(self, error: Exception) -> None:
        self.end_error = error
        self.kill(f"{type(error).__name__}: {error}")
