"""A real `proxy serve` process under crowds: thousands of idle and streaming clients, replicas killed all the time.

CYCLES sets how many replicas are killed (`make crowd`: a thousand).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from proxy.protocol import CONTROL_PATH, encode
from tests.commands import Command, Commands
from tests.protocol.proxy_fakes import ControlLine, eventually, hello

IDLE = 10_000
STREAMS = 2_000
EVENTS = 5
CYCLES = int(os.environ.get("CYCLES", "200"))
SLOW = 64  # clients that read nothing
SLOW_BYTES = 256 * 1024  # that one of them may cost the proxy
REQUEST = b'POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 15\r\n\r\n{"stream":true}'
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event(number: int) -> bytes:
    text = b'data: {"n": %d}\n\n' % number
    return b"%x\r\n%b\r\n" % (len(text), text)


class Mock:
    """A replica that streams events to all of its requests, and can be killed."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.received = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        """Ends it as a kill would: the listener and all connections at once."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(15)
                self.received += 1
                writer.write(SSE_HEAD)
                for number in range(EVENTS):
                    await asyncio.sleep(self.pause_s)
                    writer.write(event(number))
                writer.write(DONE)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the proxy closed it, or it was killed
        finally:
            self._writers.discard(writer)
            writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """One request's whole answer."""
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    if length:
        return head + await reader.readexactly(int(length[1]))
    return head + await reader.readuntil(b"\r\n0\r\n\r\n")


def verdict(answer: bytes) -> str:
    """What a client makes of an answer; fails on half of one that looks whole, and on a gap or a repeat."""
    numbers = [int(number) for number in re.findall(rb'"n": (\d+)', answer)]
    assert numbers == list(range(len(numbers))), answer
    if b"[DONE]" in answer:
        assert len(numbers) == EVENTS and b'"error"' not in answer
        return "whole"
    assert b'"error"' in answer, answer
    return "error" if not answer.startswith(b"HTTP/1.1 200") else "cut"


async def in_flight(client: aiohttp.ClientSession, proxy: Command) -> int:
    async with client.get(f"{proxy.url}/metrics") as response:
        text = await response.text()
    counters = r"^lockstep_proxy_(?:requests_in_flight\{.*\}|open_requests|open_tokens) (\S+)$"
    found = re.findall(counters, text, re.MULTILINE)
    return sum(int(float(value)) for value in found)


