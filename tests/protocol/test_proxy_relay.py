"""What passes through the proxy, byte for byte, and how an answer ends."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.protocol.proxy_fakes import (
    CHAT,
    MODEL,
    FakeReplica,
    RunningProxy,
    Script,
    answer_never,
    answer_ok,
    eventually,
    fake_replica,
    hello,
    joined,
    raw_replica,
    running_proxy,
)

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def dechunked(text: bytes) -> bytes:
    """The body in a whole chunked one; fails on half a one."""
    body = b""
    while True:
        size, _, text = text.partition(b"\r\n")
        data, end, text = text[: int(size, 16)], text[int(size, 16) :][:2], text[int(size, 16) + 2 :]
        assert end == b"\r\n"
        if not data:
            return body
        body += data


async def behind_proxy(stack: AsyncExitStack, script: Script, **settings: float) -> tuple[RunningProxy, FakeReplica]:
    """A proxy and one raw replica that has joined it."""
    proxy = await stack.enter_async_context(running_proxy(**settings))
    replica = await stack.enter_async_context(raw_replica(script))
    await stack.enter_async_context(joined(proxy, hello(replica.url)))
    return proxy, replica


def address_of(proxy: RunningProxy) -> tuple[str, int]:
    parts = urlsplit(proxy.url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


async def raw_exchange(proxy: RunningProxy, request: bytes) -> bytes:
    """All bytes that the proxy answers to these bytes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection(*address_of(proxy))
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_bodies_query_and_end_to_end_headers_pass_unchanged_in_both_directions() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = [("X-Custom", "a"), ("X-Custom", "b"), ("Set-Cookie", "k=v"), ("Retry-After", "7"), ("X-Hop", "no")]
        answer = web.Response(status=418, body=bytes(range(256)), content_type="application/x-odd")
        for name, value in headers:
            answer.headers.add(name, value)
        answer.headers["Connection"] = "X-Hop"
        return answer

    body = json.dumps({"model": MODEL, "messages": []}).encode() + b"  \n\t"
    async with running_proxy() as proxy, fake_replica(answer) as replica, joined(proxy, hello(replica.url)):
        sent = [
            ("Content-Type", "application/json; charset=utf-8"),
            ("X-Mine", "1"),
            ("X-Mine", "2"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("Accept-Encoding", "br"),
            ("User-Agent", "tester"),
            ("X-Secret-Hop", "no"),
            ("Connection", "X-Secret-Hop"),
            ("TE", "trailers"),
        ]
        url = URL(f"{proxy.url}{CHAT}?q=a%2Fb&r=%20", encoded=True)
        async with proxy.client.post(url, data=body, headers=sent) as response:
            assert response.status == 418
            assert await response.read() == bytes(range(256))
            assert response.headers.getall("X-Custom") == ["a", "b"]
            assert response.headers["Set-Cookie"] == "k=v" and response.headers["Retry-After"] == "7"
            assert response.headers["Content-Type"] == "application/x-odd"
            assert "X-Hop" not in response.headers
        (received,) = replica.received
        assert received.path == f"{CHAT}?q=a%2Fb&r=%20"
        assert received.body == body
        assert received.all("X-Mine") == ["1", "2"]
        assert received.all("Content-Type") == ["application/json; charset=utf-8"]
        assert received.all("Accept-Encoding") == ["br"] and received.all("User-Agent") == ["tester"]
        assert received.all("traceparent") and received.all("Content-Length") == [str(len(body))]
        assert received.all("Host") == [replica.url.removeprefix("http://")]
        for hop in ("X-Secret-Hop", "TE", "Connection", "Transfer-Encoding"):
            assert received.all(hop) == []


async def test_a_compressed_request_and_answer_pass_compressed() -> None:
    packed = gzip.compress(b'{"object": "chat.completion"}')

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    body = gzip.compress(json.dumps({"model": MODEL}).encode())
    async with running_proxy() as proxy, fake_replica(answer) as replica, joined(proxy, hello(replica.url)):
        async with aiohttp.ClientSession(auto_decompress=False) as client:
            headers = {"Content-Encoding": "gzip"}
            async with client.post(proxy.url + CHAT, data=body, headers=headers) as response:
                assert await response.read() == packed
                assert response.headers["Content-Encoding"] == "gzip"
        assert replica.received[0].body == body


async def test_exactly_one_authorization_reaches_the_replica() -> None:
    async with running_proxy(api_key="key") as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):
            request = (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nConnection: close\r\nContent-Length: 2\r\n"
                b"Authorization: Bearer key\r\nAuthorization: Bearer other\r\n\r\n{}"
            )
            answer = await raw_exchange(proxy, request)
    # Two of them are refused by the HTTP parser, or the first, which was checked, is the one that passes.
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    assert [received.all("Authorization") for received in replica.received] in ([], [["Bearer key"]])


