"""One life of one server that takes requests, and a request's place on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

from proxy.breaker import Breaker
from proxy.protocol import LoadReport

LATENCY_WEIGHT: Final = 0.2  # of the newest answer in a replica's mean latency
REQUEST_TOKENS: Final = 64  # what a request weighs beside its prompt: it will generate, nobody knows how much

ModelObjects = Mapping[str, Mapping[str, Any]]  # model id -> OpenAI's model object


class ReplicaState(StrEnum):
    """Whether a replica gets new requests; only LIVE ones do."""

    LIVE = "live"
    SUSPECT = "suspect"  # silent for longer than the heartbeat timeout
    LEAVING = "leaving"  # said so; what runs on it goes on
    UNREACHABLE = "unreachable"  # refused a connection, or its probes fail
    RECONFIGURING = "reconfiguring"  # its group is changing its members; requests wait for the moment this takes
    EVICTED = "evicted"  # its group goes on without it; what ran on it is lost
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
    group: str = ""  # replicas of a group step together; a backend is in none
    dp_rank: int | None = None
    model_hash: str = ""
    report: LoadReport | None = None  # its newest
    is_leaving: bool = False
    is_reachable: bool = True
    is_gone: bool = False  # its control connection ended: this life is over, unless it comes back
    is_evicted: bool = False  # its group went on without it: what it was doing is void
    in_flight: int = 0  # requests that this proxy has sent and not yet seen end
    in_flight_tokens: int = 0  # of their prompts, by their length
    foreign_requests: int = 0  # that others have sent: what its reports say beyond our own
    ended_since_report: int = 0  # of our requests
    load: int = 0  # tokens that it has to do, as far as this proxy knows: of all of these
    latency_s: float = 0.0  # mean of its answers, the newest weighing most
    breaker: Breaker = field(default_factory=Breaker)
    probe_failures: int = 0  # in a row
    probe_successes: int = 0  # in a row

    def came_back(self, url: str, models: ModelObjects, now_s: float) -> None:
        """Its control connection, which was lost, is there again; the new one counts its reports anew."""
        self.url, self.models, self.last_seen_s = url, models, now_s
        self.report = None
        self._has_foreign(0)
        self.is_leaving = self.is_gone = False
        self.is_reachable = True

    def answered(self, took_s: float) -> None:
        """An answer of it ended after so long."""
        self.latency_s += (took_s - self.latency_s) * (LATENCY_WEIGHT if self.latency_s else 1.0)

    def reported(self, report: LoadReport) -> None:
        """Its newest report. What it counts beyond our own requests is others'.

        While the report was on its way, a request of ours may have come to the replica, and then counts less of
        others', or may have ended, and must not count as one of others': so the estimate never exceeds what is there
        beyond those in flight now, and it grows only by what remains if all that ended since the last report is in
        this one, too. With none of ours on its way there or ending, it is exact.
        """
        self.report = report
        beyond = max(0, report.running + report.waiting - self.in_flight)
        self._has_foreign(min(beyond, max(self.foreign_requests, beyond - self.ended_since_report)))
        self.ended_since_report = 0

    def _has_foreign(self, requests: int) -> None:
        self.load += REQUEST_TOKENS * (requests - self.foreign_requests)
        self.foreign_requests = requests

    @property
    def is_dead(self) -> bool:
        """Whether this life surely runs no request any more."""
        return self.is_gone or self.is_evicted


class InFlight:
    """A request's place in a replica's count: taken before anything is sent, given back exactly once."""

    __slots__ = ("_replica", "_tokens")

    def __init__(self, replica: Replica, tokens: int = 0) -> None:
        self._replica: Replica | None = replica
        self._tokens = tokens
        replica.in_flight += 1
        replica.in_flight_tokens += tokens
        replica.load += tokens + REQUEST_TOKENS

    def release(self) -> None:
        """Gives the place back; a second call does nothing."""
        replica = self._replica
        if replica is not None:
            replica.in_flight -= 1
            replica.ended_since_report += 1
            replica.in_flight_tokens -= self._tokens
            replica.load -= self._tokens + REQUEST_TOKENS
            self._replica = None

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
