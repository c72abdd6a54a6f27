"""Who must get on, and how soon: what the faults of a seed excuse, and what nothing excuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from coordinator.simulation.settings import PROGRESS_DEADLINE_S, STORE_RESTORED_S
from coordinator.simulation.world import Violation

if TYPE_CHECKING:
    from coordinator.simulation.engines import Engine
    from coordinator.simulation.group import Group

# From the last fault on, until those that it did not hit step again. The longest way: a master that is cut off; its
# lease runs out and the standby waits for it, members come, one of them is frozen in the new epoch's first step.
RECOVERY_S: Final = 20.0
STARTUP_S: Final = 25.0  # as long as no step was committed
STORE_PAUSE_S: Final = 1.5  # the most that a step may take while only the store fails
STORE_NEEDED_S: Final = 10.0  # by then a fault has led to whatever it leads to
COMMIT_S: Final = 2 * PROGRESS_DEADLINE_S  # by then a commit has succeeded, or its group has failed
BEGUN_S: Final = 3.0  # a group that no fault has hit steps by then
GRACE_S: Final = 0.5
MAX_WEDGES: Final = 2


class Progress:
    """The faults of one group, and whether everybody else gets on."""

    def __init__(self, group: Group) -> None:
        self.hit: set[int] = set()  # dp ranks that a fault has hit, directly or by their node
        self.has_stopped = False  # the group was asked to
        self.num_wedges = 0  # times that ranks were stuck together, with nobody to blame
        self._group = group
        self._first_fault_s = math.inf
        self._last_fault_s = 0.0  # when a fault last came or went
        self._fault_times: list[float] = []  # of faults that are not the store's
        self._store_failed: list[tuple[float, float]] = []  # from when to when
        self._num_node_faults = 0
        self._is_cut = False
        self._was_leaderless = False  # no node had a supervisor that could have been the master
        self._work_s: dict[int, float] = {}  # when each member's oldest wait for work began

    # What is reported

    def fault(self, text: str, *, hit: set[int] | None = None) -> None:
        """A fault that is not the store's has come, or has gone; it hits these dp ranks."""
        self._fault_times.append(self._note(text))
        self.hit |= hit or set()

    def node_fault(self, *, is_cut: bool = False) -> None:
        """The fault is one of a node: where one is cut off and another fails, nobody can say who should go on."""
        self._num_node_faults += 1
        self._is_cut |= is_cut

    def store_fault(self, text: str, *, lasts: bool = False) -> None:
        """The store has lost something, or begins to fail."""
        now_s = self._note(text)
        self._store_failed.append((now_s, math.inf if lasts else now_s))

    def store_recovers(self) -> None:
        """A failure that lasted has an end."""
        now_s = self._note("the store is well again")
        place = [end_s for _, end_s in self._store_failed].index(math.inf)
        self._store_failed[place] = (self._store_failed[place][0], now_s)

    def work_came(self, engine: Engine) -> None:
        """A request has come to a member."""
        if not engine.work.unfinished:
            self._work_s[engine.dp_rank] = self._group.world.now_s

    # What must hold

    def look(self) -> None:
        """To be called now and then. Raises Violation."""
        now_s = self._group.world.now_s
        self._was_leaderless |= not any(s.is_alive and not s.is_frozen for s in self._group.supervisors)
        if min(self._group.account.began_s, self._first_fault_s) == math.inf and now_s > BEGUN_S:
            raise Violation("the group has not begun to step")
        self._look_at_commits(now_s)
        self._look_at_waits(now_s)
        if not self._is_spoilt:
            self._look_at_the_healthy()

    @property
    def is_at_rest(self) -> bool:
        """Whether every member has ended, or has done all its work, or is frozen for good."""
        return all(
            not engine.is_alive or engine.is_frozen or engine.ranks.is_frozen or not engine.work.unfinished
            for engine in self._group.engines
        )

    def _look_at_commits(self, now_s: float) -> None:
        for supervisor in self._group.supervisors:
            master = supervisor.master
            if master is None or master.committing_s is None or supervisor.is_frozen or not supervisor.is_alive:
                continue
            waits_s = now_s - max(master.committing_s, supervisor.thawed_s)
            if waits_s > COMMIT_S and not master.clock.failure:
                raise Violation(f"{supervisor.name} has waited {waits_s:.1f} s for a commit")

    def _look_at_waits(self, now_s: float) -> None:
        began_s = self._group.account.began_s
        for engine in self._group.engines:
            if not engine.work.unfinished or not engine.is_alive or engine.is_frozen:
                continue
            waits_s = now_s - max(engine.committed_s, self._work_s.get(engine.dp_rank, 0.0))
            if waits_s > STORE_PAUSE_S and not self._fault_times and began_s < now_s - STORE_PAUSE_S:
                raise Violation(f"{engine.name} has waited {waits_s:.1f} s while only the store failed")
            limit_s = RECOVERY_S if began_s < now_s else STARTUP_S
            if min(waits_s, now_s - self._last_fault_s) > limit_s:
                raise Violation(f"{engine.name} has waited {waits_s:.1f} s for a step; it is {engine.stage.name}")

    def _look_at_the_healthy(self) -> None:
        for engine in self._group.engines:
            if engine.dp_rank not in self.hit and not engine.is_alive:
                raise Violation(f"{engine.name}, which nothing has hit, has ended: {engine.end_error!r}")
        if innocent := self._group.account.evicted - self.hit:
            raise Violation(f"members {innocent} are evicted, and nothing has hit them")

    # What excuses the end of the whole group

    @property
    def _is_spoilt(self) -> bool:
        group = self._group
        had_begun = group.account.began_s + GRACE_S < self._first_fault_s
        num_left = group.settings.size - len(self.hit)
        return (
            not had_begun
            or num_left < max(1, group.min_members)
            or self._store_was_missed
            or self._was_leaderless
            or self.num_wedges > MAX_WEDGES
            or (self._is_cut and self._num_node_faults > 1)
            or self.has_stopped
        )

    @property
    def _store_was_missed(self) -> bool:
        """Whether the store failed when a change of membership may have needed it."""
        return any(
            begin_s < fault_s + STORE_NEEDED_S and fault_s < end_s + STORE_RESTORED_S
            for begin_s, end_s in self._store_failed
            for fault_s in self._fault_times
        )

    def _note(self, text: str) -> float:
        self._last_fault_s = now_s = self._group.world.now_s
        self._first_fault_s = min(self._first_fault_s, now_s)
        self._group.world.note("fault: %s", text)
        return now_s