async def test_a_request_id_is_kept_or_made_and_shown_in_every_answer() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        for sent, kept in (("mine-1", True), ("x" * 200, False), ("two words", False), ("", False)):
            async with proxy.client.post(proxy.url + CHAT, json={}, headers={"X-Request-Id": sent}) as response:
                (passed,) = replica.received[-1].all("X-Request-Id")
                assert response.headers.getall("X-Request-Id") == [passed]
                assert (passed == sent) is kept and passed
        async with proxy.client.get(f"{proxy.url}/nowhere", headers={"X-Request-Id": "mine-2"}) as response:
            assert response.status == 404 and response.headers["X-Request-Id"] == "mine-2"


async def test_every_event_arrives_as_its_own_chunk_and_before_the_next_is_made() -> None:
    next_one = asyncio.Event()
    events = [b'data: {"n": %d}\n\n' % number for number in range(20)] + [b"data: [DONE]\n\n"]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for event in events:
            await next_one.wait()
            next_one.clear()
            writer.write(http_chunk(event))
        writer.write(b"0\r\n\r\n")

    async with AsyncExitStack() as stack:
        proxy, _ = await behind_proxy(stack, script)
        async with proxy.ask(stream=True) as response:  # its head is here before its first event
            assert response.headers["Content-Type"] == "text/event-stream"
            chunks = []
            next_one.set()
            async with asyncio.timeout(10):
                async for chunk, _ in response.content.iter_chunks():
                    chunks.append(chunk)
                    next_one.set()
    assert chunks == events


async def test_chunks_that_come_together_leave_as_the_chunks_they_were() -> None:
    events = [b"data: a\n\n", b"data: b", b"b\n\n", b"data: " + b"c" * 300_000 + b"\n\n", b"data: [DONE]\n\n"]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + b"".join(map(http_chunk, events)) + b"0\r\n\r\n")

    async with AsyncExitStack() as stack:
        proxy, _ = await behind_proxy(stack, script)
        async with proxy.ask(stream=True) as response:
            assert await response.content.readchunk() == (events[0], True)
            assert await response.content.readchunk() == (events[1], True)
            assert await response.content.read() == b"".join(events[2:])


async def test_a_large_body_passes_and_one_over_the_limit_is_refused_before_it_is_read() -> None:
    async with running_proxy(max_body_mb=4.0) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):
            body = b'{"model": "tiny", "x": "%s"}' % (b"y" * 3_000_000)
            async with proxy.client.post(proxy.url + CHAT, data=io.BytesIO(body)) as response:
                assert response.status == 200
            assert replica.received[0].body == body

            async def pieces():  # type: ignore[no-untyped-def]
                for _ in range(5):
                    yield b"z" * 2**20

            for too_much in (io.BytesIO(b"z" * 5_000_000), pieces()):
                async with proxy.client.post(proxy.url + CHAT, data=too_much) as response:
                    error = (await response.json())["error"]
                    assert response.status == 413 and "--max-body-mb" in error["message"]
            assert len(replica.received) == 1


async def test_a_chunked_request_and_one_that_expects_100_continue_arrive_whole() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):

        async def pieces():  # type: ignore[no-untyped-def]
            yield b'{"model":'
            yield b' "tiny"}'

        async with proxy.client.post(proxy.url + CHAT, data=pieces()) as response:
            assert response.status == 200
        async with proxy.client.post(proxy.url + CHAT, data=b'{"model": "tiny"}', expect100=True) as response:
            assert response.status == 200
        assert [received.body for received in replica.received] == [b'{"model": "tiny"}'] * 2
        assert replica.received[1].all("Expect") == []


@pytest.mark.parametrize("after", [b"data: 1\n\n", b'data: {"half'])
async def test_a_cut_event_stream_ends_with_all_that_came_an_error_event_and_no_done(after: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + b"".join(http_chunk(b"data: %d\n\n" % number) for number in range(8)))
        writer.write(http_chunk(after))

    async with AsyncExitStack() as stack:
        proxy, replica = await behind_proxy(stack, script)
        async with proxy.ask(stream=True) as response:
            text = await response.read()  # a whole HTTP answer: the client surely sees the event
        assert text.startswith(b"".join(b"data: %d\n\n" % number for number in range(8)) + after)
        last_event = text.rstrip().rpartition(b"\n\n")[2]
        error = json.loads(last_event.removeprefix(b"data: "))["error"]
        assert error["code"] == "replica_lost" and error["message"] and b"[DONE]" not in text
        assert len(replica.received) == 1
        await asyncio.sleep(0.1)  # the client's connection stays open: its next request is not sent into a close
        (((idle, _),),) = proxy.client.connector._conns.values()  # type: ignore[union-attr]
        assert idle.is_connected()
        assert await proxy.metric('lockstep_proxy_upstream_failures_total{reason="cut"}') == 1


