"""What goes wrong, and when: drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from coordinator.clock import REJOIN_S
from coordinator.simulation.settings import PROGRESS_DEADLINE_S, STORE_RESTORED_S
from coordinator.store import LEASE_S

if TYPE_CHECKING:
    from coordinator.simulation.engines import Engine
    from coordinator.simulation.group import Group
    from coordinator.simulation.supervisors import Supervisor
    from coordinator.simulation.world import Process

FIRST_S: Final = 1.0  # most groups have begun to step by then
LAST_S: Final = 7.0  # the last fault begins by then, or follows from one that did
MASTER_MISSED_S: Final = 5.0  # members look for their master for longer
EARLY_ODDS: Final = 0.1
BOTH_COMMIT_S: Final = (LEASE_S + REJOIN_S, LEASE_S + PROGRESS_DEADLINE_S)  # as well a master cut off as the next one
SETTLED_S: Final = 6.0  # by then it is clear who goes on without whom
FOR_GOOD_S: Final = 1000.0
KINDS: Final = {  # every fault, with how often it is drawn
    **{"crash": 3, "freeze": 3, "kill_ranks": 1, "freeze_ranks": 2, "slow_down": 2, "wedge": 1, "flap": 1},
    **{"kill_master": 1, "freeze_master": 2, "silence_master": 1, "cut": 1, "bring_back": 1},
    **{"stop_store": 1, "freeze_store": 1, "cut_store": 1, "lose_replies": 1, "lose_data": 1, "fail_over": 1},
    **{"lose_data_and_master": 1, "fail_over_and_lose_master": 1},
}
POINTS: Final = ("reconfigure", "ready", "go", "commit", "committed", "takeover")


@dataclass
class Points:
    """Faults that wait for the protocol to reach a point: its n-th Reconfigure taken, Ready said, Commit asked, ..."""

    waiting: list[tuple[str, int, Callable[[], None]]] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS, 0))

    def reach(self, point: str) -> None:
        """Lets the faults happen that wait for this."""
        self.reached[point] += 1
        due = [item for item in self.waiting if item[:2] == (point, self.reached[point])]
        for item in due:
            self.waiting.remove(item)
            item[2]()


class Faults:
    """Draws a few faults and lets them happen."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._random = group.world.random
        self._progress = group.progress
        self._points = group.points = Points()
        self.pending = 0  # that have not come, or not gone

    def plan(self, names: Sequence[str]) -> None:
        """Draws what is to happen, of the faults with these names."""
        random = self._random
        weights = [KINDS[name] for name in names]

        def draw() -> Callable[[], None]:
            kind: Callable[[], None] = getattr(self, f"_{random.choices(names, weights)[0]}")
            return kind

        for _ in range(random.choice([0, 1, 1, 2, 2, 3])):
            kind, at_s = draw(), random.uniform(FIRST_S, LAST_S)
            self._at(at_s, kind)
            how = random.random()
            if how < 0.2:  # two within 50 ms
                self._at(at_s + random.uniform(0.0, 0.05), draw())
            elif how < 0.5:  # another one in the middle of what follows
                self._at(at_s, partial(self._wait_for_point, draw()))
        if random.random() < EARLY_ODDS:  # in the middle of the start
            self._wait_for_point(draw())

    def _wait_for_point(self, kind: Callable[[], None]) -> None:
        """The fault comes when the protocol is at some point for the n-th time from now, or a little later."""
        random, points = self._random, self._points
        point = random.choice(POINTS)
        number = 1 if point in ("commit", "committed", "takeover") else random.randint(1, self._group.settings.size)
        delay_s = random.choice([0.0, random.uniform(0.0, 0.1)])
        points.waiting.append((point, points.reached[point] + number, partial(self._at, delay_s, kind)))

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        self.pending += 1

        def happen() -> None:
            self.pending -= 1
            action()

        self._group.world.after(delay_s, None, happen)

    # Members

    def _living(self) -> Engine | None:
        alive = [engine for engine in self._group.engines if engine.is_alive]
        return self._random.choice(alive) if alive else None

    def _crash(self) -> None:
        if engine := self._living():
            self._progress.fault(f"{engine.name} crashes", hit={engine.dp_rank})
            engine.kill("SIGKILL")

    def _kill_ranks(self) -> None:
        if engine := self._living():
            self._progress.fault(f"a rank of {engine.name} dies", hit={engine.dp_rank})
            engine.ranks.kill("SIGKILL")

    def _freeze(self) -> None:
        if engine := self._living():
            self._progress.fault(f"{engine.name} freezes, with its ranks", hit={engine.dp_rank})
            for process in (engine, engine.ranks):
                process.freeze()
            self._thaw_later(engine, engine.ranks)

    def _freeze_ranks(self) -> None:
        if engine := self._living():
            self._progress.fault(f"a rank of {engine.name} freezes", hit={engine.dp_rank})
            engine.ranks.freeze()
            self._thaw_later(engine.ranks)

    def _slow_down(self) -> None:
        if engine := self._living():
            slow_s = self._random.choice([0.4, 1.0, 3.0, 5.0])
            engine.slow_downs_s.append(slow_s)
            # A step that takes less than the deadline hits nobody.
            hit = {engine.dp_rank} if slow_s > PROGRESS_DEADLINE_S else set()
            self._progress.fault(f"a step of {engine.name} takes {slow_s} s", hit=hit)

            def recover() -> None:
                engine.slow_downs_s.remove(slow_s)
                self._progress.fault(f"a step of {engine.name} takes {engine.step_s:.2f} s again")

            self._at(self._random.uniform(1.0, 10.0), recover)

    def _wedge(self) -> None:
        self._progress.fault("the ranks are stuck together")
        newest = self._group.newest_process_group()
        if newest is None:
            return
        newest.is_wedged = True
        self._progress.num_wedges += 1
        self._group.is_wedging = self._random.random() < 0.3

    def _flap(self) -> None:
        """A collective raises, and nobody is dead."""
        if newest := self._group.newest_process_group():
            self._progress.fault("a link flaps")
            newest.is_flapping = True

    def _bring_back(self) -> None:
        """A member is frozen or cut off, is evicted, and comes back just when a new master waits for the members."""
        elsewhere = [e for e in self._group.engines if e.is_alive and not self._is_with_master(e)]
        if not elsewhere:
            return
        engine = self._random.choice(elsewhere)
        if self._random.random() < 0.5:
            self._progress.fault(f"{engine.name} freezes, with its ranks", hit={engine.dp_rank})
            engine.freeze()
            engine.ranks.freeze()
            come_back: Callable[[], None] = partial(self._thaw, engine, engine.ranks)
        else:
            everybody = {engine.dp_rank for engine in self._group.engines}
            come_back = self._cut_off(engine.place, from_store=False, hit=everybody)
        self._at(PROGRESS_DEADLINE_S + 1.5, self._kill_master)
        later = partial(self._at, self._random.uniform(0.0, 0.5), come_back)
        self._points.waiting.append(("takeover", self._points.reached["takeover"] + 1, later))

    def _thaw(self, *processes: Process) -> None:
        self._progress.fault("a process goes on")
        for process in processes:
            process.thaw()

    def _is_with_master(self, engine: Engine) -> bool:
        return self._group.supervisors[engine.place].master is not None

    def _thaw_later(self, *processes: Process) -> None:
        random = self._random
        self._thaw_after(random.choice([random.uniform(0.05, 1.0), random.uniform(1.0, 6.0), FOR_GOOD_S]), *processes)

    def _thaw_after(self, for_s: float, *processes: Process) -> None:
        if for_s != FOR_GOOD_S:
            self._at(for_s, partial(self._thaw, *processes))

    # Nodes

    def _master(self) -> Supervisor | None:
        masters = [s for s in self._group.supervisors if s.is_alive and s.master is not None]
        return self._random.choice(masters) if masters else None

    def _of_node(self, supervisor: Supervisor) -> set[int]:
        """Who is hit with a node. Where it is the only one, all are: nobody could take over."""
        engines = self._group.engines if len(self._group.supervisors) == 1 else supervisor.engines
        return {engine.dp_rank for engine in engines}

    def _kill_master(self) -> None:
        if supervisor := self._master():
            self._progress.fault(f"the supervisor of node {supervisor.place} dies", hit=self._of_node(supervisor))
            self._progress.node_fault()
            supervisor.kill("SIGKILL")

    def _silence_master(self) -> None:
        """It dies between two of its frames: some members have had the last one, others not."""
        if supervisor := self._master():
            self._progress.fault(f"the supervisor of node {supervisor.place} will die", hit=self._of_node(supervisor))
            self._progress.node_fault()
            supervisor.sends_left = self._random.randint(0, 3 * self._group.settings.size)

    def _freeze_master(self) -> None:
        if supervisor := self._master():
            for_s = self._random.choice([self._random.uniform(0.2, 2.5), self._random.uniform(2.0, 6.0), FOR_GOOD_S])
            is_alone = len(self._group.supervisors) == 1
            hit = self._of_node(supervisor) if is_alone and for_s > MASTER_MISSED_S else set()
            if supervisor.is_frozen or supervisor.thawed_s:  # again: members may miss it later than the standby does
                hit = {engine.dp_rank for engine in self._group.engines}
            self._progress.fault(f"the supervisor of node {supervisor.place} freezes", hit=hit)
            self._progress.node_fault()
            supervisor.freeze()
            self._thaw_after(for_s, supervisor)

    def _cut(self) -> None:
        """One node is cut off from all others, and perhaps from the store."""
        if len(self._group.supervisors) == 1:
            return
        random, group = self._random, self._group
        place, from_store = random.choice(group.supervisors).place, random.random() < 0.5
        for_s = random.choice([random.uniform(0.2, 8.0), random.uniform(*BOTH_COMMIT_S), FOR_GOOD_S])
        lost = {engine.dp_rank for engine in group.engines}
        master = self._master()
        if master is not None and for_s > SETTLED_S:  # else it depends on who notices what first
            # The side that has the store goes on, the master's where both have it.
            wins_alone = master.place == place and not from_store
            lost = {engine.dp_rank for engine in group.engines if (engine.place == place) != wins_alone}
        heal = self._cut_off(place, from_store=from_store, hit=lost)
        if for_s != FOR_GOOD_S:
            self._at(for_s, heal)

    def _cut_off(self, place: int, *, from_store: bool, hit: set[int]) -> Callable[[], None]:
        """Cuts a node off from all others; returns what heals it."""
        group = self._group
        others = [supervisor.place for supervisor in group.supervisors if supervisor.place != place]
        self._progress.fault(f"node {place} is cut off, from the store too: {from_store}", hit=hit)
        self._progress.node_fault(is_cut=True)
        for other in others:
            group.network.cut(place, other)
        if from_store:
            group.store.unreachable.add(place)

        def heal() -> None:
            self._progress.fault("the network is whole again")
            group.store.unreachable.discard(place)
            for other in others:
                group.network.heal(place, other)

        return heal

    # The store

    def _for_a_while(self, begin: Callable[[], None], end: Callable[[], None], what: str) -> None:
        self._progress.store_fault(f"the store {what}", lasts=True)
        begin()

        def recover() -> None:
            self._progress.store_recovers()
            end()

        self._at(self._random.choice([self._random.uniform(0.1, 2.0), self._random.uniform(2.0, 10.0)]), recover)

    def _stop_store(self) -> None:
        store = self._group.store

        def come_back() -> None:
            store.is_down = False
            if self._random.random() < 0.5:
                store.lose_data()

        self._for_a_while(lambda: setattr(store, "is_down", True), come_back, "is down")

    def _freeze_store(self) -> None:
        self._for_a_while(self._group.store.freeze, self._group.store.thaw, "is frozen")

    def _lose_replies(self) -> None:
        store = self._group.store
        self._for_a_while(
            lambda: setattr(store, "reply_loss", 0.5), lambda: setattr(store, "reply_loss", 0.0), "loses replies"
        )

    def _cut_store(self) -> None:
        """One node is cut off from the store alone."""
        store, place = self._group.store, self._random.choice(self._group.supervisors).place
        self._for_a_while(
            lambda: store.unreachable.add(place),
            lambda: store.unreachable.discard(place),
            f"cannot be reached from node {place}",
        )

    def _lose_data_and_master(self) -> None:
        """The master has had the time to restore what the store lost."""
        self._lose_data()
        self._at(STORE_RESTORED_S + 0.1, self._kill_master)

    def _fail_over_and_lose_master(self) -> None:
        """The master has had no time to tell the copy what it lacks."""
        self._fail_over_then(self._kill_master)

    def _lose_data(self) -> None:
        self._progress.store_fault("the store is flushed")
        self._group.store.lose_data()

    def _fail_over(self) -> None:
        self._fail_over_then(lambda: None)

    def _fail_over_then(self, then: Callable[[], None]) -> None:
        """A copy that lags takes the store's place, after a while in which nobody answers."""
        self._progress.store_fault("the store fails over", lasts=True)
        self._group.store.is_down = True

        def promote() -> None:
            self._group.store.is_down = False
            self._group.store.fail_over()
            self._progress.store_recovers()
            then()

        self._at(self._random.uniform(0.5, 2.0), promote)
