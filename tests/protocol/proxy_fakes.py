"""A real proxy in this process, fake replicas behind it, and the control connections by which they join."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp
from aiohttp import web

from proxy.config import ProxyConfig
from proxy.protocol import CONTROL_PATH, Hello, Leaving, LoadReport, Message, decode, encode
from proxy.serve import Stop, bind, open_resources, serve

MODEL: Final = "tiny"
CHAT: Final = "/v1/chat/completions"
PATIENCE_S: Final = 10.0  # for whatever should happen soon, on a busy machine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_numbers = itertools.count()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> float:
    """Seconds until the condition held; fails the test if it does not within `timeout_s`."""
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - started_s


@dataclass
class RunningProxy:
    """A proxy that serves, and a client of it."""

    url: str
    client: aiohttp.ClientSession
    stop: Stop = field(default_factory=Stop)
    serving: asyncio.Future[None] = field(default_factory=asyncio.Future)  # of a process of its own: never done

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """What /nodes/status says of each replica, by its id."""
        async with self.client.get(f"{self.url}/nodes/status") as response:
            assert response.status == 200
            return {node["replica_id"]: node for node in (await response.json()).values()}

    async def in_flight(self) -> int:
        """Requests that the proxy counts as in flight, over all replicas."""
        return sum(node["unfinished"] for node in (await self.nodes()).values())

    async def metric(self, sample: str) -> float:
        """The value of one sample of /metrics, named with its labels; 0 if there is none yet."""
        async with self.client.get(f"{self.url}/metrics") as response:
            text = await response.text()
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def wait_state(self, replica_id: str, state: str | None) -> float:
        """Seconds until the replica is in the state; None: until it is not known any more."""

        async def is_reached() -> bool:
            node = (await self.nodes()).get(replica_id)
            return (node and node["state"]) == state

        return await eventually(is_reached, f"{replica_id} is {state}")

    def ask(self, model: str = MODEL, **more: Any) -> Any:
        """A chat request, to be entered with `async with`."""
        return self.client.post(f"{self.url}{CHAT}", json={"model": model, "messages": [], **more})


@asynccontextmanager
async def running_proxy(send_buffer_bytes: int = 0, **settings: Any) -> AsyncIterator[RunningProxy]:
    """A proxy on a free port, stopped at once at the end of the block.

    `send_buffer_bytes` bounds what the kernel takes off the proxy's hands for each client; 0 leaves it alone.
    """
    config = ProxyConfig(**{"port": 0, "drain_timeout_s": 5.0, **settings})
    listener = bind(config)
    if send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # inherited by its connections
    stop = Stop()
    serving = asyncio.create_task(serve(config, listener, stop, open_resources(config)))
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {config.proxy_token or config.api_key}"}
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
            yield RunningProxy(url=url, stop=stop, client=client, serving=serving)
    finally:
        stop.request()
        stop.request()
        await serving


def hello(at: str, /, **changes: Any) -> Hello:
    """A Hello of a replica at this URL, of an id of its own."""
    number = next(_numbers)
    plain = Hello(
        replica_id=f"r{number}",
        incarnation=f"life{number}",
        url=at,
        model=MODEL,
        model_hash="0" * 16,
        group=f"g{number}",
        dp_rank=0,
        max_model_len=512,
        max_num_seqs=8,
    )
    return replace(plain, **changes)


@dataclass
class ControlLine:
    """A replica's end of its control connection."""

    socket: aiohttp.ClientWebSocketResponse
    sequence: int = 0

    async def say(self, message: Message) -> None:
        """Sends one message."""
        await self.socket.send_bytes(encode(message))

    async def hear(self) -> Message:
        """The proxy's next message."""
        return decode(await self.socket.receive_bytes(timeout=PATIENCE_S))

    async def report(self, **changes: Any) -> None:
        """Sends a load report."""
        self.sequence += 1
        idle = LoadReport(
            sequence=self.sequence,
            running=0,
            waiting=0,
            queued_prefill_tokens=0,
            free_blocks=10,
            total_blocks=10,
            step=0,
            epoch=0,
        )
        await self.say(replace(idle, **changes))

    async def leave(self) -> None:
        """Says that the replica drains."""
        await self.say(Leaving(reason="draining"))


@asynccontextmanager
async def control_line(proxy: RunningProxy, token: str = "") -> AsyncIterator[ControlLine]:
    """An open control connection on which nothing was said yet."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(proxy.url + CONTROL_PATH, headers=headers) as socket:
            yield ControlLine(socket)


@asynccontextmanager
async def joined(proxy: RunningProxy, introduction: Hello, *, beats: bool = True) -> AsyncIterator[ControlLine]:
    """A control connection of a replica that was welcomed and, with `beats`, reports as often as it should."""
    async with control_line(proxy) as line:
        await line.say(introduction)
        welcome = await line.hear()

        async def beat() -> None:
            while not line.socket.closed:
                await line.report()
                await asyncio.sleep(welcome.report_interval_s)  # type: ignore[union-attr]

        beating = asyncio.create_task(beat()) if beats else None
        try:
            yield line
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)


@dataclass
class Received:
    """A request as a fake replica got it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class FakeReplica:
    """A server behind the proxy, and what happened to it."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    open_requests: int = 0
    cancelled: int = 0  # requests whose connection the proxy closed before the answer's end

    async def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.open_requests == 0


@asynccontextmanager
async def fake_replica(handler: Handler) -> AsyncIterator[FakeReplica]:
    """An aiohttp server that notes every POST and answers it with `handler`."""
    fake = FakeReplica()

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = [(name.decode(), value.decode()) for name, value in request.raw_headers]
        fake.received.append(Received(request.raw_path, headers, await request.read()))
        fake.open_requests += 1
        try:
            return await handler(request)
        except (asyncio.CancelledError, ConnectionResetError):
            fake.cancelled += 1
            raise
        finally:
            fake.open_requests -= 1

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_replica(script: Script) -> AsyncIterator[FakeReplica]:
    """A server that reads one request per connection, hands the connection to `script`, and then closes it."""
    fake = FakeReplica()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in head[1:-2])]
        received = Received(head[0].split()[1], headers, b"")
        received.body = await reader.readexactly(int(received.all("Content-Length")[0]))
        fake.received.append(received)
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake


async def answer_ok(request: web.Request) -> web.StreamResponse:
    """A handler of a replica that just works."""
    return web.json_response({"object": "chat.completion", "choices": []})


async def answer_never(request: web.Request) -> web.StreamResponse:
    """A handler that generates for ever without sending anything."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def stream_for_ever(request: web.Request) -> web.StreamResponse:
    """A handler that streams events until somebody stops it."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    while True:
        await answer.write(b'data: {"choices": []}\n\n')
        await asyncio.sleep(0.01)
