"""What a client sees when replicas fail or are full, and how often a request is sent: never more than twice."""

from __future__ import annotations

import asyncio
import io
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from proxy.errors import ConnectFailed
from proxy.upstream import Pool
from tests.commands import free_port
from tests.protocol.proxy_fakes import (
    CHAT,
    FakeReplica,
    RunningProxy,
    answer_never,
    answer_ok,
    eventually,
    fake_replica,
    hello,
    joined,
    raw_replica,
    running_proxy,
    stream_for_ever,
)

LEFT_BOUND_S = 1.0  # what a busy machine needs at the most for what takes a millisecond or two


async def answer_500(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


async def answer_not_begun(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=503, headers={"X-Not-Begun": "1"})


async def close_without_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script of a replica that takes a request and breaks off."""


@dataclass
class Gate:
    """A handler that answers when it is opened."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    order: list[str] = field(default_factory=list)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.order.append(request.headers.get("X-Name", ""))
        await self.opened.wait()
        return await answer_ok(request)


async def statuses(proxy: RunningProxy, count: int) -> list[int]:
    """The statuses of so many requests, one after the other."""
    found = []
    for _ in range(count):
        async with proxy.ask() as response:
            await response.read()
            found.append(response.status)
    return found


def failing(replica: FakeReplica) -> int:
    return len(replica.received)


@pytest.mark.parametrize("url", ["http://.:80", f"http://{'a' * 64}:80", "http://[::1", "http://h:99999"])
async def test_whatever_connecting_raises_is_a_failed_connection(url: str) -> None:
    with pytest.raises(ConnectFailed, match="no connection to"):
        await Pool(connect_timeout_s=5.0, clock=time.monotonic).dial(url)


async def test_an_answer_500_is_the_answer_and_a_replica_that_gives_only_these_is_left_alone() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(routing="round-robin"))
        bad = await stack.enter_async_context(fake_replica(answer_500))
        good = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(bad.url, replica_id="bad")))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        found = await statuses(proxy, 60)
        assert failing(bad) == found.count(500) == 10, "each was sent once, and ten failures of ten open the breaker"
        assert failing(bad) + failing(good) == 60
        assert (await proxy.nodes())["bad"]["state"] == "broken"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 503])
async def test_what_a_replica_may_say_opens_no_breaker_and_is_not_tried_elsewhere(status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=status)

    async with running_proxy() as proxy, fake_replica(answer) as replica, joined(proxy, hello(replica.url)):
        assert await statuses(proxy, 40) == [status] * 40
        assert failing(replica) == 40
        assert [node["state"] for node in (await proxy.nodes()).values()] == ["live"]


async def test_clients_that_leave_open_no_breaker() -> None:
    async with running_proxy() as proxy, fake_replica(answer_never) as replica, joined(proxy, hello(replica.url)):
        for _ in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02), proxy.ask():
                    pass
        await eventually(replica.is_idle, "all have left")
        assert [node["state"] for node in (await proxy.nodes()).values()] == ["live"]
        assert await proxy.in_flight() == 0


async def test_a_request_that_was_accepted_and_dropped_is_never_sent_twice_while_its_replica_lives() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        bad = await stack.enter_async_context(raw_replica(close_without_answer))
        await stack.enter_async_context(joined(proxy, hello(bad.url)))
        good = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        found = await statuses(proxy, 8)
        assert found.count(502) == failing(bad) > 0
        assert failing(bad) + failing(good) == 8


async def test_a_request_whose_replica_died_with_it_runs_on_another() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        dying = AsyncExitStack()

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            await asyncio.sleep(0.05)  # the connections of a process that was killed end within moments
            await dying.aclose()

        bad = await stack.enter_async_context(raw_replica(die))
        await dying.enter_async_context(joined(proxy, hello(bad.url)))
        good = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        assert set(await statuses(proxy, 2)) == {200}
        assert failing(bad) == 1 and failing(good) == 2
        assert await proxy.metric('lockstep_proxy_retries_total{reason="upstream_failed"}') == 1


async def test_a_replica_that_did_not_begin_passes_the_request_on_once() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        full = await stack.enter_async_context(fake_replica(answer_not_begun))
        await stack.enter_async_context(joined(proxy, hello(full.url)))
        async with proxy.ask() as response:
            assert response.status == 503, "there is no other"
        good = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        assert await statuses(proxy, 4) == [200] * 4
        assert failing(good) == 4 and 1 <= failing(full) - 1 <= 4


