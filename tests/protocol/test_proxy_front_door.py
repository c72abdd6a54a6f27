"""What clients see: health, models, errors, choice and retry, disconnects, and the drain."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from tests.commands import free_port
from tests.protocol.proxy_fakes import (
    CHAT,
    MODEL,
    FakeReplica,
    RunningProxy,
    answer_never,
    answer_ok,
    eventually,
    fake_replica,
    hello,
    joined,
    running_proxy,
    stream_for_ever,
)

ENDED = 'lockstep_proxy_requests_total{{route="/v1/chat/completions",status="{}"}}'
DISCONNECT_BOUND_S = 0.5  # what a busy machine needs at the most for what takes a few milliseconds


async def is_at_rest(proxy: RunningProxy, *replicas: FakeReplica) -> bool:
    """Whether nothing is in flight, neither by the proxy's count nor at the replicas."""
    return await proxy.in_flight() == 0 and all(replica.open_requests == 0 for replica in replicas)


async def test_health_is_200_only_while_a_replica_is_live() -> None:
    async with running_proxy() as proxy:

        async def status() -> int:
            async with proxy.client.get(f"{proxy.url}/health") as response:
                return response.status

        assert await status() == 503
        async with joined(proxy, hello("http://127.0.0.1:9", replica_id="r")):
            assert await status() == 200
        await proxy.wait_state("r", None)
        assert await status() == 503


async def test_models_are_those_of_live_replicas_each_once() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        for number, model in enumerate(("a", "org/b", "a")):
            introduction = hello("http://127.0.0.1:9", replica_id=f"r{number}", model=model, max_model_len=99)
            line = await stack.enter_async_context(joined(proxy, introduction))
        async with proxy.client.get(f"{proxy.url}/v1/models") as response:
            listed = await response.json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["a", "org/b"]
        assert all(model["object"] == "model" and model["created"] > 0 for model in listed["data"])
        async with proxy.client.get(f"{proxy.url}/v1/models/org/b") as response:
            assert response.status == 200 and (await response.json())["max_model_len"] == 99
        async with proxy.client.get(f"{proxy.url}/v1/models/c") as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
        await line.leave()
        await proxy.wait_state("r2", "leaving")
        async with proxy.client.get(f"{proxy.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["a", "org/b"]


async def test_without_a_replica_there_is_a_503_with_retry_after_even_for_a_bad_body() -> None:
    async with running_proxy() as proxy:
        for body in (b'{"model": "tiny"}', b"{"):
            async with proxy.client.post(proxy.url + CHAT, data=body) as response:
                error = (await response.json())["error"]
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                assert set(error) == {"message", "type", "param", "code"} and error["code"] == "no_replica_available"


async def test_a_bad_body_is_for_the_replica_to_judge() -> None:
    async def judge(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "not JSON"}}, status=400)

    async with running_proxy() as proxy, fake_replica(judge) as replica, joined(proxy, hello(replica.url)):
        async with proxy.client.post(proxy.url + CHAT, data=b'{"model": ') as response:
            assert response.status == 400 and (await response.json())["error"]["message"] == "not JSON"
        assert replica.received[0].body == b'{"model": '


async def test_an_unknown_model_is_404_without_asking_a_replica() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        async with proxy.ask("gpt-9") as response:
            error = (await response.json())["error"]
            assert response.status == 404 and error["code"] == "model_not_found" and MODEL in error["message"]
        assert replica.received == []


async def test_the_api_key_is_wanted_on_the_openai_routes_and_passed_on() -> None:
    async with running_proxy(api_key="key") as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)), aiohttp.ClientSession() as anybody:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key"}):
                for path in ("/v1/models", "/v1/models/tiny"):
                    async with anybody.get(proxy.url + path, headers=headers) as response:
                        assert response.status == 401, path
                async with anybody.post(proxy.url + CHAT, json={}, headers=headers) as response:
                    assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
            for path in ("/health", "/metrics"):
                async with anybody.get(proxy.url + path) as response:
                    assert response.status == 200
            assert replica.received == []
            async with proxy.ask() as response:
                assert response.status == 200
            assert replica.received[0].all("Authorization") == ["Bearer key"]


