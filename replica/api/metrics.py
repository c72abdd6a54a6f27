"""What Prometheus reads of a replica: vLLM's names where the meaning is vLLM's, `lockstep_*` for the rest.

Every series has the labels `model_name` and `engine` (the dp rank), as vLLM's dashboards expect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.api.scheduler_metrics import SchedulerCollector
from replica.group_state import GroupState
from replica.request import FinishReason, Sequence
from replica.step_loop import EngineStats

LABELS: Final = ("model_name", "engine")
WAITING_LABELS: Final = (*LABELS, "reason")
# Upper bounds as in vLLM, so that its dashboards' quantiles stay comparable. Seconds; tokens.
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
BETWEEN_TOKENS: Final = "vllm:inter_token_latency_seconds"
OLDER_BETWEEN_TOKENS: Final = "vllm:time_per_output_token_seconds"  # as dashboards of former releases call it
TOKENS: Final = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


class Metrics:
    """The registry of one replica. `stats` is asked at every scrape."""

    def __init__(
        self,
        *,
        model_name: str,
        dp_rank: int = 0,
        block_size: int,
        has_prefix_cache: bool,
        stats: Callable[[], EngineStats],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self.now_s = now_s
        labels = {"model_name": model_name, "engine": str(dp_rank)}
        self.registry.register(_LoadCollector(labels, stats))
        self.registry.register(
            SchedulerCollector(labels, stats, block_size=block_size, has_prefix_cache=has_prefix_cache)
        )

        def counter(name: str, text: str, *further: str) -> Counter:
            return Counter(name, text, (*LABELS, *further), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(**labels)

        self._labels = labels
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.").labels(**labels)
        self.prompt_tokens_cached = counter(
            "vllm:prompt_tokens_cached", "Of these, tokens that the KV cache had already."
        ).labels(**labels)
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(**labels)
        by_source = counter("vllm:prompt_tokens_by_source", "Tokens of prompts, by where their KV is from.", "source")
        self.prompt_tokens_computed, self.prompt_tokens_found = (
            by_source.labels(**labels, source=source) for source in ("local_compute", "local_cache_hit")
        )
        rejections = counter(
            "vllm:admission_rejections", "Requests refused because too many wait, by the option that says so.", "reason"
        )
        self.rejections = rejections.labels(**labels, reason="max_waiting")
        self._success = counter(
            "vllm:request_success", "Ended requests, by the reason of their end.", "finished_reason"
        )
        self._http = counter("lockstep_http_requests", "Answered HTTP requests.", "path", "status")
        tasks = Gauge("lockstep_tasks", "Tasks of the engine's event loop.", LABELS, registry=self.registry)
        tasks.labels(**labels).set_function(_num_tasks)
        self.first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        between = Histogram(BETWEEN_TOKENS, "Between tokens.", LABELS, buckets=BETWEEN_TOKENS_S, registry=self.registry)
        self.between_tokens = between.labels(**labels)
        self.registry.register(_OlderName(between))
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time between tokens.", BETWEEN_TOKENS_S
        )
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY_S)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_S)
        self.inference = histogram("vllm:request_inference_time_seconds", "First step to last token.", LATENCY_S)
        self.decode = histogram("vllm:request_decode_time_seconds", "First token to last.", LATENCY_S)
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_S)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generated = histogram("vllm:request_generation_tokens", "Tokens generated of a request.", TOKENS)
        self.request_max = histogram("vllm:request_params_max_tokens", "Most tokens a request may get.", TOKENS)
        self.request_n = histogram("vllm:request_params_n", "Choices of a request.", CHOICES)

    def ended(self, reason: str) -> None:
        """A choice has ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def answered(self, *, path: str, status: int) -> None:
        """An HTTP request has its answer. `path` is a route's, so that clients make no new series."""
        self._http.labels(**self._labels, path=path, status=str(status)).inc()

    def text(self) -> bytes:
        """The exposition of all series. To be called on the event loop, whose tasks are counted."""
        return generate_latest(self.registry)


def _num_tasks() -> int:
    return len(asyncio.all_tasks())