async def test_what_came_before_a_cut_is_delivered_to_a_slow_reader_too() -> None:
    events = [b"data: " + letter * 50_000 + b"\n\n" for letter in (b"a", b"b", b"c", b"d")]
    is_cut = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + b"".join(map(http_chunk, events)))
        await writer.drain()
        is_cut.set()

    async with AsyncExitStack() as stack:
        # So little room on the way to the client that the last events wait in the proxy when the cut comes.
        proxy, _ = await behind_proxy(stack, script, send_buffer_bytes=8192)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.connect(address_of(proxy))
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 15\r\n\r\n{"stream":true}')
        await asyncio.wait_for(is_cut.wait(), 10)
        await asyncio.sleep(0.2)
        text = b""
        async with asyncio.timeout(10):
            while not text.endswith(b"\r\n0\r\n\r\n"):
                text += await reader.read(4096)
        writer.close()
    body = dechunked(text.partition(b"\r\n\r\n")[2])
    assert body.startswith(b"".join(events))
    assert b"replica_lost" in body[-500:]


async def test_a_silent_stream_ends_with_a_timeout_event_within_its_bound() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + http_chunk(b"data: 1\n\n"))
        assert await reader.read() == b""  # until the proxy closes the connection

    async with AsyncExitStack() as stack:
        proxy, _ = await behind_proxy(stack, script, between_bytes_timeout_s=0.3)
        async with asyncio.timeout(5), proxy.ask(stream=True) as response:
            text = await response.text()
    assert text.startswith("data: 1\n\n") and '"upstream_timeout"' in text


async def test_a_replica_that_does_not_begin_its_answer_in_time_gives_504() -> None:
    async with running_proxy(first_byte_timeout_s=0.3) as proxy, fake_replica(answer_never) as replica:
        async with joined(proxy, hello(replica.url)), asyncio.timeout(5), proxy.ask() as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "upstream_timeout"
    assert len(replica.received) == 1 and replica.cancelled == 1


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01 this is no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_an_accepted_request_that_fails_before_its_first_byte_gives_502_and_is_not_sent_again(
    begun: bytes,
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)

    async with AsyncExitStack() as stack:
        proxy, first = await behind_proxy(stack, script)
        second = await stack.enter_async_context(raw_replica(script))
        await stack.enter_async_context(joined(proxy, hello(second.url)))
        async with asyncio.timeout(5), proxy.ask() as response:
            assert response.status == 502
            assert (await response.json())["error"]["type"] == "server_error"
        assert len(first.received) + len(second.received) == 1
        assert await proxy.in_flight() == 0


async def test_a_cut_answer_that_is_no_event_stream_never_looks_whole() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + http_chunk(b'{"half": '))
        await writer.drain()
        await asyncio.sleep(0.1)

    async with AsyncExitStack() as stack:
        proxy, replica = await behind_proxy(stack, script)
        with pytest.raises(aiohttp.ClientError):
            async with asyncio.timeout(5), proxy.ask() as response:
                await response.read()
        assert len(replica.received) == 1


async def test_a_client_that_reads_nothing_is_dropped_and_its_upstream_closed() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            await answer.write(b"data: " + b"x" * 65_536 + b"\n\n")

    async with running_proxy(client_timeout_s=0.5) as proxy, fake_replica(flood) as replica:
        async with joined(proxy, hello(replica.url)):
            sock = socket.create_connection(address_of(proxy))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 2\r\n\r\n{}")

            async def is_over() -> bool:
                return bool(replica.received) and await replica.is_idle()

            await eventually(is_over, "the replica's answer has ended")
            assert await proxy.in_flight() == 0
            sock.close()


async def test_small_writes_are_not_held_back_on_either_side() -> None:
    nodelay: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        return await answer_ok(request)

    async with running_proxy() as proxy, fake_replica(answer) as replica, joined(proxy, hello(replica.url)):
        loop = asyncio.get_running_loop()
        original = loop.create_connection

        async def create_connection(*args, **kwargs):  # type: ignore[no-untyped-def]
            transport, protocol = await original(*args, **kwargs)
            sock = transport.get_extra_info("socket")
            nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return transport, protocol

        loop.create_connection = create_connection  # type: ignore[method-assign]
        async with proxy.ask() as response:
            assert response.status == 200
    assert nodelay and all(nodelay)


async def test_a_route_outside_v1_or_with_dots_is_not_forwarded() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        for target in ("/v1/../admin", "/v1/%2e%2e/admin", "/v2/chat", "/admin", "/v1//x", "/v1/"):
            request = f"POST {target} HTTP/1.1\r\nHost: p\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
            assert (await raw_exchange(proxy, request.encode())).startswith(b"HTTP/1.1 404"), target
        async with proxy.client.post(f"{proxy.url}/v1/audio/speech", json={"model": MODEL}) as response:
            assert response.status == 200
    assert [received.path for received in replica.received] == ["/v1/audio/speech"]