async def test_retries_stop_when_a_fifth_of_all_requests_are_retries() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        for _ in range(2):
            full = await stack.enter_async_context(fake_replica(answer_not_begun))
            await stack.enter_async_context(joined(proxy, hello(full.url)))
        await statuses(proxy, 100)
        assert await proxy.metric('lockstep_proxy_retries_total{reason="not_begun"}') <= 10 + 100 * 0.2


async def test_all_known_dead_is_503_at_once() -> None:
    async with running_proxy() as proxy:
        took = []
        for _ in range(20):
            started_s = time.perf_counter()
            assert await statuses(proxy, 1) == [503]
            took.append(time.perf_counter() - started_s)
        assert sorted(took)[10] < 0.010


async def test_a_hung_replica_costs_its_own_requests_only() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(first_byte_timeout_s=0.5))
        hung = await stack.enter_async_context(fake_replica(answer_never))
        good = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(hung.url)))
        await stack.enter_async_context(joined(proxy, hello(good.url)))
        asking = [asyncio.create_task(statuses(proxy, 1)) for _ in range(2)]
        found = await statuses(proxy, 20)
        assert found == [200] * 20 and failing(hung) <= 2
        assert {tuple(found) for found in await asyncio.gather(*asking)} <= {(200,), (504,)}
        await eventually(hung.is_idle, "the proxy closed its connection")


async def test_a_replica_that_accepts_no_connection_is_given_up_and_the_request_runs_elsewhere() -> None:
    with socket.socket() as deaf:  # its backlog is full: a connection to it never comes about
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(running_proxy(connect_timeout_s=0.3))
            await stack.enter_async_context(joined(proxy, hello(f"http://127.0.0.1:{deaf.getsockname()[1]}")))
            good = await stack.enter_async_context(fake_replica(answer_ok))
            await stack.enter_async_context(joined(proxy, hello(good.url)))
            assert await statuses(proxy, 2) == [200, 200]
        for filler in fillers:
            filler.close()


async def test_requests_over_the_proxy_s_bound_wait_and_run_in_the_order_of_their_priority() -> None:
    gate = Gate()
    async with running_proxy(max_requests=1) as proxy, fake_replica(gate) as replica, joined(proxy, hello(replica.url)):

        async def ask(name: str, priority: str) -> int:
            headers = {"X-Name": name, "X-Priority": priority}
            async with proxy.client.post(proxy.url + CHAT, json={}, headers=headers) as response:
                return response.status

        asking = [asyncio.create_task(ask("first", "low"))]
        await eventually(lambda: is_at(gate, 1), "one is under way")
        for name, priority in (("low", "low"), ("normal", "normal"), ("high", "high"), ("high too", "high")):
            asking.append(asyncio.create_task(ask(name, priority)))
            await eventually(lambda: waits(proxy, len(asking) - 1), f"{name} waits")
        assert gate.order == ["first"]
        gate.opened.set()
        assert await asyncio.gather(*asking) == [200] * 5
        assert gate.order == ["first", "high", "high too", "normal", "low"]
        assert await waits(proxy, 0)


async def is_at(gate: Gate, count: int) -> bool:
    return len(gate.order) == count


async def waits(proxy: RunningProxy, count: int) -> bool:
    return await proxy.metric("lockstep_proxy_waiting_requests") == count


async def test_a_full_queue_refuses_and_a_wait_has_a_deadline() -> None:
    settings = {"max_replica_requests": 1, "max_waiting": 1, "queue_timeout_s": 0.4}
    async with running_proxy(**settings) as proxy, fake_replica(answer_never) as replica:
        async with joined(proxy, hello(replica.url)):
            running = asyncio.create_task(statuses(proxy, 1))
            await eventually(lambda: has(replica, 1), "one is under way")
            started_s = time.monotonic()
            waiting = asyncio.create_task(statuses(proxy, 1))
            await eventually(lambda: waits(proxy, 1), "one waits")
            async with proxy.ask() as response:
                assert response.status == 503 and response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["code"] == "overloaded"
            assert await waiting == [503] and 0.3 < time.monotonic() - started_s < 2
            assert len(replica.received) == 1
            running.cancel()


