"""Answers through a real proxy on the loop that it runs on: all that HTTP/1.1 allows arrives, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest

from tests.http_answers import ANSWERS, EVENT_CHUNKS, GARBLED, chunks, sized
from tests.http_requests import POST
from tests.protocol.proxy_fakes import RunningProxy, answer_ok, fake_replica, hello, joined, running_proxy
from tests.protocol.proxy_process import exchange, proxy, proxy_url, scripted

__all__ = ["proxy", "proxy_url"]  # the fixtures


async def test_an_http_1_0_client_gets_a_stream_without_chunks_and_then_the_end(proxy: RunningProxy) -> None:
    async with scripted(proxy, EVENT_CHUNKS + chunks(b"ab", b"c")) as _:
        answer = await exchange(proxy, POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: 0\r\n\r\n")
        assert b"Transfer-Encoding" not in answer and b"Connection: close" in answer
        assert answer.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_arrives_whole_however_it_is_framed(proxy: RunningProxy, name: str) -> None:
    answer = ANSWERS[name]
    async with scripted(proxy, answer.raw, closes=answer.ends_with_connection or name == "a close") as received:
        for _ in range(2):
            async with asyncio.timeout(10), proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
                assert await response.read() == answer.body
                assert response.status == answer.status and "X-Hop" not in response.headers
        assert len(received) == 2


@pytest.mark.parametrize("name", GARBLED)
async def test_what_is_no_answer_is_502_and_the_request_is_not_sent_again(proxy: RunningProxy, name: str) -> None:
    async with AsyncExitStack() as stack:
        received = await stack.enter_async_context(scripted(proxy, GARBLED[name]))
        other = await stack.enter_async_context(fake_replica(answer_ok))
        await stack.enter_async_context(joined(proxy, hello(other.url, replica_id="other")))
        found = []
        for _ in range(2):  # one for each
            async with proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
                found.append(response.status)
                assert response.status == 200 or "malformed" in (await response.json())["error"]["message"]
        assert sorted(found) == [200, 502]
        assert len(received) == 1 and len(other.received) == 1
    await proxy.wait_state("other", None)


@pytest.mark.parametrize("status", [200, 201, 202, 206, 301, 400, 404, 409, 418, 422, 429, 451, 500, 503, 507, 599])
async def test_every_status_passes_with_its_body(proxy: RunningProxy, status: int) -> None:
    answer = b"HTTP/1.1 %d Odd\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\nok" % status
    async with scripted(proxy, answer) as received:
        async with proxy.client.post(f"{proxy.url}/v1/x", data=b"{}", allow_redirects=False) as response:
            assert response.status == status and await response.read() == b"ok"
            assert response.headers["Retry-After"] == "3" and len(received) == 1


async def test_bytes_behind_an_answer_never_become_the_next_one(proxy: RunningProxy) -> None:
    smuggled = sized(b"evil")
    async with scripted(proxy, sized(b"ok") + smuggled) as received:
        for _ in range(4):
            async with proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
                assert await response.read() == b"ok"
        assert len(received) == 4


async def test_a_connection_that_was_stopped_for_a_slow_client_serves_the_next_one() -> None:
    """The last read of an answer may be what the client does not take at once."""
    async with running_proxy(send_buffer_bytes=8192) as proxy, scripted(proxy, sized(b"y" * 60_000)) as received:
        for _ in range(5):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.connect(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
            sock.sendall(POST + b"Content-Length: 2\r\n\r\n{}")
            await asyncio.sleep(0.05)  # so much of the answer as fits into what lies on the way
            reader, writer = await asyncio.open_connection(sock=sock)
            async with asyncio.timeout(5):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(60_000)
            writer.close()
        assert len(received) == 5
