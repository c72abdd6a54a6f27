"""What the proxy counts, for Prometheus. One registry per app, so that two apps in one process never meet."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.registry import Registry, ReplicaState

# A short answer takes milliseconds, a long generation minutes.
DURATION_BUCKETS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one proxy; `text()` is what /metrics answers."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._prometheus = CollectorRegistry()
        self._prometheus.register(_ReplicaCollector(registry, clock))
        self.requests = Counter(
            "lockstep_proxy_requests",
            "Requests that ended, by the answer's status (499: the client left first).",
            ["route", "status"],
            registry=self._prometheus,
        )
        self.request_duration_s = Histogram(
            "lockstep_proxy_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ["route"],
            buckets=DURATION_BUCKETS_S,
            registry=self._prometheus,
        )
        self.first_byte_s = Histogram(
            "lockstep_proxy_first_byte_seconds",
            "From sending a request to a replica to the first byte of its answer's body.",
            buckets=DURATION_BUCKETS_S,
            registry=self._prometheus,
        )
        self.upstream_failures = Counter(
            "lockstep_proxy_upstream_failures",
            "Times a replica did not answer whole: the error's code, or cut after the answer had begun.",
            ["reason"],
            registry=self._prometheus,
        )
        self.strangers = Counter(
            "lockstep_proxy_strangers",
            "Connections dropped because the peer spoke no HTTP or was no replica.",
            registry=self._prometheus,
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._prometheus)


class _ReplicaCollector(Collector):
    """Reads the registry when asked, so a replica that left leaves no stale label behind."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        known = self._registry.known()
        states = Tally(self._registry.state(replica, now_s=self._clock()) for replica in known)
        by_state = GaugeMetricFamily("lockstep_proxy_replicas", "Replicas and backends by state.", labels=["state"])
        for state in ReplicaState:
            by_state.add_metric([state], states[state])
        yield by_state

        in_flight = GaugeMetricFamily(
            "lockstep_proxy_requests_in_flight", "Requests sent to a replica and not yet ended.", labels=["replica"]
        )
        running = GaugeMetricFamily(
            "lockstep_proxy_replica_running_sequences", "As the replica last reported.", labels=["replica"]
        )
        waiting = GaugeMetricFamily(
            "lockstep_proxy_replica_waiting_sequences", "As the replica last reported.", labels=["replica"]
        )
        for replica in known:
            in_flight.add_metric([replica.replica_id], replica.in_flight)
            if replica.report is not None:
                running.add_metric([replica.replica_id], replica.report.running)
                waiting.add_metric([replica.replica_id], replica.report.waiting)
        yield from (in_flight, running, waiting)
