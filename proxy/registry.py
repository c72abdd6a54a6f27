"""Which servers can take requests now, and how many each of them has in flight.

Pure state: the time is passed in, nothing here waits or sends. A replica that joined is judged by its control
connection, a `--backend` by probes. Every life of a server is one `Replica` object, so a request that ends after its
replica left gives its place back to the object it was taken from, and no count can drift. A life whose control
connection broke and came back is the same object again, with what it still has in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final
from weakref import WeakValueDictionary

from proxy.protocol import Hello, LoadReport

PROBE_FAILURES_OUT: Final = 3  # so many in a row put a backend out
PROBE_SUCCESSES_IN: Final = 2  # so many in a row bring it back

ModelObjects = Mapping[str, Mapping[str, Any]]  # model id -> OpenAI's model object


class ReplicaState(StrEnum):
    """Whether a replica gets new requests; only LIVE ones do."""

    LIVE = "live"
    SUSPECT = "suspect"  # silent for longer than the heartbeat timeout
    LEAVING = "leaving"  # said so; what runs on it goes on
    UNREACHABLE = "unreachable"  # refused a connection, or its probes fail


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Replica:
    """One life of one server. Only `Registry` and `InFlight` write to it."""

    replica_id: str
    incarnation: str
    url: str  # no slash at the end
    models: ModelObjects
    is_backend: bool
    last_seen_s: float
    load: LoadReport | None = None
    is_leaving: bool = False
    is_reachable: bool = True
    in_flight: int = 0  # requests that this proxy has sent and not yet seen end
    probe_failures: int = 0  # in a row
    probe_successes: int = 0  # in a row


class InFlight:
    """A request's place in a replica's count: taken before anything is sent, given back exactly once."""

    __slots__ = ("_replica",)

    def __init__(self, replica: Replica) -> None:
        self._replica: Replica | None = replica
        replica.in_flight += 1

    def release(self) -> None:
        """Gives the place back; a second call does nothing."""
        if self._replica is not None:
            self._replica.in_flight -= 1
            self._replica = None

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(slots=True, kw_only=True)
class Registry:
    """Replicas by control connection, and backends by URL."""

    heartbeat_timeout_s: float
    _joined: dict[int, Replica] = field(default_factory=dict)  # connection id -> replica
    _backends: dict[str, Replica] = field(default_factory=dict)  # url -> backend
    # (replica id, incarnation) -> replica, as long as it is joined or a request is in flight on it
    _lives: WeakValueDictionary[tuple[str, str], Replica] = field(default_factory=WeakValueDictionary)

    def join(self, hello: Hello, models: ModelObjects, *, connection_id: int, now_s: float) -> int | None:
        """Makes a replica routable; returns the connection that this Hello puts out of use, if any.

        The newest Hello of a replica id wins: its older connection is a life that ended, or a line that broke
        without the proxy having noticed.
        """
        url = hello.url.rstrip("/")
        replica = Replica(
            replica_id=hello.replica_id,
            incarnation=hello.incarnation,
            url=url,
            models=models,
            is_backend=False,
            last_seen_s=now_s,
        )
        replica = self._lives.setdefault((hello.replica_id, hello.incarnation), replica)
        replica.url, replica.models, replica.last_seen_s = url, models, now_s
        replica.load, replica.is_leaving, replica.is_reachable = None, False, True
        former_id = next((id_ for id_, known in self._joined.items() if known.replica_id == hello.replica_id), None)
        if former_id is not None:
            del self._joined[former_id]
        self._joined[connection_id] = replica
        return former_id

    def report(self, connection_id: int, report: LoadReport, *, now_s: float) -> None:
        """Notes a replica's load; a report that is not newer than the last proves life and changes nothing else."""
        replica = self._joined.get(connection_id)
        if replica is None:
            return
        replica.last_seen_s = now_s
        replica.is_reachable = True  # it is alive, so the next request may try it again
        if replica.load is None or report.sequence > replica.load.sequence:
            replica.load = report

    def leaving(self, connection_id: int) -> None:
        """The replica drains: no new requests."""
        replica = self._joined.get(connection_id)
        if replica is not None:
            replica.is_leaving = True

    def gone(self, connection_id: int) -> Replica | None:
        """The control connection ended; returns the replica that went with it, unless a newer Hello replaced it."""
        return self._joined.pop(connection_id, None)

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
        return backend

    def probe_succeeded(self, backend: Replica, models: ModelObjects, *, now_s: float) -> None:
        """A backend answered its probe and serves these models."""
        backend.probe_failures = 0
        backend.probe_successes += 1
        backend.models = models
        backend.last_seen_s = now_s
        if backend.probe_successes >= PROBE_SUCCESSES_IN:
            backend.is_reachable = True

    def probe_failed(self, backend: Replica) -> None:
        """A backend's probe failed otherwise than by a refused connection."""
        backend.probe_successes = 0
        backend.probe_failures += 1
        if backend.probe_failures >= PROBE_FAILURES_OUT:
            backend.is_reachable = False

    def connect_failed(self, replica: Replica) -> None:
        """Nobody listens at the replica's address: out at once, until its next report or its next good probes."""
        replica.is_reachable = False
        replica.probe_successes = 0

    def state(self, replica: Replica, *, now_s: float) -> ReplicaState:
        """Whether the replica gets new requests, and if not, why."""
        if replica.is_leaving:
            return ReplicaState.LEAVING
        if not replica.is_backend and now_s - replica.last_seen_s > self.heartbeat_timeout_s:
            return ReplicaState.SUSPECT
        return ReplicaState.LIVE if replica.is_reachable else ReplicaState.UNREACHABLE

    def known(self) -> list[Replica]:
        """All replicas and backends, whatever their state."""
        return [*self._joined.values(), *self._backends.values()]

    def live(self, *, now_s: float) -> list[Replica]:
        """Those that new requests may go to."""
        return [replica for replica in self.known() if self.state(replica, now_s=now_s) is ReplicaState.LIVE]
