"""What clients see of prefix cache, preemption and priorities: the same answers, and counts in usage and metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from tests.model_replica import ModelReplica, model_replica

TEXT: Final = "Tell me how much 12 + 30 is. Then say which day comes after Monday, and why that is so. "
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "why": {"type": "string", "maxLength": 12}},
    "required": ["sum", "why"],
}
# Each must be the same whether its prompt was computed, found, or computed anew after a preemption.
COMPLETIONS: Final[list[dict[str, Any]]] = [
    {"temperature": 0},
    {"n": 3, "seed": 5},
    {"echo": True, "logprobs": 3, "temperature": 0},
    {"n": 2, "logprobs": 1, "seed": 8, "frequency_penalty": 0.8},
    {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {"87": -3.5}},
    {"temperature": 0, "min_tokens": 12, "stop_token_ids": [87, 220, 269], "ignore_eos": False},
]
CHAT: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": TEXT}],
    "max_completion_tokens": 60,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "seed": 3,
}


async def ask(replica: ModelReplica, path: str, body: dict[str, Any], **headers: str) -> Any:
    async with ClientSession() as session, session.post(replica.url + path, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def metrics(replica: ModelReplica) -> dict[str, float]:
    async with ClientSession() as session, session.get(replica.url + "/metrics") as response:
        text = await response.text()
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


async def ask_all(replica: ModelReplica) -> list[Any]:
    """All kinds of requests at once, and what was said."""
    shared: dict[str, Any] = {"prompt": TEXT * 2, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    asked = [ask(replica, "/v1/completions", shared | fields) for fields in COMPLETIONS]
    answers = await asyncio.gather(*asked, ask(replica, "/v1/chat/completions", CHAT))
    return [said(choice) for answer in answers for choice in answer["choices"]]


def said(choice: dict[str, Any]) -> Any:
    logprobs = [round(value, 3) for value in (choice["logprobs"] or {}).get("token_logprobs", []) if value is not None]
    return choice.get("text"), choice.get("message"), choice.get("token_ids"), choice["finish_reason"], logprobs


@pytest.mark.timeout(120)
async def test_every_kind_of_request_is_answered_alike_from_the_cache_after_preemptions_and_without_both() -> None:
    async with model_replica(no_prefix_cache=True) as replica:
        expected = await ask_all(replica)
    async with model_replica() as replica:
        for _ in range(2):
            assert await ask_all(replica) == expected
        assert (await metrics(replica))["vllm:prefix_cache_hits_total"] > 0
    async with model_replica(num_blocks=24) as replica:
        answers = await asyncio.gather(*(ask_all(replica) for _ in range(3)))
        assert answers == [expected] * 3
        assert (await metrics(replica))["vllm:num_preemptions_total"] > 0


async def test_usage_says_in_every_api_how_much_of_a_prompt_was_cached() -> None:
    messages = {"messages": [{"role": "user", "content": TEXT}]}
    async with model_replica(served_model_name="m") as replica:
        first = await ask(replica, "/v1/chat/completions", messages | {"max_completion_tokens": 2})
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        num_prompt = first["usage"]["prompt_tokens"]
        cached = (num_prompt - 1) // 16 * 16
        again = await ask(replica, "/v1/chat/completions", messages | {"max_completion_tokens": 2, "n": 2})
        assert again["usage"]["prompt_tokens"] == num_prompt
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        response = await ask(replica, "/v1/responses", {"input": TEXT, "max_output_tokens": 2})
        assert response["usage"]["input_tokens"] == num_prompt
        assert response["usage"]["input_tokens_details"] == {"cached_tokens": cached}
        message = await ask(replica, "/v1/messages", {"model": "m", "max_tokens": 2} | messages)
        assert message["usage"]["cache_read_input_tokens"] == cached
        assert message["usage"]["input_tokens"] == num_prompt - cached
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 2}
        async with (
            ClientSession() as session,
            session.post(f"{replica.url}/v1/chat/completions", json=messages | streamed) as answer,
        ):
            events = [line[6:] for line in (await answer.text()).split("\n\n") if line.startswith("data: {")]
        assert json.loads(events[-1])["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_metrics_tell_of_the_cache_by_vllm_s_names() -> None:
    async with model_replica(num_blocks=64, max_num_batched_tokens=64) as replica:
        for _ in range(2):
            answer = await ask(replica, "/v1/completions", {"prompt": [7] * 40, "max_tokens": 3, "ignore_eos": True})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        found = await metrics(replica)
        async with ClientSession() as session, session.get(replica.url + "/metrics") as response:
            text = await response.text()
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == 80
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prompt_tokens_cached_total"] == 32
    by_source = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny-moe",source="local_%s"} %.1f'
    assert by_source % ("compute", 48) in text and by_source % ("cache_hit", 32) in text
    assert found["vllm:num_preemptions_total"] == found["vllm:kv_cache_usage_perc"] == 0
    assert (found["vllm:iteration_tokens_total_count"], found["vllm:iteration_tokens_total_sum"]) == (6, 40 + 8 + 4)
    buckets = [line.split()[-1] for line in text.splitlines() if "iteration_tokens_total_bucket" in line]
    assert [float(count) for count in buckets] == [4, 5, 5, 5, *[6] * 10]  # 1, 8, 16, 32, 64 tokens and more
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label in (
        'block_size="16"',
        'num_gpu_blocks="64"',
        'kv_cache_size_tokens="1024"',
        'enable_prefix_caching="True"',
    ):
        assert label in info
    assert info.endswith(" 1.0")


@pytest.mark.parametrize(
    ("low", "low_header", "high", "high_header"),
    [({"priority": 3}, {}, {"priority": -3}, {}), ({}, {"X-Priority": "low"}, {}, {"X-Priority": "high"})],
    ids=["field", "header"],
)
async def test_an_urgent_request_does_not_wait_for_one_that_is_not(
    low: dict[str, int], low_header: dict[str, str], high: dict[str, int], high_header: dict[str, str]
) -> None:
    shared: dict[str, Any] = {"prompt": TEXT, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    async with model_replica(max_num_seqs=1) as replica:
        alone = await ask(replica, "/v1/completions", shared)
        slow = asyncio.create_task(ask(replica, "/v1/completions", shared | low, **low_header))
        await replica.until(lambda: replica.loop.stats().running == 1)
        await ask(replica, "/v1/completions", shared | high | {"max_tokens": 1}, **high_header)
        assert not slow.done()
        assert (await slow)["choices"] == alone["choices"]  # although it was interrupted


async def test_a_priority_that_is_none_is_refused() -> None:
    async with model_replica() as replica, ClientSession() as session:
        for body, headers, message in (
            ({"priority": "high"}, {}, "priority"),
            ({}, {"X-Priority": "urgent"}, "must be one of high, normal, low"),
        ):
            async with session.post(
                f"{replica.url}/v1/completions", json={"prompt": "a"} | body, headers=headers
            ) as response:
                assert response.status == 400
                assert message in (await response.json())["error"]["message"]
