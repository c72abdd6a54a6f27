"""Requests to a real proxy on the loop that it runs on: framing, pipelining, and no way to smuggle one."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator

import pytest

from tests.http_answers import OK, sized
from tests.http_requests import BAD_BODIES, MALFORMED, POST, REQUESTS
from tests.protocol.proxy_fakes import RunningProxy
from tests.protocol.proxy_process import alone, connect, exchange, proxy, proxy_url, scripted

__all__ = ["proxy", "proxy_url"]  # the fixtures


async def test_no_malformed_request_reaches_a_replica_and_each_closes_its_connection(proxy: RunningProxy) -> None:
    async with alone(proxy) as replica:
        hidden = POST + b"X-Hidden: 1\r\nContent-Length: 2\r\n\r\n{}"
        for name, head in MALFORMED.items():
            if not head:
                continue  # an empty line before a request is legal
            answer = await exchange(proxy, head + b"\r\n\r\n" + hidden)
            assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") <= 1, (name, answer)
            assert b"Connection: close" in answer
        for name, request in BAD_BODIES.items():
            answer = await exchange(proxy, request + hidden)
            assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, (name, answer)
        assert replica.received == []
        assert await proxy.in_flight() == 0


async def test_a_head_that_is_too_long_is_431_and_one_that_never_ends_too(proxy: RunningProxy) -> None:
    async with alone(proxy):
        for request in (POST + b"X: " + b"y" * 70_000 + b"\r\n\r\n", POST + b"X: " + b"y" * 70_000):
            assert (await exchange(proxy, request)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("name", REQUESTS)
async def test_any_split_of_a_request_into_reads_gives_the_same_request(proxy: RunningProxy, name: str) -> None:
    request, cuts = REQUESTS[name], random.Random(name)
    body = sized(b"ok")
    async with scripted(proxy, body) as received:
        for _ in range(12):
            places = sorted(cuts.randrange(len(request)) for _ in range(cuts.randrange(6)))
            pieces = [request[start:end] for start, end in zip([0, *places], [*places, len(request)], strict=True)]
            reader, writer = await connect(proxy)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.001)
            async with asyncio.timeout(5):
                text = await reader.readuntil(b"\r\n\r\n")
                if text.startswith(b"HTTP/1.1 100"):
                    text = await reader.readuntil(b"\r\n\r\n")
                assert text.startswith(OK) and await reader.readexactly(2) == b"ok"
            writer.close()
        assert len(received) == 12
        assert {request.split(b"X-Request-Id")[0] for request in received} == {received[0].split(b"X-Request-Id")[0]}
        wanted = b"" if name in ("an empty body", "no body at all") else b"{}"
        assert all(request.endswith(b"Content-Length: %d\r\n\r\n%b" % (len(wanted), wanted)) for request in received)


async def test_pipelined_requests_are_answered_in_their_order_and_sent_one_by_one(proxy: RunningProxy) -> None:
    async with alone(proxy) as replica:
        requests = [POST + b"X-Request-Id: r%d\r\nContent-Length: 2\r\n\r\n{}" % number for number in range(30)]
        requests[7] = POST + b"X-Request-Id: r7\r\nX-Priority: none\r\nContent-Length: 2\r\n\r\n{}"
        last = POST + b"X-Request-Id: last\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        answer = await exchange(proxy, b"".join(requests) + last)
        ids = [line.split(b": ")[1] for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
        assert ids == [*(b"r%d" % number for number in range(30)), b"last"]
        assert answer.count(b"HTTP/1.1 200") == 30 and answer.count(b"HTTP/1.1 400") == 1
        assert len(replica.received) == 30


async def test_an_expectation_is_answered_before_the_body_and_an_unknown_one_refused(proxy: RunningProxy) -> None:
    async with scripted(proxy, sized(b"ok")) as _:
        reader, writer = await connect(proxy)
        writer.write(POST + b"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(OK)
        writer.close()
        answer = await exchange(proxy, POST + b"Expect: more\r\nContent-Length: 2\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 417 ")


async def test_a_body_over_a_mebibyte_streams_through_in_both_framings(proxy: RunningProxy) -> None:
    body = b'{"model": "tiny", "x": "' + b"y" * 3_000_000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 100_000):
            yield body[at : at + 100_000]

    async with alone(proxy) as replica:
        for data in (io.BytesIO(body), pieces()):
            async with proxy.client.post(f"{proxy.url}/v1/completions", data=data) as response:
                assert response.status == 200
        assert [received.body for received in replica.received] == [body, body]
        assert replica.received[0].all("Content-Length") == [str(len(body))]
        assert replica.received[1].all("Transfer-Encoding") == ["chunked"]
