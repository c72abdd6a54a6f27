"""The replica's HTTP side: routes, errors, limits, who may ask, and what it tells of itself."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from replica.api.server import build_app, max_body_bytes
from replica.engine import make_runner
from replica.lifecycle import EngineState, Lifecycle
from tests.protocol.fake_loop import CONFIG, MODEL, FakeLoop, replica
from tests.protocol.http_probe import BODY, CHAT, COMPLETIONS, PROMPT, post, raw_client, stream


async def test_request_id_is_kept_or_made_and_decides_the_seed(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        for given in ("same", "same", "a/b", "not an id", "x" * 200):
            async with session.post(url + CHAT, json=BODY, headers={"X-Request-Id": given}) as response:
                shown = response.headers["X-Request-Id"]
                assert (shown == given) is (given in ("same", "a/b"))
                assert (await response.json())["id"] == f"chatcmpl-{shown}"
        async with session.post(url + CHAT, json={**BODY, "stream": True}, headers={"X-Request-Id": "s"}) as response:
            assert response.headers["X-Request-Id"] == "s"
            await response.read()
        async with session.get(url + "/nowhere", headers={"X-Request-Id": "e"}) as response:
            assert response.headers["X-Request-Id"] == "e"
    seeds = [sequence.params.seed for sequence in loop.submitted]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 5


async def test_models_lists_the_served_model(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        async with session.get(url + "/v1/models") as response:
            listed = await response.json()
        async with session.get(url + "/v1/models/tiny-moe") as response:
            one = await response.json()
        async with session.get(url + "/v1/models/org/other") as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
    assert listed["object"] == "list" and listed["data"] == [one]
    assert one["id"] == "tiny-moe" and one["object"] == "model" and one["max_model_len"] == 4096


async def test_health_is_good_only_while_requests_are_served(session: ClientSession) -> None:
    loop, lifecycle = FakeLoop(), Lifecycle()

    async def health() -> tuple[int, str]:
        async with session.get(url + "/health") as response:
            body = await response.json()
            assert response.status == 200 or body["reason"]
            return response.status, body["status"]

    async with replica(loop, lifecycle=lifecycle) as url:
        assert await health() == (503, "loading")
        lifecycle.state = EngineState.READY
        assert await health() == (200, "ready")
        loop.is_stalled = True
        assert await health() == (503, "stalled")
        loop.is_stalled = False
        lifecycle.state, lifecycle.reason = EngineState.FAILED, "the worker died"
        assert await health() == (503, "failed")


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.DRAINING, EngineState.FAILED])
async def test_replica_that_is_not_ready_asks_to_come_again(session: ClientSession, state: EngineState) -> None:
    loop = FakeLoop()
    async with replica(loop, lifecycle=Lifecycle(state=state)) as url:
        for path, body in ((CHAT, BODY), (COMPLETIONS, {**PROMPT, "stream": True})):
            async with session.post(url + path, json=body) as response:
                error = (await response.json())["error"]
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                assert response.headers["X-Not-Begun"]
                assert str(state) in error["message"] and error["type"] == "service_unavailable"
    assert not loop.submitted


async def test_full_queue_is_a_503_for_another_replica_to_take(session: ClientSession) -> None:
    loop = FakeLoop()
    loop.is_full = True
    async with replica(loop) as url, session.post(url + CHAT, json={**BODY, "stream": True}) as response:
        assert response.status == 503 and response.headers["X-Not-Begun"]
        assert (await response.json())["error"]["message"] == "the queue is full"
        async with session.get(url + "/metrics") as scraped:
            rejections = 'vllm:admission_rejections_total{engine="0",model_name="tiny-moe",reason="max_waiting"} 1.0'
            assert rejections in (await scraped.text()).splitlines()


async def test_errors_have_openais_shape(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        assert await post(session, url + CHAT, {**BODY, "temperature": -1}) == (
            400,
            {
                "error": {
                    "message": "temperature is -1, must be a number from 0 to 2",
                    "type": "invalid_request_error",
                    "param": "temperature",
                    "code": None,
                }
            },
        )
        status, body = await post(session, url + CHAT, {**BODY, "model": "gpt-4o"})
        assert status == 404 and body["error"]["code"] == "model_not_found" and body["error"]["param"] == "model"
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 5000})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "5000 tokens, limit is 4095" in body["error"]["message"]
        async with session.post(url + CHAT, data=b"\xff\x00{") as response:
            assert response.status == 400 and "not valid JSON" in (await response.json())["error"]["message"]


async def test_unknown_routes_and_methods_have_openais_shape(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        async with session.get(url + "/v1/nowhere") as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "invalid_request_error"
        async with session.get(url + CHAT) as response:
            assert response.status == 405 and response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["message"]


async def test_prompt_beyond_the_cache_is_refused(session: ClientSession) -> None:
    loop = FakeLoop()
    loop.max_cached = 50
    async with replica(loop) as url:
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 60})
        assert status == 400 and "60 tokens, limit is 49: the KV cache" in body["error"]["message"]
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 40, "ignore_eos": True})
        assert status == 200 and body["usage"]["completion_tokens"] == 10


async def test_api_key_guards_openais_routes_alone(session: ClientSession) -> None:
    config = dataclasses.replace(CONFIG, api_key="s\N{LATIN SMALL LETTER E WITH ACUTE}cret")
    async with replica(FakeLoop(), config=config) as url:
        for header in (None, "Bearer wrong", "Basic secret", "Bearer", "\udcff"):
            headers: dict[str, str] = {} if header is None else {"Authorization": header}
            async with session.get(url + "/v1/models", headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        status, _ = await post(session, url + CHAT, BODY)
        assert status == 401
        headers = {"Authorization": f"Bearer {config.api_key}"}
        assert (await post(session, url + CHAT, BODY, headers=headers))[0] == 200
        for path in ("/health", "/metrics", "/version"):
            async with session.get(url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_body_over_the_limit_is_refused(session: ClientSession, is_declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 1024

    config = dataclasses.replace(CONFIG, max_body_mb=1 / 64)
    loop = FakeLoop()
    async with (
        replica(loop, config=config) as url,
        session.post(url + CHAT, data=b"x" * 40_960 if is_declared else pieces()) as response,
    ):
        message = (await response.json())["error"]["message"]
        assert response.status == 413 and "limit is 16384 (--max-body-mb)" in message


async def test_compressed_body_is_bounded_by_what_it_unpacks_to(session: ClientSession) -> None:
    config = dataclasses.replace(CONFIG, max_body_mb=1 / 64)
    headers = {"Content-Encoding": "gzip"}
    async with replica(FakeLoop(), config=config) as url:
        bomb = gzip.compress(b" " * 10_000_000)
        async with session.post(url + CHAT, data=bomb, headers=headers) as response:
            assert response.status == 413
        good = gzip.compress(json.dumps(BODY).encode())
        async with session.post(url + CHAT, data=good, headers=headers) as response:
            assert response.status == 200
        async with session.post(url + CHAT, data=b"no gzip at all", headers=headers) as response:
            assert response.status == 400 and "cannot be read" in (await response.json())["error"]["message"]


async def test_metrics_follow_requests(session: ClientSession) -> None:
    loop = FakeLoop()

    async def samples() -> dict[str, float]:
        async with session.get(url + "/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    labels = 'engine="0",model_name="tiny-moe"'
    async with replica(loop) as url:
        await post(session, url + CHAT, BODY)
        await stream(session, url + CHAT, BODY)
        await post(session, url + CHAT, {**BODY, "max_tokens": 1})
        await post(session, url + CHAT, {**BODY, "best_of": 3})
        await session.get(url + "/nowhere/" + "x" * 50)
        found = await samples()
        prompt_tokens = len(loop.submitted[0].prompt_ids)
    assert found[f"vllm:prompt_tokens_total{{{labels}}}"] == 3 * prompt_tokens
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 2 * len(loop.script) + 1
    stop = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny-moe"}'
    assert found[stop] == 2 and found[stop.replace("stop", "length")] == 1
    assert found[f"vllm:num_requests_running{{{labels}}}"] == 0
    assert found[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 3
    assert found[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 3
    assert found[f"vllm:request_time_per_output_token_seconds_count{{{labels}}}"] == 2
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
        assert found[f"vllm:request_{name}_count{{{labels}}}"] == 3
    for name in ("prompt_tokens", "generation_tokens", "params_n", "params_max_tokens"):
        assert found[f"vllm:request_{name}_count{{{labels}}}"] == 3
    assert found[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 2 * (len(loop.script) - 1)
    older = f"vllm:time_per_output_token_seconds_count{{{labels}}}"
    assert found[older] == found[f"vllm:inter_token_latency_seconds_count{{{labels}}}"]
    assert found[f"vllm:kv_cache_usage_perc{{{labels}}}"] == found[f"vllm:gpu_cache_usage_perc{{{labels}}}"] == 0
    assert found[f"lockstep_tasks{{{labels}}}"] > 0
    waiting = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny-moe",reason="capacity"}'
    assert found[waiting] == found[f"vllm:num_requests_waiting{{{labels}}}"] == 0
    assert found[f"lockstep_steps_total{{{labels}}}"] == loop.num_steps
    http = 'lockstep_http_requests_total{engine="0",model_name="tiny-moe",path="%s",status="%d"}'
    assert found[http % (CHAT, 200)] == 3 and found[http % (CHAT, 400)] == 1 and found[http % ("", 404)] == 1


async def test_version_is_told(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url, session.get(url + "/version") as response:
        assert (await response.json())["version"]


@pytest.mark.parametrize(
    ("max_model_len", "mib"), [(4096, 1), (8192, 1), (40_960, 5), (262_144, 32), (1_000_000, 32)], ids=str
)
def test_a_body_may_have_what_a_full_context_can_need(max_model_len: int, mib: int) -> None:
    assert max_body_bytes(CONFIG, max_model_len) == mib * 2**20
    assert max_body_bytes(dataclasses.replace(CONFIG, max_body_mb=0.5), max_model_len) == 2**19


@asynccontextmanager
async def engines_server() -> AsyncIterator[str]:
    """The HTTP server with the settings that an engine gives it."""
    app = build_app(config=CONFIG, model=MODEL, loop=FakeLoop(), lifecycle=Lifecycle(state=EngineState.READY))
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_malformed_request_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with engines_server() as url:
        for malformed in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
        ):
            async with raw_client(url, malformed) as (reader, _):
                assert b" 400 " in await reader.readline()
    assert not [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]


async def test_a_head_that_a_proxy_lets_through_is_taken() -> None:
    async with (
        engines_server() as url,
        ClientSession() as session,
        session.get(url + "/v1/models", headers={"X-Long": "x" * 60_000}) as response,
    ):
        assert response.status == 200


async def test_an_expectation_that_is_unknown_is_refused_in_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with engines_server() as url:
        fields = b"Host: x\r\nExpect: 200-maybe\r\nX-Request-Id: e\r\nContent-Length: 2\r\n"
        async with raw_client(url, b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n{}") as (reader, _):
            answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 417 " in answer and b"X-Request-Id: e\r\n" in answer
    assert not [record for record in caplog.records if record.exc_info]
