"""A real `proxy serve` process: how it starts, drains, stops, and comes back after it was killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from proxy.protocol import CONTROL_PATH, encode
from tests.commands import BIN, Command, Commands, free_port, wait_until
from tests.protocol.proxy_fakes import (
    CHAT,
    MODEL,
    FakeReplica,
    Handler,
    answer_ok,
    eventually,
    fake_replica,
    hello,
    stream_for_ever,
)

REDIAL_S = 0.05


@asynccontextmanager
async def redialling_replica(proxy_url: str, handler: Handler) -> AsyncIterator[FakeReplica]:
    """A replica that keeps its connection to the proxy, and dials again for ever when it is lost."""

    async def stay_joined(url: str) -> None:
        while True:
            try:
                async with aiohttp.ClientSession() as session, session.ws_connect(proxy_url + CONTROL_PATH) as line:
                    await line.send_bytes(encode(hello(url, replica_id="r")))
                    while not (await line.receive()).type.name.startswith(("CLOS", "ERROR")):
                        pass
            except aiohttp.ClientError:
                pass  # the proxy is down: that is what this replica is for
            await asyncio.sleep(REDIAL_S)

    async with fake_replica(handler) as replica:
        dialling = asyncio.create_task(stay_joined(replica.url))
        try:
            yield replica
        finally:
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)


async def ask(client: aiohttp.ClientSession, proxy_url: str) -> int:
    """The status of a chat request; 0 if the proxy cannot be reached or drops it."""
    try:
        async with client.post(proxy_url + CHAT, json={"model": MODEL}) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return 0


async def wait_served(client: aiohttp.ClientSession, proxy_url: str) -> float:
    async def is_served() -> bool:
        return await ask(client, proxy_url) == 200

    return await eventually(is_served, "requests are served")


async def start_proxy(commands: Commands, *options: str, port: int = 0) -> Command:
    return await asyncio.to_thread(lambda: commands.proxy(*options, port=port))


def run_to_its_end(commands: Commands, *options: str) -> tuple[int, list[str]]:
    """Exit code and output lines of a `proxy` command that should end by itself, at once."""
    command = commands.start(str(BIN / "proxy"), *options)
    started_s = time.monotonic()
    code = command.process.wait(timeout=20)
    assert time.monotonic() - started_s < 15
    return code, command.log().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_proxy_stops_at_once_and_as_asked(commands: Commands, number: signal.Signals) -> None:
    proxy = commands.proxy()
    assert not proxy.url.endswith(":0")
    started_s = time.monotonic()
    proxy.process.send_signal(number)
    assert proxy.process.wait(timeout=10) == 0
    assert time.monotonic() - started_s < 3.0
    proxy.assert_gone()
    assert "Traceback" not in proxy.log()


def test_a_taken_port_is_one_line_and_exit_code_2(commands: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = run_to_its_end(commands, "serve", "--port", str(port))
    assert code == 2
    assert lines == [f"proxy: port {port} of 127.0.0.1 is taken; choose another --port, or 0"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("serve", "--prot", "1"), "unrecognized arguments: --prot 1"),
        (("serve", "--port", "http"), "argument --port: invalid int value: 'http'"),
        (("serve", "--port", "70000"), "--port is 70000"),
        (("serve", "--drain-timeout-s", "-1"), "--drain-timeout-s is -1.0"),
        (("serve", "--host", "0.0.0.0"), "--proxy-token"),
        (("serve", "--host", "192.0.2.1", "--proxy-token", "t"), "cannot listen on --host 192.0.2.1"),
        (("serve", "--host", "no.such.host.invalid", "--proxy-token", "t"), "cannot listen on --host no.such"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(commands: Commands, options: tuple[str, ...], said: str) -> None:
    code, lines = run_to_its_end(commands, *options)
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("proxy: ") and said in lines[0]


async def test_sigterm_lets_a_stream_end_and_then_exits_0(commands: Commands) -> None:
    may_end = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await may_end.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    proxy = await start_proxy(commands)
    async with redialling_replica(proxy.url, generate), aiohttp.ClientSession() as client:
        await wait_joined(client, proxy.url)
        async with client.post(proxy.url + CHAT, json={"model": MODEL, "stream": True}) as response:
            await response.content.readchunk()
            proxy.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: "proxy draining" in proxy.log(), "the drain begins")
            await asyncio.sleep(0.2)
            async with aiohttp.ClientSession() as latecomer:
                assert await ask(latecomer, proxy.url) == 0
            assert proxy.process.poll() is None
            may_end.set()
            assert await response.content.read() == b"data: [DONE]\n\n"
        assert await asyncio.to_thread(proxy.process.wait, 5) == 0


async def wait_joined(client: aiohttp.ClientSession, proxy_url: str) -> float:
    async def is_healthy() -> bool:
        try:
            async with client.get(f"{proxy_url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    return await eventually(is_healthy, "the replica has joined")


@pytest.mark.parametrize("how", ["drain timeout", "second signal"])
async def test_a_drain_ends_when_its_time_or_the_operator_s_patience_does(commands: Commands, how: str) -> None:
    proxy = await start_proxy(commands, "--drain-timeout-s", "0.5" if how == "drain timeout" else "60")
    async with redialling_replica(proxy.url, stream_for_ever) as replica, aiohttp.ClientSession() as client:
        await wait_joined(client, proxy.url)
        async with client.post(proxy.url + CHAT, json={"model": MODEL, "stream": True}) as response:
            await response.content.readchunk()
            proxy.process.send_signal(signal.SIGTERM)
            if how == "second signal":
                await asyncio.to_thread(wait_until, lambda: "proxy draining" in proxy.log(), "the drain begins")
                proxy.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(proxy.process.wait, 5) == 0
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await eventually(replica.is_idle, "the replica's stream has ended")


async def test_a_killed_and_restarted_proxy_serves_within_a_second_of_being_ready(commands: Commands) -> None:
    port = free_port()
    proxy = await start_proxy(commands, port=port)
    async with redialling_replica(proxy.url, answer_ok), aiohttp.ClientSession() as client:
        await wait_served(client, proxy.url)
        for _ in range(2):
            proxy.kill()
            assert await ask(client, proxy.url) == 0
            proxy = await start_proxy(commands, port=port)
            assert await wait_served(client, proxy.url) < 1.0
        assert await asyncio.to_thread(proxy.stop) == 0
    assert "replica joined" in proxy.log() and "Traceback" not in proxy.log()


async def test_a_killed_replica_is_gone_at_once_and_its_stream_ends_with_an_error(commands: Commands) -> None:
    proxy = await start_proxy(commands)
    async with aiohttp.ClientSession() as client:
        async with redialling_replica(proxy.url, stream_for_ever):
            await wait_joined(client, proxy.url)
            response = await client.post(proxy.url + CHAT, json={"model": MODEL, "stream": True})
            await response.content.readchunk()
        text = await asyncio.wait_for(response.text(), 5)
        assert '"replica_lost"' in text and "[DONE]" not in text
        assert await ask(client, proxy.url) == 503
    assert "replica gone" in proxy.log()


async def test_a_proxy_under_load_leaves_no_open_file_behind(commands: Commands) -> None:
    proxy = await start_proxy(commands)
    async with redialling_replica(proxy.url, answer_ok), aiohttp.ClientSession() as client:
        await wait_served(client, proxy.url)
        before = proxy.num_open_files()[proxy.process.pid]
        for _ in range(5):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as crowd:
                assert await asyncio.gather(*(ask(crowd, proxy.url) for _ in range(40))) == [200] * 40

        async def is_as_before() -> bool:
            return proxy.num_open_files()[proxy.process.pid] <= before + 1

        await eventually(is_as_before, "the connections are closed", timeout_s=15.0)
