"""The series that vLLM's dashboards read: their names, kinds, labels and buckets."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replica.api.metrics import Metrics
from tests.protocol.fake_loop import FakeLoop

GAUGES: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
)
COUNTERS: Final = (
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
    *("prompt_tokens_by_source", "admission_rejections"),
    *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
)
FIRST_TOKEN_S: Final = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN_TOKENS_S: Final = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
LATENCY_S: Final = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
HISTOGRAMS: Final = {
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": BETWEEN_TOKENS_S,
    "time_per_output_token_seconds": BETWEEN_TOKENS_S,
    "request_time_per_output_token_seconds": BETWEEN_TOKENS_S,
    **{
        name: LATENCY_S
        for name in (
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
            *("request_decode_time_seconds", "request_inference_time_seconds"),
        )
    },
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    metrics = Metrics(model_name="m", dp_rank=3, stats=FakeLoop().stats, block_size=16, has_prefix_cache=True)
    metrics.ended("stop")

    async def exposed() -> str:
        return metrics.text().decode()

    return {family.name: family for family in text_string_to_metric_families(asyncio.run(exposed()))}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "gauge") for name in GAUGES),
        *((name, "counter") for name in COUNTERS),
        *((name, "histogram") for name in HISTOGRAMS),
    ],
)
def test_series_of_vllm_is_there_with_its_labels(families: dict[str, Any], name: str, kind: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == kind
    for sample in family.samples:
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "3")


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_those_of_vllm(families: dict[str, Any], name: str) -> None:
    samples = families[f"vllm:{name}"].samples
    bounds = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
    assert bounds == [*map(float, HISTOGRAMS[name].split()), float("inf")]
