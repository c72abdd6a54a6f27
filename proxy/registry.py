"""Which servers can take requests now, and how many each of them has in flight.

Pure state: the time is passed in, nothing here waits or sends. A replica that joined is judged by its control
connection and by what its group says (groups.py), a `--backend` by probes. Every life of a server is one `Replica`
object, so a request that ends after its replica left gives its place back to the object it was taken from, and no count
can drift. A life whose control connection broke and came back is the same object again, with what it still has in
flight.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from proxy.errors import JoinRefused
from proxy.groups import Group, GroupState, taken_together
from proxy.outcomes import AGAINST_THE_REPLICA, Attempt
from proxy.protocol import Hello, LoadReport
from proxy.replicas import ModelObjects, Replica, ReplicaState

logger = logging.getLogger(__name__)

PROBE_FAILURES_OUT: Final = 3  # so many in a row put a backend out
PROBE_SUCCESSES_IN: Final = 2  # so many in a row bring it back

LIVE_FOR_S: Final = 0.02  # how long the list of live replicas stands while no event changes it; silence is no event
_WHOLE: Final = Attempt.WHOLE


Groups = Mapping[str, tuple[Group, GroupState]]  # by name


@dataclass(slots=True, kw_only=True)
class Registry:
    """Replicas by control connection, and backends by URL."""

    heartbeat_timeout_s: float
    on_change: Callable[[], None] = lambda: None  # called when some replica's state may have changed
    on_eviction: Callable[[Replica], None] = lambda replica: None
    _joined: dict[int, Replica] = field(default_factory=dict)  # connection id -> replica
    _backends: dict[str, Replica] = field(default_factory=dict)  # url -> backend
    # (replica id, incarnation) -> replica, as long as it is joined or a request is in flight on it
    _lives: WeakValueDictionary[tuple[str, str], Replica] = field(default_factory=WeakValueDictionary)
    _awake_until_s: float = float("inf")  # when the next tick is due; what comes later may only lie unread
    # Made anew by _look, if something changed or from `_seen_until_s` on:
    _groups: dict[str, Group] = field(default_factory=dict)
    _live: list[Replica] = field(default_factory=list)
    _serving: dict[str, list[Replica]] = field(default_factory=dict)  # model id -> those of `_live` that serve it
    _seen_until_s: float = float("-inf")

    def join(self, hello: Hello, models: ModelObjects, *, connection_id: int, now_s: float) -> int | None:
        """Makes a replica routable; returns the connection that this Hello puts out of use, if any.

        The newest Hello of a replica id wins: its older connection is a life that ended, or a line that broke
        without the proxy having noticed. From another URL it is another replica, which must not put out one that
        is alive: raises JoinRefused. So it does for a replica of another group that has the name of one that is alive.
        """
        url = hello.url.rstrip("/")
        former_id = next((id_ for id_, known in self._joined.items() if known.replica_id == hello.replica_id), None)
        if former_id is not None:
            namesake = self._joined[former_id]
            if namesake.url != url and not self._is_silent(namesake, now_s):
                raise JoinRefused(f"replica_id {hello.replica_id!r} is in use by the live replica at {namesake.url}")
        self._refuse_another_group(hello, now_s)
        replica = self._lives.get((hello.replica_id, hello.incarnation))
        if replica is None:
            replica = Replica(
                replica_id=hello.replica_id,
                incarnation=hello.incarnation,
                url=url,
                models=models,
                is_backend=False,
                last_seen_s=now_s,
                group=hello.group or hello.replica_id,
                dp_rank=hello.dp_rank,
                model_hash=hello.model_hash,
            )
            self._lives[hello.replica_id, hello.incarnation] = replica
        else:
            replica.came_back(url, models, now_s)
        if former_id is not None:
            former = self._joined.pop(former_id)
            former.is_gone = former is not replica
        self._joined[connection_id] = replica
        self._changed()
        return former_id

    def tick(self, *, now_s: float, every_s: float) -> None:
        """The process is awake, and says so `every_s`. While it was not, nobody was silent: it could not hear.

        Who was silent before stays so until heard, lest a tick that is late by a moment call it back.
        """
        slept_s = now_s - self._awake_until_s
        if slept_s > 0:
            for replica in [r for r in self._joined.values() if not self._is_silent(r, now_s)]:
                replica.last_seen_s = min(now_s, replica.last_seen_s + slept_s)
        self._awake_until_s = now_s + every_s

    def report(self, connection_id: int, report: LoadReport, *, now_s: float) -> None:
        """Notes a replica's load; a report that is not newer than the last proves life and changes nothing else."""
        replica = self._joined.get(connection_id)
        if replica is None:
            return
        before = replica.report
        has_changed = not replica.is_reachable or self._is_silent(replica, now_s)
        replica.last_seen_s = now_s
        replica.is_reachable = True  # it is alive, so the next request may try it again
        if before is None or report.sequence > before.sequence:
            replica.reported(report)
            has_changed = has_changed or before is None or _of_group(before) != _of_group(report)
        if has_changed:
            self._seen_until_s = float("-inf")
            self._evict(replica.group, now_s)
            self._changed()

    def leaving(self, connection_id: int) -> None:
        """The replica drains: no new requests."""
        replica = self._joined.get(connection_id)
        if replica is not None:
            replica.is_leaving = True
            self._changed()

    def gone(self, connection_id: int) -> Replica | None:
        """The control connection ended; returns the replica that went with it, unless a newer Hello replaced it."""
        replica = self._joined.pop(connection_id, None)
        if replica is not None:
            replica.is_gone = True
            self._changed()
        return replica

    def add_backend(self, url: str, *, now_s: float) -> Replica:
        """Adds a server that does not join by itself; its first good probe makes it routable."""
        backend = Replica(
            replica_id=url,
            incarnation="",
            url=url,
            models={},
            is_backend=True,
            last_seen_s=now_s,
            is_reachable=False,
            probe_successes=PROBE_SUCCESSES_IN - 1,
        )
        self._backends[url] = backend
        self._changed()
        return backend

    def remove_backend(self, url: str) -> Replica | None:
        """Forgets a server that was added; returns it, if it was known. What runs on it goes on."""
        backend = self._backends.pop(url, None)
        if backend is not None:
            backend.is_leaving = True
            self._changed()
        return backend

    def probe_succeeded(self, backend: Replica, models: ModelObjects, *, now_s: float) -> None:
        """A backend answered its probe and serves these models."""
        backend.probe_failures = 0
        backend.probe_successes += 1
        backend.models = models
        backend.last_seen_s = now_s
        if backend.probe_successes >= PROBE_SUCCESSES_IN:
            backend.is_reachable = True
        self._changed()

    def probe_failed(self, backend: Replica) -> None:
        """A backend's probe failed otherwise than by a refused connection."""
        backend.probe_successes = 0
        backend.probe_failures += 1
        if backend.probe_failures >= PROBE_FAILURES_OUT:
            backend.is_reachable = False
            self._changed()

    def connect_failed(self, replica: Replica) -> None:
        """Nobody listens at the replica's address: out at once, until its next report or its next good probes."""
        replica.is_reachable = False
        replica.probe_successes = 0
        self._changed()

    def attempt_ended(self, replica: Replica, attempt: Attempt, *, took_s: float, now_s: float) -> None:
        """A request's time on a replica is over."""
        breaker = replica.breaker
        if attempt is _WHOLE:
            replica.answered(took_s)
            has_turned = breaker.ended(True, now_s)
        elif attempt in AGAINST_THE_REPLICA:
            has_turned = breaker.ended(False, now_s)
        else:
            has_turned = breaker.abandoned()
        if has_turned:
            level = logging.INFO if breaker.is_shut else logging.WARNING
            logger.log(level, "breaker turned replica_id=%r is_shut=%s", replica.replica_id, breaker.is_shut)
            self._changed()

    def trial_sent(self, replica: Replica, *, now_s: float) -> None:
        """A request goes to a replica whose breaker is open, to find out."""
        replica.breaker.sent(now_s)
        self._changed()

    def state(self, replica: Replica, *, now_s: float) -> ReplicaState:
        """Whether the replica gets new requests, and if not, why."""
        self._look(now_s)
        return self._state(replica, now_s)

    def _state(self, replica: Replica, now_s: float) -> ReplicaState:
        if replica.is_evicted:
            return ReplicaState.EVICTED
        if replica.is_leaving:
            return ReplicaState.LEAVING
        if self._is_silent(replica, now_s):
            return ReplicaState.SUSPECT
        if not replica.is_reachable:
            return ReplicaState.UNREACHABLE
        group = self._groups.get(replica.group)
        if group is not None and group.holds_up(replica.report):
            return ReplicaState.RECONFIGURING
        return ReplicaState.LIVE if replica.breaker.allows(now_s) else ReplicaState.BROKEN

    def known(self) -> list[Replica]:
        """All replicas and backends, whatever their state."""
        return [*self._joined.values(), *self._backends.values()]

    def live(self, *, now_s: float) -> list[Replica]:
        """Those that new requests may go to. The same list until something changes; not to be written to."""
        self._look(now_s)
        return self._live

    def serving(self, model: str | None, *, now_s: float) -> list[Replica]:
        """Those of them that serve the model; without one, all."""
        if now_s >= self._seen_until_s:
            self._look(now_s)
        return self._live if model is None else self._serving.get(model, [])

    def groups(self, *, now_s: float) -> Groups:
        """Every group that has a member here, by its name."""
        self._look(now_s)
        states: defaultdict[str, set[ReplicaState]] = defaultdict(set)
        for replica in self._joined.values():
            states[replica.group].add(self._state(replica, now_s))
        return {name: (self._groups[name], _group_state(found)) for name, found in states.items()}

    def may_be_live_soon(self, model: str | None, *, now_s: float) -> bool:
        """Whether some replica that serves the model only waits for its group to have reconfigured."""
        return any(
            self.state(replica, now_s=now_s) is ReplicaState.RECONFIGURING
            for replica in self._joined.values()
            if model is None or model in replica.models
        )

    def _is_silent(self, replica: Replica, now_s: float) -> bool:
        heard_until_s = min(now_s, self._awake_until_s)
        return not replica.is_backend and heard_until_s - replica.last_seen_s > self.heartbeat_timeout_s

    def _evict(self, group_name: str, now_s: float) -> None:
        """Finds out whether a group has gone on without some of its members."""
        group = self._taken_together(group_name, now_s)
        for replica in self._members(group_name):
            if not replica.is_evicted and group.has_evicted(replica.dp_rank, replica.report):
                replica.is_evicted = True
                logger.warning("replica evicted by its group replica_id=%r epoch=%d", replica.replica_id, group.epoch)
                self.on_eviction(replica)

    def _refuse_another_group(self, hello: Hello, now_s: float) -> None:
        """Raises JoinRefused: taken for one, two groups would each seem to have evicted members of the other."""
        for other in self._members(hello.group) if hello.group else ():
            if other.replica_id == hello.replica_id or other.is_evicted or self._is_silent(other, now_s):
                continue
            if other.dp_rank == hello.dp_rank or other.model_hash != hello.model_hash:
                raise JoinRefused(
                    f"another group is named {hello.group!r}: the live replica {other.replica_id!r} is its dp_rank"
                    f" {other.dp_rank}, with model_hash {other.model_hash!r:.24}; name the groups apart (--group)"
                )

    def _members(self, group_name: str) -> list[Replica]:
        return [replica for replica in self._joined.values() if replica.group == group_name]

    def _taken_together(self, group_name: str, now_s: float) -> Group:
        return taken_together(
            replica.report
            for replica in self._members(group_name)
            if replica.report is not None and not self._is_silent(replica, now_s)
        )

    def _look(self, now_s: float) -> None:
        """Finds out who is live, unless it is known well enough."""
        if now_s >= self._seen_until_s:
            names = {replica.group for replica in self._joined.values()}
            self._groups = {name: self._taken_together(name, now_s) for name in names}
            self._live = [each for each in self.known() if self._state(each, now_s) is ReplicaState.LIVE]
            models = {model for replica in self._live for model in replica.models}
            self._serving = {model: [each for each in self._live if model in each.models] for model in models}
            self._seen_until_s = now_s + LIVE_FOR_S

    def _changed(self) -> None:
        self._seen_until_s = float("-inf")
        self.on_change()


def _group_state(members: set[ReplicaState]) -> GroupState:
    if ReplicaState.LIVE in members:
        return GroupState.LIVE
    return GroupState.RECONFIGURING if ReplicaState.RECONFIGURING in members else GroupState.DEAD


def _of_group(report: LoadReport) -> tuple[int, bool, list[int]]:
    """What a report says of the replica's group."""
    return report.epoch, report.is_reconfiguring, report.members
