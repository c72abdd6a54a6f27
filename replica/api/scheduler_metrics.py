"""What Prometheus reads of the scheduler: prefix cache, preemptions, sizes of steps. Names and labels are vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.step_loop import EngineStats

STEP_TOKENS: Final = (1, *(2**power for power in range(3, 15)))  # upper bounds


class SchedulerCollector(Collector):
    """The scheduler's counts, read when they are scraped."""

    def __init__(
        self, labels: dict[str, str], stats: Callable[[], EngineStats], *, block_size: int, has_prefix_cache: bool
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._block_size = block_size
        self._has_prefix_cache = has_prefix_cache

    def collect(self) -> Iterator[Metric]:
        """One sample of each series."""
        stats = self._stats()
        counts = stats.counts
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Of these, tokens that it had.", counts.prefix_hits)
        yield self._counter(
            "vllm:num_preemptions",
            "Sequences that gave up their KV blocks, to be computed anew.",
            counts.num_preemptions,
        )
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=list(self._labels))
        sum_value = sum(num_tokens * num_steps for num_tokens, num_steps in counts.step_tokens.items())
        steps.add_metric(list(self._labels.values()), _buckets(counts.step_tokens), sum_value)
        yield steps
        cache = {
            "block_size": self._block_size,
            "num_gpu_blocks": stats.total_blocks,  # of whatever device
            "kv_cache_size_tokens": stats.total_blocks * self._block_size,
            "enable_prefix_caching": self._has_prefix_cache,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache; always 1.", labels=[*self._labels, *cache])
        info.add_metric([*self._labels.values(), *map(str, cache.values())], 1)
        yield info

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=list(self._labels))
        counter.add_metric(list(self._labels.values()), value)
        return counter


def _buckets(step_tokens: Counter[int]) -> list[tuple[str, float]]:
    """For each upper bound, how many steps had no more tokens."""
    bounds = [(str(float(bound)), bound) for bound in STEP_TOKENS]
    made = [(name, float(sum(n for size, n in step_tokens.items() if size <= bound))) for name, bound in bounds]
    return [*made, ("+Inf", float(step_tokens.total()))]
