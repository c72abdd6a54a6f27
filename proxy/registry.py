"""Which servers can take requests now, and how many each of them has in flight.

Pure state: the time is passed in, nothing here waits or sends. A replica that joined is judged by its control
connection, a `--backend` by probes. Every life of a server is one `Replica` object, so a request that ends after its
replica left gives its place back to the object it was taken from, and no count can drift. A life whose control
connection broke and came back is the same object again, with what it still has in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final
from weakref import WeakValueDictionary

from proxy.breaker import Breaker
from proxy.errors import JoinRefused
from proxy.protocol import Hello, LoadReport

PROBE_FAILURES_OUT: Final = 3  # so many in a row put a backend out
PROBE_SUCCESSES_IN: Final = 2  # so many in a row bring it back

LIVE_FOR_S: Final = 0.02  # how long the list of live replicas stands while no event changes it; silence is no event
REQUEST_TOKENS: Final = 64  # what a request weighs beside its prompt: it will generate, nobody knows how much
LATENCY_WEIGHT: Final = 0.2  # of the newest answer in a replica's mean latency

ModelObjects = Mapping[str, Mapping[str, Any]]  # model id -> OpenAI's model object


class ReplicaState(StrEnum):
    """Whether a replica gets new requests; only LIVE ones do."""

    LIVE = "live"
    SUSPECT = "suspect"  # silent for longer than the heartbeat timeout
    LEAVING = "leaving"  # said so; what runs on it goes on
    UNREACHABLE = "unreachable"  # refused a connection, or its probes fail
    RECONFIGURING = "reconfiguring"  # its group is changing its members; requests wait for the moment this takes
    BROKEN = "broken"  # most of its answers failed; a single request will try it again


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Replica:
    """One life of one server. Only `Registry` and the requests' `InFlight` write to it."""

    replica_id: str
    incarnation: str
    url: str  # no slash at the end
    models: ModelObjects
    is_backend: bool
    last_seen_s: float
    group: str = ""  # replicas of a group step together; "" is a group of its own
    dp_rank: int | None = None
    model_hash: str = ""
    report: LoadReport | None = None  # its newest
    is_leaving: bool = False
    is_reachable: bool = True
    is_gone: bool = False  # its control connection ended: this life is over, unless it comes back
    in_flight: int = 0  # requests that this proxy has sent and not yet seen end
    in_flight_tokens: int = 0  # of their prompts, by their length
    foreign_requests: int = 0  # that others have sent: what its newest report says beyond our own
    latency_s: float = 0.0  # mean of its answers, the newest weighing most
    breaker: Breaker = field(default_factory=Breaker)
    probe_failures: int = 0  # in a row
    probe_successes: int = 0  # in a row

    @property
    def load(self) -> int:
        """Tokens that it has to do, as far as this proxy knows."""
        return self.in_flight_tokens + REQUEST_TOKENS * (self.in_flight + self.foreign_requests)

    def answered(self, took_s: float) -> None:
        """An answer of it ended after so long."""
        self.latency_s += (took_s - self.latency_s) * (LATENCY_WEIGHT if self.latency_s else 1.0)


