"""What the proxy counts, for Prometheus. One set per app, so that two apps in one process never meet.

What every request touches is kept in plain dicts and lists, which cost a tenth of prometheus_client's objects, and
takes their shape when it is asked for.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.admission import Admission
from proxy.groups import GroupState
from proxy.outcomes import Attempt
from proxy.registry import Registry
from proxy.replicas import ReplicaState

# A short answer takes milliseconds, a long generation minutes.
DURATION_BUCKETS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OWN_BUCKETS_S: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1)


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Shows it to Prometheus."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, accumulate(self.counts), strict=True)), self.total)


class Metrics:
    """The counters of one proxy; `text()` is what /metrics answers."""

    def __init__(self, registry: Registry, admission: Admission, clock: Callable[[], float]) -> None:
        self.requests: Tally[tuple[str, int]] = Tally()  # (route, status) -> requests that ended
        self.attempts: defaultdict[str, Tally[Attempt]] = defaultdict(Tally)  # replica id -> how they ended
        self.duration_s: defaultdict[str, Histogram] = defaultdict(Histogram)  # route ->
        self.first_byte_s: defaultdict[str, Histogram] = defaultdict(Histogram)  # replica id ->
        self.own_s = Histogram(OWN_BUCKETS_S)
        self.queue_s = Histogram()
        self._prometheus = CollectorRegistry()
        self._prometheus.register(_RequestCollector(self, admission))
        self._prometheus.register(_ReplicaCollector(registry, clock))
        self.upstream_failures = Counter(
            "lockstep_proxy_upstream_failures",
            "Times a replica did not answer whole: the error's code, or cut after the answer had begun.",
            ["reason"],
            registry=self._prometheus,
        )
        self.retries = Counter(
            "lockstep_proxy_retries", "Requests sent to a second replica.", ["reason"], registry=self._prometheus
        )
        self.strangers = Counter(
            "lockstep_proxy_strangers",
            "Connections dropped because the peer spoke no HTTP or was no replica.",
            registry=self._prometheus,
        )
        tasks = Gauge("lockstep_proxy_tasks", "Tasks of the proxy's event loop.", registry=self._prometheus)
        tasks.set_function(lambda: len(asyncio.all_tasks()))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. To be called on the event loop, whose tasks are counted."""
        return generate_latest(self._prometheus)

    def request_ended(self, route: str, status: int, duration_s: float) -> None:
        """A request ended."""
        self.requests[route, status] += 1
        self.duration_s[route].observe(duration_s)

    def forget_replicas(self, known: set[str]) -> None:
        """Drops the series of replicas that are gone, so that their number stays bounded."""
        for replica_id in self.attempts.keys() - known:
            del self.attempts[replica_id]
        for replica_id in self.first_byte_s.keys() - known:
            del self.first_byte_s[replica_id]


class _RequestCollector(Collector):
    """What is kept in plain dicts."""

    def __init__(self, metrics: Metrics, admission: Admission) -> None:
        self._metrics = metrics
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "lockstep_proxy_requests",
            "Requests that ended, by the answer's status (499: the client left first).",
            labels=["route", "status"],
        )
        for (route, status), count in self._metrics.requests.items():
            requests.add_metric([route, str(status)], count)
        attempts = CounterMetricFamily(
            "lockstep_proxy_replica_requests",
            "Requests that a replica was sent and that ended, by how they did.",
            labels=["replica", "outcome"],
        )
        for replica_id, tally in self._metrics.attempts.items():
            for attempt, count in tally.items():
                attempts.add_metric([replica_id, attempt], count)
        yield from (requests, attempts)
        yield from self._times()
        for name, value, text in (
            ("open_requests", self._admission.requests, "Requests that are under way."),
            ("open_tokens", self._admission.tokens, "Tokens of their prompts, as their bytes / 4."),
            ("waiting_requests", self._admission.waiting, "Requests that wait to be let in."),
        ):
            yield GaugeMetricFamily(f"lockstep_proxy_{name}", text, value=value)

    def _times(self) -> Iterator[Metric]:
        metrics = self._metrics
        duration = HistogramMetricFamily(
            "lockstep_proxy_request_duration_seconds",
            "From a request's head to the end of its answer.",
            labels=["route"],
        )
        for route, histogram in metrics.duration_s.items():
            histogram.add_to(duration, [route])
        first_byte = HistogramMetricFamily(
            "lockstep_proxy_first_byte_seconds",
            "The replica's time: from sending it a request to the first byte of its answer's body.",
            labels=["replica"],
        )
        for replica_id, histogram in metrics.first_byte_s.items():
            histogram.add_to(first_byte, [replica_id])
        own = HistogramMetricFamily(
            "lockstep_proxy_own_seconds",
            "The proxy's time: from a request's last byte to sending it to a replica, without the queue.",
        )
        metrics.own_s.add_to(own, [])
        queue = HistogramMetricFamily("lockstep_proxy_queue_seconds", "The queue's time, of requests that waited.")
        metrics.queue_s.add_to(queue, [])
        yield from (duration, first_byte, own, queue)


class _ReplicaCollector(Collector):
    """Reads the registry when asked, so a replica that left leaves no stale label behind."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now_s = self._clock()
        known = self._registry.known()
        states = Tally(self._registry.state(replica, now_s=now_s) for replica in known)
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
        yield from self._groups(now_s)

    def _groups(self, now_s: float) -> Iterator[Metric]:
        groups = self._registry.groups(now_s=now_s)
        by_state = GaugeMetricFamily("lockstep_proxy_groups", "Groups of replicas by state.", labels=["state"])
        states = Tally(state for _, state in groups.values())
        for state in GroupState:
            by_state.add_metric([state], states[state])
        epochs = GaugeMetricFamily(
            "lockstep_proxy_group_epoch", "The newest epoch that a group's members report.", labels=["group"]
        )
        for name, (group, _) in groups.items():
            epochs.add_metric([name], group.epoch)
        yield from (by_state, epochs)