async def has(replica: FakeReplica, count: int) -> bool:
    return len(replica.received) == count


async def test_a_waiter_that_leaves_is_out_of_the_queue_at_once() -> None:
    async with running_proxy(max_requests=1) as proxy, fake_replica(answer_never) as replica:
        async with joined(proxy, hello(replica.url)):
            running = asyncio.create_task(statuses(proxy, 1))
            await eventually(lambda: has(replica, 1), "one is under way")
            waiting = asyncio.create_task(statuses(proxy, 1))
            await eventually(lambda: waits(proxy, 1), "one waits")
            waiting.cancel()
            assert await eventually(lambda: waits(proxy, 0), "none waits") < LEFT_BOUND_S
            running.cancel()
            await eventually(replica.is_idle, "nothing runs")
            assert len(replica.received) == 1


@pytest.mark.parametrize("phase", ["prefill", "stream", "whole"])
async def test_a_client_that_leaves_ends_its_request_at_the_replica_at_once(phase: str) -> None:
    handler = stream_for_ever if phase == "stream" else answer_never
    async with running_proxy() as proxy, fake_replica(handler) as replica, joined(proxy, hello(replica.url)):
        took = []
        for _ in range(10):
            async with aiohttp.ClientSession() as client:
                asking = asyncio.create_task(client.post(proxy.url + CHAT, json={"stream": phase != "whole"}))

                async def runs() -> bool:
                    return replica.open_requests == 1

                await eventually(runs, "it runs")
                await asyncio.sleep(0.02)
                started_s = time.monotonic()
                if phase == "stream":
                    (await asking).close()
                asking.cancel()
            await eventually(replica.is_idle, "it has ended")
            took.append(time.monotonic() - started_s)
        # What waits for a tick or for the replica's next event never makes it; a busy machine does once in ten times.
        assert min(took) < 0.020 and max(took) < LEFT_BOUND_S, took
        assert await proxy.in_flight() == 0


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"])
async def test_a_replica_that_closes_only_its_own_direction_is_a_failed_one_at_once(begun: bytes) -> None:
    async def half_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b"", "the proxy closes the other one"

    async with running_proxy() as proxy, raw_replica(half_close) as replica, joined(proxy, hello(replica.url)):
        started_s = time.monotonic()
        assert await statuses(proxy, 1) == [502] and time.monotonic() - started_s < 2
        assert await proxy.in_flight() == 0


async def test_a_kept_connection_that_its_replica_has_closed_is_not_used_again() -> None:
    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with running_proxy() as proxy, raw_replica(answer_and_close) as replica, joined(proxy, hello(replica.url)):
        for _ in range(10):
            assert await statuses(proxy, 1) == [200]
            await asyncio.sleep(0.01)  # the close arrives
        assert len(replica.received) == 10


async def test_a_slow_reader_stops_its_replica_and_costs_the_proxy_little() -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            await answer.write(b"data: " + b"x" * 4000 + b"\n\n")
            sent += 4008

    async with running_proxy(send_buffer_bytes=16_384) as proxy, fake_replica(flood) as replica:
        async with joined(proxy, hello(replica.url)):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.connect(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 2\r\n\r\n{}")
            last = -1
            while last != sent or sent == 0:
                last = sent
                await asyncio.sleep(0.3)
            # All of it lies in the kernel's buffers on both ways, in the fake's, or in the proxy.
            assert sent < 9_000_000
            sock.close()
            await eventually(replica.is_idle, "the replica's stream has ended")


async def test_a_replica_that_answers_before_it_has_the_body_is_heard() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        await writer.drain()
        await reader.read()  # until the proxy closes
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, running_proxy() as proxy:
        async with joined(proxy, hello(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")):
            body = io.BytesIO(b'{"model": "tiny", "x": "' + b"y" * 8_000_000)
            async with proxy.client.post(proxy.url + CHAT, data=body) as response:
                assert response.status == 413 and await response.read() == b"no"
            assert await proxy.in_flight() == 0


async def test_dead_replicas_are_never_more_than_two_attempts() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        for _ in range(5):
            url = f"http://127.0.0.1:{free_port()}"
            await stack.enter_async_context(joined(proxy, hello(url), beats=False))
        assert await statuses(proxy, 1) == [503]
        assert await proxy.metric('lockstep_proxy_upstream_failures_total{reason="connect_failed"}') == 2