async def test_unknown_paths_and_methods_are_errors_in_openai_s_shape() -> None:
    async with running_proxy() as proxy:
        for method, path, status in (("GET", "/", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
            async with proxy.client.request(method, proxy.url + path) as response:
                assert response.status == status
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_request_goes_to_the_replica_with_fewer_in_flight_and_equals_take_turns() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        busy = await stack.enter_async_context(fake_replica(stream_for_ever))
        await stack.enter_async_context(joined(proxy, hello(busy.url)))
        streams = [await stack.enter_async_context(proxy.ask()) for _ in range(2)]
        idle = [await stack.enter_async_context(fake_replica(answer_ok)) for _ in range(2)]
        for replica in idle:
            await stack.enter_async_context(joined(proxy, hello(replica.url)))
        for _ in range(10):
            async with proxy.ask() as response:
                assert response.status == 200
        assert [len(replica.received) for replica in (busy, *idle)] == [2, 5, 5]
        for stream in streams:
            stream.close()
        await eventually(lambda: is_at_rest(proxy, busy, *idle), "nothing is in flight")


async def test_a_replica_that_refuses_the_connection_is_passed_over_and_left_alone() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        good = await stack.enter_async_context(fake_replica(answer_ok))
        dead = hello(f"http://127.0.0.1:{free_port()}", replica_id="dead")
        await stack.enter_async_context(joined(proxy, dead, beats=False))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        for number in range(6):
            async with proxy.ask(n=number) as response:
                assert response.status == 200
        assert [json.loads(received.body)["n"] for received in good.received] == list(range(6))
        assert (await proxy.nodes())["dead"]["state"] == "unreachable"
        assert await proxy.metric('lockstep_proxy_upstream_failures_total{reason="connect_failed"}') == 1


async def test_no_more_than_two_replicas_are_tried_and_then_there_is_a_503() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        for number in range(4):
            dead = hello(f"http://127.0.0.1:{free_port()}", replica_id=f"dead{number}")
            await stack.enter_async_context(joined(proxy, dead, beats=False))
        for tried in (2, 4):
            async with proxy.ask() as response:
                assert response.status == 503 and "Retry-After" in response.headers
            assert await proxy.metric('lockstep_proxy_upstream_failures_total{reason="connect_failed"}') == tried
        async with proxy.ask() as response:
            assert response.status == 503
        assert await proxy.metric('lockstep_proxy_upstream_failures_total{reason="connect_failed"}') == 4
        assert await proxy.in_flight() == 0


async def test_a_client_that_leaves_a_stream_ends_it_at_the_replica() -> None:
    async with running_proxy() as proxy, fake_replica(stream_for_ever) as replica, joined(proxy, hello(replica.url)):
        async with proxy.ask(stream=True) as response:
            await response.content.readchunk()
            assert await proxy.in_flight() == 1
            response.close()
            took_s = await eventually(replica.is_idle, "the replica's stream has ended")
        assert took_s < DISCONNECT_BOUND_S and replica.cancelled == 1
        await eventually(lambda: is_at_rest(proxy, replica), "nothing is in flight")


async def test_a_client_that_leaves_before_any_answer_ends_its_request_at_the_replica() -> None:
    async with running_proxy() as proxy, fake_replica(answer_never) as replica, joined(proxy, hello(replica.url)):
        asking = asyncio.create_task(proxy.client.post(proxy.url + CHAT, json={"model": MODEL}))

        async def is_open() -> bool:
            return replica.open_requests == 1

        await eventually(is_open, "the replica has the request")
        asking.cancel()
        took_s = await eventually(replica.is_idle, "the replica's request has ended")
        assert took_s < DISCONNECT_BOUND_S and replica.cancelled == 1
        await eventually(lambda: is_at_rest(proxy, replica), "nothing is in flight")
        assert await proxy.metric(ENDED.format(499)) == 1


async def test_a_client_that_leaves_while_it_sends_its_request_bothers_no_replica() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

        async def is_noticed() -> bool:
            return await proxy.metric('lockstep_proxy_requests_total{route="/v1/completions",status="499"}') == 1

        await eventually(is_noticed, "the proxy knows that the client left")
        assert replica.received == [] and await is_at_rest(proxy, replica)


async def test_a_client_that_sends_its_request_too_slowly_is_told_so() -> None:
    async with running_proxy(client_timeout_s=0.2) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):

            async def slow():  # type: ignore[no-untyped-def]
                yield b"{"
                await asyncio.sleep(0.6)
                yield b"}"

            async with proxy.client.post(proxy.url + CHAT, data=slow()) as response:
                assert response.status == 400 and "0.2 s" in (await response.json())["error"]["message"]
            assert replica.received == []


async def test_200_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    moments = random.Random(20)

    async def generate(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(moments.random() * 0.05)
        if moments.random() < 0.3:
            return await answer_ok(request)
        return await stream_for_ever(request)

    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        replicas = [await stack.enter_async_context(fake_replica(generate)) for _ in range(2)]
        for replica in replicas:
            await stack.enter_async_context(joined(proxy, hello(replica.url)))
        idle_tasks = len(asyncio.all_tasks())

        async def visit() -> str:
            async with aiohttp.ClientSession() as client:
                try:
                    async with asyncio.timeout(moments.random() * 0.15):
                        async with client.post(proxy.url + CHAT, json={"model": MODEL}) as response:
                            await response.read()
                            return "whole"
                except TimeoutError:
                    return "left"

        outcomes = Counter[str]()
        for _ in range(10):
            outcomes.update(await asyncio.gather(*(visit() for _ in range(20))))
        assert sum(outcomes.values()) == 200 and outcomes["left"] > 100
        await eventually(lambda: is_at_rest(proxy, *replicas), "nothing is in flight")

        ended = {status: await proxy.metric(ENDED.format(status)) for status in (200, 499)}
        assert ended[200] >= outcomes["whole"] and ended[499] > 100
        assert sum(len(replica.received) for replica in replicas) <= sum(ended.values()) <= 200
        # Each open connection is a task at its server's end; the pooled ones to the replicas go when they were idle.
        await eventually(lambda: few_tasks(idle_tasks + 2), "the connections are closed")


async def few_tasks(most: int) -> bool:
    return len(asyncio.all_tasks()) <= most


async def test_a_drain_lets_streams_end_and_takes_no_new_connection() -> None:
    may_end = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await may_end.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async with running_proxy() as proxy, fake_replica(generate) as replica, joined(proxy, hello(replica.url)):
        async with proxy.ask(stream=True) as response:
            await response.content.readchunk()
            proxy.stop.request()
            await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as latecomer:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await latecomer.get(f"{proxy.url}/health")
            assert not proxy.serving.done()
            may_end.set()
            assert await response.content.read() == b"data: [DONE]\n\n"
        await asyncio.wait_for(proxy.serving, 5)


@pytest.mark.parametrize("how", ["timeout", "second request"])
async def test_a_drain_is_bounded_and_a_second_request_ends_it_at_once(how: str) -> None:
    drain_timeout_s = 0.3 if how == "timeout" else 30.0
    async with running_proxy(drain_timeout_s=drain_timeout_s) as proxy, fake_replica(stream_for_ever) as replica:
        async with joined(proxy, hello(replica.url)), proxy.ask(stream=True) as response:
            await response.content.readchunk()
            proxy.stop.request()
            if how == "second request":
                await asyncio.sleep(0.1)
                proxy.stop.request()
            await asyncio.wait_for(asyncio.shield(proxy.serving), 3)
            with pytest.raises(aiohttp.ClientPayloadError):  # never an end that looks whole
                await response.read()
            await eventually(replica.is_idle, "the replica's stream has ended")


async def test_during_a_drain_a_kept_alive_connection_is_served_and_then_closed() -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        return await (answer_never if request.path.endswith("/v1/completions") else answer_ok)(request)

    async with running_proxy() as proxy, fake_replica(generate) as replica, joined(proxy, hello(replica.url)):
        asking = asyncio.create_task(proxy.client.post(f"{proxy.url}/v1/completions", json={}))
        async with aiohttp.ClientSession() as client:
            async with client.post(proxy.url + CHAT, json={}) as response:
                assert "Connection" not in response.headers
                await response.read()

            async def is_open() -> bool:
                return replica.open_requests == 1

            await eventually(is_open, "a request is open")
            proxy.stop.request()
            await asyncio.sleep(0.05)
            async with client.post(proxy.url + CHAT, json={}) as response:
                assert response.status == 200 and response.headers["Connection"] == "close"
        asking.cancel()
        await asyncio.wait_for(proxy.serving, 5)


async def test_what_is_no_inference_is_answered_on_the_same_connection_which_then_closes() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        parts = urlsplit(proxy.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 2\r\n\r\n{}"
            b"GET /health HTTP/1.1\r\nHost: p\r\n\r\n"
        )
        async with asyncio.timeout(10):
            answers = (await reader.read()).split(b"HTTP/1.1 ")
        writer.close()
    assert answers[1].startswith(b"200") and b"Connection" not in answers[1]
    assert answers[2].startswith(b"200") and b"Connection: close" in answers[2] and b'"replicas": 1' in answers[2]