@pytest.fixture
def many_files() -> None:
    """Twelve thousand connections are as many open files, here and in the process that inherits the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + STREAMS + 1000:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def test_ten_thousand_idle_and_two_thousand_streaming_clients_lose_nothing(
    commands: Commands, many_files: None
) -> None:
    proxy = await asyncio.to_thread(commands.proxy)
    address = urlsplit(proxy.url)
    mocks = [Mock(0.5), Mock(0.5)]
    async with aiohttp.ClientSession() as client:
        lines = []
        for mock in mocks:
            line = await client.ws_connect(proxy.url + CONTROL_PATH)
            await line.send_bytes(encode(hello(await mock.start())))
            await line.receive_bytes()
            lines.append(line)
        beating = asyncio.create_task(beat(lines))
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            for _ in range(IDLE // 200):
                opened = (asyncio.open_connection(address.hostname, address.port, limit=4096) for _ in range(200))
                idle += await asyncio.gather(*opened)
            answers = await asyncio.gather(*(ask(*connection) for connection in idle[:STREAMS]))
            assert Counter(map(verdict, answers)) == {"whole": STREAMS}
            again = await asyncio.gather(*(ask(*connection) for connection in idle[-20:]))
            assert Counter(map(verdict, again)) == {"whole": 20}, "those that were idle are served too"
            assert await in_flight(client, proxy) == 0
            assert sum(mock.received for mock in mocks) == STREAMS + 20
        finally:
            beating.cancel()
            for _, writer in idle:
                writer.transport.abort()
            for mock in mocks:
                mock.kill()
            for line in lines:
                await line.close()
    assert "Traceback" not in proxy.log()


async def beat(lines: list[aiohttp.ClientWebSocketResponse]) -> None:
    """Keeps replicas from being taken for silent."""
    ends = [ControlLine(line) for line in lines]
    while True:
        for end in ends:
            await end.report()
        await asyncio.sleep(0.5)


class Flood(Mock):
    """A replica that sends events as fast as they are taken."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(15)
            self.received += 1
            writer.write(SSE_HEAD)
            while True:
                writer.write(b"1f40\r\ndata: " + b"x" * 7992 + b"\n\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the proxy closed it
        finally:
            self._writers.discard(writer)


async def test_clients_that_read_nothing_stop_their_replica_and_cost_the_proxy_little_memory(
    commands: Commands,
) -> None:
    proxy = await asyncio.to_thread(commands.proxy)
    address = urlsplit(proxy.url)
    flood = Flood(0.0)
    async with aiohttp.ClientSession() as client, client.ws_connect(proxy.url + CONTROL_PATH) as line:
        await line.send_bytes(encode(hello(await flood.start())))
        await line.receive_bytes()
        beating = asyncio.create_task(beat([line]))
        before = resident_bytes(proxy)
        slow = []
        for _ in range(SLOW):
            sock = socket.socket()
            sock.connect((address.hostname, address.port))
            sock.sendall(REQUEST)
            slow.append(sock)

        async def is_stopped() -> bool:
            return flood.received == SLOW and await sent_in(proxy, 0.5) == 0

        await eventually(is_stopped, "the proxy takes no more of the streams", timeout_s=60.0)
        assert (resident_bytes(proxy) - before) / SLOW < SLOW_BYTES
        for sock in slow:
            sock.close()

        async def is_at_rest() -> bool:
            return await in_flight(client, proxy) == 0

        await eventually(is_at_rest, "their requests have ended")
        beating.cancel()
        flood.kill()
    assert "Traceback" not in proxy.log()


def resident_bytes(command: Command) -> int:
    """Memory of the process."""
    pages = int(Path(f"/proc/{command.process.pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


async def read_bytes(command: Command) -> int:
    """What the process has read so far, from sockets too."""
    text = await asyncio.to_thread(Path(f"/proc/{command.process.pid}/io").read_text, encoding="ascii")
    return int(text.split()[1])


async def sent_in(command: Command, seconds: float) -> int:
    """What the process read in so much time, but for what any look at it costs."""
    before = await read_bytes(command)
    await asyncio.sleep(seconds)
    return max(0, await read_bytes(command) - before - 64 * 1024)


async def test_kills_and_restarts_under_load_leave_every_client_an_answer(commands: Commands) -> None:
    proxy = await asyncio.to_thread(commands.proxy)
    address = urlsplit(proxy.url)
    draws = random.Random(7)
    outcomes: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def live_and_die(client: aiohttp.ClientSession, number: int, cycles: int) -> None:
        for cycle in range(cycles):
            mock = Mock(0.002)
            url = await mock.start()
            line = await client.ws_connect(proxy.url + CONTROL_PATH)
            await line.send_bytes(encode(hello(url, replica_id=f"r{number}", incarnation=f"{number}-{cycle}")))
            await line.receive_bytes()
            await asyncio.sleep(draws.uniform(0.0, 0.06))
            mock.kill()
            await line.close()

    async def keep_asking() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while not is_over.is_set():
            async with asyncio.timeout(20):
                outcomes[verdict(await ask(reader, writer))] += 1
            await asyncio.sleep(draws.uniform(0.0, 0.01))
        writer.close()

    async with aiohttp.ClientSession() as client:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(keep_asking())
            async with asyncio.TaskGroup() as lives:
                for number in range(4):
                    lives.create_task(live_and_die(client, number, CYCLES // 4))
            is_over.set()
        print(f"kills={CYCLES} answers={dict(outcomes)}")
        assert outcomes["whole"] > CYCLES / 10 and sum(outcomes.values()) > CYCLES * 0.3

        async def is_at_rest() -> bool:
            return await in_flight(client, proxy) == 0

        await eventually(is_at_rest, "all counters are back at zero")
    assert "Traceback" not in proxy.log() and "ERROR" not in proxy.log()