class InFlight:
    """A request's place in a replica's count: taken before anything is sent, given back exactly once."""

    __slots__ = ("_replica", "_tokens")

    def __init__(self, replica: Replica, tokens: int = 0) -> None:
        self._replica: Replica | None = replica
        self._tokens = tokens
        replica.in_flight += 1
        replica.in_flight_tokens += tokens

    def release(self) -> None:
        """Gives the place back; a second call does nothing."""
        replica = self._replica
        if replica is not None:
            replica.in_flight -= 1
            replica.in_flight_tokens -= self._tokens
            self._replica = None

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(slots=True, kw_only=True)
class Registry:
    """Replicas by control connection, and backends by URL."""

    heartbeat_timeout_s: float
    on_change: Callable[[], None] = lambda: None  # called when some replica's state may have changed
    _joined: dict[int, Replica] = field(default_factory=dict)  # connection id -> replica
    _backends: dict[str, Replica] = field(default_factory=dict)  # url -> backend
    # (replica id, incarnation) -> replica, as long as it is joined or a request is in flight on it
    _lives: WeakValueDictionary[tuple[str, str], Replica] = field(default_factory=WeakValueDictionary)
    _reconfiguring: set[str] = field(default_factory=set)  # groups of which a member says so
    _live: list[Replica] = field(default_factory=list)
    _awake_until_s: float = float("inf")  # when the next tick is due; what comes later may only lie unread
    _live_until_s: float = float("-inf")  # when `_live` must be made anew, if nothing changes before

    def join(self, hello: Hello, models: ModelObjects, *, connection_id: int, now_s: float) -> int | None:
        """Makes a replica routable; returns the connection that this Hello puts out of use, if any.

        The newest Hello of a replica id wins: its older connection is a life that ended, or a line that broke
        without the proxy having noticed. From another URL it is another replica, which must not put out one that
        is alive: raises JoinRefused.
        """
        url = hello.url.rstrip("/")
        former_id = next((id_ for id_, known in self._joined.items() if known.replica_id == hello.replica_id), None)
        if former_id is not None:
            namesake = self._joined[former_id]
            if namesake.url != url and not self._is_silent(namesake, now_s):
                raise JoinRefused(f"replica_id {hello.replica_id!r} is in use by the live replica at {namesake.url}")
        replica = Replica(
            replica_id=hello.replica_id,
            incarnation=hello.incarnation,
            url=url,
            models=models,
            is_backend=False,
            last_seen_s=now_s,
            group=hello.group,
            dp_rank=hello.dp_rank,
            model_hash=hello.model_hash,
        )
        replica = self._lives.setdefault((hello.replica_id, hello.incarnation), replica)
        replica.url, replica.models, replica.last_seen_s = url, models, now_s
        replica.report, replica.is_leaving, replica.is_reachable, replica.is_gone = None, False, True, False
        if former_id is not None:
            former = self._joined.pop(former_id)
            former.is_gone = former is not replica
        self._joined[connection_id] = replica
        self._changed()
        return former_id

    def tick(self, *, now_s: float, every_s: float) -> None:
        """The process is awake, and says so `every_s`. While it was not, nobody was silent: it could not hear."""
        slept_s = now_s - self._awake_until_s
        if slept_s > 0:
            for replica in self._joined.values():
                replica.last_seen_s = min(now_s, replica.last_seen_s + slept_s)
        self._awake_until_s = now_s + every_s

    def report(self, connection_id: int, report: LoadReport, *, now_s: float) -> None:
        """Notes a replica's load; a report that is not newer than the last proves life and changes nothing else."""
        replica = self._joined.get(connection_id)
        if replica is None:
            return
        was_reconfiguring = replica.report is not None and replica.report.is_reconfiguring
        has_changed = not replica.is_reachable or self._is_silent(replica, now_s)
        replica.last_seen_s = now_s
        replica.is_reachable = True  # it is alive, so the next request may try it again
        if replica.report is None or report.sequence > replica.report.sequence:
            replica.report = report
            replica.foreign_requests = max(0, report.running + report.waiting - replica.in_flight)
        if has_changed or replica.report.is_reconfiguring != was_reconfiguring:
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

    def broke(self) -> None:
        """Some replica's breaker opened or closed."""
        self._changed()

    def state(self, replica: Replica, *, now_s: float) -> ReplicaState:
        """Whether the replica gets new requests, and if not, why."""
        if replica.is_leaving:
            return ReplicaState.LEAVING
        if self._is_silent(replica, now_s):
            return ReplicaState.SUSPECT
        if not replica.is_reachable:
            return ReplicaState.UNREACHABLE
        if _group(replica) in self._reconfiguring:  # the unit is the group: none of its members steps meanwhile
            return ReplicaState.RECONFIGURING
        return ReplicaState.LIVE if replica.breaker.allows(now_s) else ReplicaState.BROKEN

    def known(self) -> list[Replica]:
        """All replicas and backends, whatever their state."""
        return [*self._joined.values(), *self._backends.values()]

    def live(self, *, now_s: float) -> list[Replica]:
        """Those that new requests may go to. The same list until something changes; not to be written to."""
        if now_s >= self._live_until_s:
            known = self.known()
            self._live = [replica for replica in known if self.state(replica, now_s=now_s) is ReplicaState.LIVE]
            self._live_until_s = now_s + LIVE_FOR_S
        return self._live

    def may_be_live_soon(self, *, now_s: float) -> bool:
        """Whether some replica only waits for its group to have reconfigured."""
        return any(self.state(replica, now_s=now_s) is ReplicaState.RECONFIGURING for replica in self.known())

    def _is_silent(self, replica: Replica, now_s: float) -> bool:
        heard_until_s = min(now_s, self._awake_until_s)
        return not replica.is_backend and heard_until_s - replica.last_seen_s > self.heartbeat_timeout_s

    def _changed(self) -> None:
        self._reconfiguring = {
            _group(replica)
            for replica in self._joined.values()
            if replica.report is not None and replica.report.is_reconfiguring
        }
        self._live_until_s = float("-inf")
        self.on_change()


def _group(replica: Replica) -> str:
    """The group's name; a replica without one is a group of its own."""
    return replica.group or replica.replica_id
