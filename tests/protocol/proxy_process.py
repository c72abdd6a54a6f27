"""A real `proxy serve` process for a module's tests, and replicas that answer it with exactly these bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.commands import Commands
from tests.protocol.proxy_fakes import FakeReplica, RunningProxy, answer_ok, fake_replica, hello, joined


@pytest.fixture(scope="module")
def proxy_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `proxy serve` process, so that its loop is the one that it has in production."""
    with Commands(tmp_path_factory.mktemp("proxy")) as commands:
        process = commands.proxy()
        yield process.url
        assert "Traceback" not in process.log()


@pytest.fixture
async def proxy(proxy_url: str) -> AsyncIterator[RunningProxy]:
    async with aiohttp.ClientSession(max_line_size=65_536, max_field_size=65_536, max_headers=256) as client:
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
