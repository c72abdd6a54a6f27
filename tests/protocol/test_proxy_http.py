"""HTTP/1.1 through a real proxy on the loop that it runs on: framing, pipelining, and no way to smuggle a request."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.commands import Commands
from tests.protocol.proxy_fakes import FakeReplica, RunningProxy, answer_ok, fake_replica, hello, joined
from tests.unit.test_http1 import MALFORMED

POST = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(scope="module")
def proxy_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `proxy serve` process, so that its loop is the one that it has in production."""
    with Commands(tmp_path_factory.mktemp("proxy")) as commands:
        process = commands.proxy()
        yield process.url
        assert "Traceback" not in process.log()


@pytest.fixture
async def proxy(proxy_url: str) -> AsyncIterator[RunningProxy]:
    async with aiohttp.ClientSession() as client:
        yield RunningProxy(url=proxy_url, client=client)


async def connect(proxy: RunningProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(proxy.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def exchange(proxy: RunningProxy, *pieces: bytes) -> bytes:
    """All that the proxy answers to these bytes, written one piece at a time, until it closes the connection."""
    reader, writer = await connect(proxy)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@asynccontextmanager
async def scripted(proxy: RunningProxy, answer: bytes, *, closes: bool = False) -> AsyncIterator[list[bytes]]:
    """A replica that has joined and answers every request with these bytes; the requests, with their bodies."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
                received.append(head + await reader.readexactly(length))
                writer.write(answer)
                if closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the proxy closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        async with joined(proxy, hello(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", replica_id="only")):
            yield received
        await proxy.wait_state("only", None)


@asynccontextmanager
async def alone(proxy: RunningProxy) -> AsyncIterator[FakeReplica]:
    """The only replica, which just works."""
    async with fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url, replica_id="only")):
            yield replica
        await proxy.wait_state("only", None)


BAD_BODIES = {
    "a chunk size that is none": CHUNKED + b"zz\r\n",
    "a negative chunk size": CHUNKED + b"-1\r\n",
    "a chunk size beyond all bounds": CHUNKED + b"ffffffffffffffff\r\n",
    "a chunk longer than its size": CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n",
    "a bare LF after a size": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a bare LF after a chunk": CHUNKED + b"2\r\n{}\n0\r\n\r\n",
    "a chunk extension with a NUL": CHUNKED + b"2;\x00\r\n{}\r\n0\r\n\r\n",
    "a trailer that is none": CHUNKED + b"2\r\n{}\r\n0\r\nnone\r\n\r\n",
}


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


REQUESTS = {
    "a length": POST + b"Content-Length: 2\r\n\r\n{}",
    "an empty body": POST + b"Content-Length: 0\r\n\r\n",
    "no body at all": POST + b"\r\n",
    "chunks": CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    "chunks with extensions and trailers": CHUNKED + b'01;a;b="c"\r\n{\r\n1\r\n}\r\n00\r\nX-Sum: 1\r\n\r\n',
    "an empty line before it": b"\r\n" + POST + b"Content-Length: 2\r\n\r\n{}",
    "a whole URL": POST.replace(b"/v1", b"http://p/v1") + b"Content-Length: 2\r\n\r\n{}",
    "odd spaces and letters": POST + b"content-LENGTH:\t 2 \r\nX-A:\r\n\r\n{}",
    "a coding in capitals": POST + b"transfer-encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "an expectation that came too late": POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_any_split_of_a_request_into_reads_gives_the_same_request(proxy: RunningProxy, name: str) -> None:
    request, cuts = REQUESTS[name], random.Random(name)
    body = ANSWER + b"Content-Length: 2\r\n\r\nok"
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
                assert text.startswith(ANSWER) and await reader.readexactly(2) == b"ok"
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


async def test_an_http_1_0_client_gets_a_stream_without_chunks_and_then_the_end(proxy: RunningProxy) -> None:
    stream = (
        ANSWER + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )
    async with scripted(proxy, stream) as _:
        answer = await exchange(proxy, POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: 0\r\n\r\n")
        assert b"Transfer-Encoding" not in answer and b"Connection: close" in answer
        assert answer.endswith(b"\r\n\r\nabc")


ANSWERS = {
    "a length": (ANSWER + b"Content-Length: 2\r\n\r\nok", b"ok"),
    "chunks": (ANSWER + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"ok"),
    "chunk extensions": (ANSWER + b'Transfer-Encoding: chunked\r\n\r\n2;a="b"\r\nok\r\n0;x\r\n\r\n', b"ok"),
    "trailers": (ANSWER + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n", b"ok"),
    "no length": (ANSWER + b"\r\nok", b"ok"),
    "no length in HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nok", b"ok"),
    "an empty body": (ANSWER + b"Content-Length: 0\r\n\r\n", b""),
    "no chunk": (ANSWER + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "a 304 with a length": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    "a 100 before": (b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER + b"Content-Length: 2\r\n\r\nok", b"ok"),
    "hints before": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + ANSWER + b"Content-Length: 2\r\n\r\nok",
        b"ok",
    ),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a close": (ANSWER + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "an event line of 300 KB": (
        ANSWER
        + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n493e7\r\ndata: "
        + b"x" * 300_000
        + b"\n\r\n0\r\n\r\n",
        None,
    ),
    "events without chunks": (ANSWER + b"Content-Type: text/event-stream\r\n\r\ndata: 1\n\n", b"data: 1\n\n"),
    "events with a length": (
        ANSWER + b"Content-Type: text/event-stream\r\nContent-Length: 9\r\n\r\ndata: 1\n\n",
        b"data: 1\n\n",
    ),
    "bytes that are no text": (ANSWER + b"Content-Length: 256\r\n\r\n" + bytes(range(256)), bytes(range(256))),
    "a status nobody knows": (b"HTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\nok", b"ok"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_arrives_whole_however_it_is_framed(proxy: RunningProxy, name: str) -> None:
    raw, body = ANSWERS[name]
    closes = name.startswith("no length") or name in ("events without chunks", "a close")
    async with scripted(proxy, raw, closes=closes) as received:
        for _ in range(2):
            async with asyncio.timeout(10), proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
                text = await response.read()
                assert text == body if body is not None else len(text) == 300_007
                assert response.status == int(raw.rpartition(b"HTTP/1.")[2][2:5])
        assert len(received) == 2


GARBLED = {
    "two lengths": ANSWER + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length and a coding": ANSWER + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": ANSWER + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a folded line": ANSWER + b"X: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
    "a bare LF": ANSWER + b"X: 1\nY: 2\r\nContent-Length: 0\r\n\r\n",
    "a NUL": ANSWER + b"X: \x00\r\nContent-Length: 0\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "a page without a head": b"<html>hello</html>",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a head that never ends": ANSWER + b"X: " + b"y" * 70_000,
    "a chunk size that is none": ANSWER + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
}


@pytest.mark.parametrize("name", GARBLED)
async def test_what_is_no_answer_is_502_and_the_request_is_not_sent_again(proxy: RunningProxy, name: str) -> None:
    async with AsyncExitStack() as stack:
        received = await stack.enter_async_context(scripted(proxy, GARBLED[name]))
        other = await stack.enter_async_context(fake_replica(answer_ok))
        async with proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
            assert response.status == 502 and "malformed" in (await response.json())["error"]["message"]
        assert len(received) == 1 and other.received == []


@pytest.mark.parametrize("status", [200, 201, 202, 206, 301, 400, 404, 409, 418, 422, 429, 451, 500, 503, 507, 599])
async def test_every_status_passes_with_its_body(proxy: RunningProxy, status: int) -> None:
    answer = b"HTTP/1.1 %d Odd\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\nok" % status
    async with scripted(proxy, answer) as received:
        async with proxy.client.post(f"{proxy.url}/v1/x", data=b"{}", allow_redirects=False) as response:
            assert response.status == status and await response.read() == b"ok"
            assert response.headers["Retry-After"] == "3" and len(received) == 1


async def test_bytes_behind_an_answer_never_become_the_next_one(proxy: RunningProxy) -> None:
    smuggled = ANSWER + b"Content-Length: 4\r\n\r\nevil"
    async with scripted(proxy, ANSWER + b"Content-Length: 2\r\n\r\nok" + smuggled) as received:
        for _ in range(4):
            async with proxy.client.post(f"{proxy.url}/v1/completions", data=b"{}") as response:
                assert await response.read() == b"ok"
        assert len(received) == 4


async def test_an_expectation_is_answered_before_the_body_and_an_unknown_one_refused(proxy: RunningProxy) -> None:
    async with scripted(proxy, ANSWER + b"Content-Length: 2\r\n\r\nok") as _:
        reader, writer = await connect(proxy)
        writer.write(POST + b"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(ANSWER)
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