class ChoiceTimes:
    """Observes one choice from its arrival to its end. `num_choices`: those of its prompt, itself included."""

    def __init__(self, metrics: Metrics, sequence: Sequence, *, num_choices: int) -> None:
        self._metrics = metrics
        self._sequence = sequence
        self._num_choices = num_choices
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0

    def output(self, num_tokens: int) -> None:
        """`num_tokens` more have come, together."""
        if not num_tokens:
            return
        metrics, sequence = self._metrics, self._sequence
        now_s = metrics.now_s()
        if self._num_tokens:
            metrics.between_tokens.observe((now_s - self._last_s) / num_tokens)
        else:
            self._first_s = now_s
            metrics.first_token.observe(now_s - sequence.arrived_s)
            num_cached = sequence.num_cached or 0
            metrics.prompt_tokens.inc(len(sequence.prompt_ids))
            metrics.prompt_tokens_cached.inc(num_cached)
            metrics.prompt_tokens_found.inc(num_cached)
            metrics.prompt_tokens_computed.inc(len(sequence.prompt_ids) - num_cached)
        self._last_s = now_s
        self._num_tokens += num_tokens
        metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: str) -> None:
        """The choice has ended. Times are observed only of those that ended well."""
        metrics, sequence = self._metrics, self._sequence
        metrics.ended(reason)
        if reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.LOST):
            return
        decode_s = self._last_s - self._first_s
        started_s = sequence.started_s or sequence.arrived_s
        metrics.queue.observe(started_s - sequence.arrived_s)
        metrics.prefill.observe(self._first_s - started_s)
        metrics.inference.observe(self._last_s - started_s)
        metrics.latency.observe(self._last_s - sequence.arrived_s)
        metrics.decode.observe(decode_s)
        metrics.request_prompt.observe(len(sequence.prompt_ids))
        metrics.request_generated.observe(self._num_tokens)
        metrics.request_max.observe(sequence.params.max_tokens)
        metrics.request_n.observe(self._num_choices)
        if self._num_tokens > 1:
            metrics.per_token.observe(decode_s / (self._num_tokens - 1))


class _LoadCollector(Collector):
    """The engine's state, read when it is scraped."""

    def __init__(self, labels: dict[str, str], stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One sample of each series."""
        stats = self._stats()
        used = stats.total_blocks - stats.free_blocks
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences not started.", stats.waiting)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second one for older dashboards
            share = used / max(1, stats.total_blocks)
            yield self._gauge(f"vllm:{name}", "Share of KV blocks in use, 0 to 1.", share)
        waits = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences not started, by what they wait for.",
            labels=WAITING_LABELS,
        )
        waits.add_metric([*self._labels.values(), "capacity"], stats.waiting)
        yield waits
        yield self._gauge(
            "lockstep_queued_prefill_tokens", "Prompt tokens not computed yet.", stats.queued_prefill_tokens
        )
        yield self._gauge("lockstep_kv_blocks", "KV blocks there are.", stats.total_blocks)
        yield self._gauge("lockstep_kv_blocks_used", "KV blocks in use.", used)
        yield self._gauge("lockstep_epoch", "The group's membership epoch.", stats.epoch)
        yield self._counter("lockstep_steps", "Forward steps done.", stats.step)
        yield self._counter(
            "lockstep_idle_steps", "Of these, steps without tokens, for other replicas of the group.", stats.idle_steps
        )
        yield self._counter(
            "lockstep_barrier_wait_seconds", "Waited for the release of steps with own work.", stats.barrier_wait_s
        )
        yield self._counter("lockstep_forward_seconds", "From a release to the ranks' answer.", stats.forward_s)
        yield self._counter(
            "lockstep_prefill_skew_tokens",
            "Tokens that the longest prefill of each step of the group had more than this replica's.",
            stats.prefill_skew_tokens,
        )
        yield from self._group(stats.group)

    def _group(self, group: GroupState) -> Iterator[Metric]:
        yield self._gauge("lockstep_group_members", "Replicas of the group that live.", len(group.members))
        evictions = CounterMetricFamily(
            "lockstep_evictions",
            "Replicas that the group went on without, by what spoke against them.",
            labels=(*LABELS, "kind"),
        )
        for kind, number in group.evicted_by_kind.items():
            evictions.add_metric([*self._labels.values(), kind], number)
        yield evictions
        yield self._counter("lockstep_reconfigurations", "New epochs after the first.", group.num_reconfigurations)
        seconds = CounterMetricFamily(
            "lockstep_reconfiguration_seconds",
            "Time that reconfigurations took, by the part that it was spent on.",
            labels=(*LABELS, "part"),
        )
        for part, took_s in group.seconds.items():
            seconds.add_metric([*self._labels.values(), part], took_s)
        yield seconds

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(list(self._labels.values()), value)
        return counter


class _OlderName(Collector):
    """The times between tokens once more, so that they need to be observed only once."""

    def __init__(self, between_tokens: Histogram) -> None:
        self._between_tokens = between_tokens

    def collect(self) -> Iterator[Metric]:
        """The same samples."""
        for metric in self._between_tokens.collect():
            older = Metric(OLDER_BETWEEN_TOKENS, metric.documentation, metric.type)
            for sample in metric.samples:
                older.samples.append(sample._replace(name=sample.name.replace(BETWEEN_TOKENS, OLDER_BETWEEN_TOKENS)))
            yield older
