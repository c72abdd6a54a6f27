"""The control connection of a replica against a proxy that is a script."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from proxy.protocol import CONTROL_PATH, Hello, Leaving, LoadReport, Message, Refused, Welcome, decode, encode
from replica import registration
from replica.config import ReplicaConfig
from replica.registration import Registration
from replica.step_clock import Reconfiguration
from tests.protocol.fake_loop import CONFIG, FakeLoop

HELLO: Final = Hello(
    replica_id="r0",
    incarnation="i0",
    url="http://127.0.0.1:1",
    model="tiny-moe",
    model_hash="h",
    group="g",
    dp_rank=0,
    max_model_len=4096,
    max_num_seqs=8,
)


class FakeProxy:
    """Welcomes every Hello, or answers with `answer`; None says nothing."""

    def __init__(self) -> None:
        self.answer: Message | bytes | None = Welcome(proxy_id="p0", report_interval_s=0.3)
        self.tokens: list[str | None] = []
        self.received: list[tuple[float, Message]] = []
        self.sockets: list[web.WebSocketResponse] = []
        self.num_closed = 0
        self.changed = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.received]

    @property
    def reports(self) -> list[LoadReport]:
        return [message for message in self.messages if isinstance(message, LoadReport)]

    async def start(self) -> None:
        """Listens, after the first time at the same port as before."""
        app = web.Application()
        app.router.add_get(CONTROL_PATH, self.control)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        if self._runner is not None:
            for socket in self.sockets:
                with suppress(ConnectionError):
                    await socket.close()
            await self._runner.cleanup()
            self._runner = None

    async def control(self, request: web.Request) -> web.WebSocketResponse:
        self.tokens.append(request.headers.get("Authorization"))
        socket = web.WebSocketResponse(timeout=0.1)
        await socket.prepare(request)
        self.sockets.append(socket)
        try:
            async for frame in socket:
                assert frame.type is WSMsgType.BINARY
                message = decode(frame.data)
                self.received.append((time.monotonic(), message))
                self.changed.set()
                if isinstance(message, Hello) and self.answer is not None:
                    await socket.send_bytes(self.answer if isinstance(self.answer, bytes) else encode(self.answer))
                    if not isinstance(self.answer, Welcome):
                        await socket.close()
        finally:
            self.num_closed += 1
            self.changed.set()
        return socket

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def proxy() -> AsyncIterator[FakeProxy]:
    fake = FakeProxy()
    await fake.start()
    yield fake
    await fake.stop()


@asynccontextmanager
async def registered(
    *urls: str, loop: FakeLoop | None = None, config: ReplicaConfig = CONFIG
) -> AsyncIterator[Registration]:
    """A registration that runs for these proxies. Nothing of it may be left behind."""
    source = loop or FakeLoop()
    made = Registration(config=config, hello=HELLO, loop=source)
    running = [asyncio.create_task(made.run(url)) for url in urls]
    try:
        yield made
    finally:
        for task in running:
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        assert not source._subscribers


async def test_hello_comes_first_and_reports_follow(proxy: FakeProxy) -> None:
    async with registered(proxy.url):
        await proxy.until(lambda: len(proxy.reports) >= 3)
    assert proxy.messages[0] == HELLO
    assert [report.sequence for report in proxy.reports[:3]] == [1, 2, 3]
    assert proxy.reports[0].total_blocks == 100


async def test_idle_replica_reports_each_interval_of_the_welcome(proxy: FakeProxy) -> None:
    async with registered(proxy.url):
        await proxy.until(lambda: len(proxy.reports) >= 4)
    times = [at_s for at_s, message in proxy.received if isinstance(message, LoadReport)]
    assert 0.85 < times[3] - times[0] < 2.0  # three intervals of 0.3 s


async def test_a_group_that_changes_its_members_is_reported_at_once(proxy: FakeProxy) -> None:
    proxy.answer = Welcome(proxy_id="p0", report_interval_s=60.0)
    loop = FakeLoop()
    async with registered(proxy.url, loop=loop, config=dataclasses.replace(CONFIG, report_interval_s=60.0)):
        await proxy.until(lambda: len(proxy.reports) == 1)
        loop.group.changed(Reconfiguration(epoch=2, members=(0,), evicted=((1,),), reason="lost"))
        loop.notify()
        await proxy.until(lambda: len(proxy.reports) == 2)
        loop.group.connected(rebuild_s=0.1, reload_s=0.0)
        loop.notify()
        await proxy.until(lambda: len(proxy.reports) == 3)
    assert [report.is_reconfiguring for report in proxy.reports] == [False, True, False]
    assert proxy.reports[-1].epoch == 2


async def test_change_is_reported_soon_and_many_changes_together(proxy: FakeProxy) -> None:
    proxy.answer = Welcome(proxy_id="p0", report_interval_s=60.0)
    loop = FakeLoop()
    async with registered(proxy.url, loop=loop, config=dataclasses.replace(CONFIG, report_interval_s=60.0)):
        await proxy.until(lambda: len(proxy.reports) == 1)
        await asyncio.sleep(0.1)
        started_s = time.monotonic()
        while time.monotonic() - started_s < 0.5:
            loop.num_steps += 1
            loop.notify()
            await asyncio.sleep(0.001)
        await proxy.until(lambda: proxy.reports[-1].step == loop.num_steps)
    assert 3 <= len(proxy.reports) <= 13  # at most 20 a second


async def test_token_is_shown_to_the_proxy(proxy: FakeProxy) -> None:
    async with registered(proxy.url, config=dataclasses.replace(CONFIG, proxy_token="secret")):
        await proxy.until(lambda: bool(proxy.reports))
    async with registered(proxy.url):
        await proxy.until(lambda: len(proxy.tokens) == 2)
    assert proxy.tokens == ["Bearer secret", None]


async def test_proxy_that_restarts_knows_the_replica_within_a_second(proxy: FakeProxy) -> None:
    async with registered(proxy.url):
        for _ in range(3):
            await proxy.until(lambda: bool(proxy.reports))
            await proxy.stop()
            proxy.received.clear()
            await asyncio.sleep(0.4)
            await proxy.start()
            await proxy.until(lambda: bool(proxy.reports), timeout_s=1.0)
            assert proxy.messages[0] == HELLO and proxy.reports[0].sequence == 1


async def test_each_proxy_has_its_own_connection(proxy: FakeProxy) -> None:
    other = FakeProxy()
    await other.start()
    try:
        async with registered(proxy.url, other.url + "/"):
            await proxy.until(lambda: bool(proxy.reports))
            await other.until(lambda: bool(other.reports))
            await other.stop()
            proxy.received.clear()
            await proxy.until(lambda: len(proxy.reports) >= 2)
            assert HELLO not in proxy.messages
    finally:
        await other.stop()


async def test_leaving_is_said_at_once_and_again_after_a_reconnect(proxy: FakeProxy) -> None:
    async with registered(proxy.url) as made:
        await proxy.until(lambda: bool(proxy.reports))
        made.leaving("stopping")
        await proxy.until(lambda: Leaving(reason="stopping") in proxy.messages, timeout_s=0.25)
        await proxy.sockets[-1].close()
        proxy.received.clear()
        await proxy.until(lambda: len(proxy.reports) >= 2)
    assert proxy.messages[:2] == [HELLO, Leaving(reason="stopping")]
    assert proxy.messages.count(Leaving(reason="stopping")) == 1


async def test_refusal_is_logged_once_and_tried_again(proxy: FakeProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.answer = Refused(reason="no room")
    with caplog.at_level(logging.WARNING):
        async with registered(proxy.url):
            await proxy.until(lambda: len(proxy.messages) >= 3)
            proxy.answer = Welcome(proxy_id="p0", report_interval_s=0.3)
            await proxy.until(lambda: bool(proxy.reports))
    assert [record.getMessage() for record in caplog.records] == [
        f"proxy not joined, trying on url={proxy.url} reason=refused: no room"
    ]


@pytest.mark.parametrize("answer", [b"garbage", Leaving(reason="?"), None], ids=["garbage", "wrong", "silence"])
async def test_proxy_that_does_not_welcome_is_dialled_again(
    proxy: FakeProxy, answer: Message | bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "ANSWER_TIMEOUT_S", 0.2)
    proxy.answer = answer
    async with registered(proxy.url):
        await proxy.until(lambda: proxy.messages.count(HELLO) >= 2)
        proxy.answer = Welcome(proxy_id="p0", report_interval_s=0.3)
        await proxy.until(lambda: bool(proxy.reports))


async def test_address_that_takes_connections_and_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "ANSWER_TIMEOUT_S", 0.1)
    dialled = 0
    again = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        if dialled == 2:
            again.set()
        await reader.read()  # the request
        await reader.read()  # its end
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, registered(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
        await asyncio.wait_for(again.wait(), 5)


async def test_nobody_there_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with registered("http://127.0.0.1:1"):
            await asyncio.sleep(0.8)
    assert len(caplog.records) == 1


async def test_cancelled_registration_closes_its_connection(proxy: FakeProxy) -> None:
    async with registered(proxy.url):
        await proxy.until(lambda: bool(proxy.reports))
        assert proxy.num_closed == 0
    await proxy.until(lambda: proxy.num_closed == 1, timeout_s=2.0)


async def test_a_proxy_that_wants_a_token_is_answered_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    app = web.Application()
    app.router.add_get(CONTROL_PATH, refuse)
    async with TestServer(app) as server, registered(str(server.make_url(""))):
        await asyncio.sleep(0.3)
    assert "LOCKSTEP_PROXY_TOKEN" in caplog.text


@pytest.mark.parametrize("num_turns", range(12))
async def test_cancellation_in_the_moment_in_which_the_proxy_goes_is_not_lost(proxy: FakeProxy, num_turns: int) -> None:
    async with asyncio.timeout(5), registered(proxy.url):
        await proxy.until(lambda: len(proxy.reports) >= 1)
        await proxy.sockets[-1].close()
        for _ in range(num_turns):  # of the event loop, so that every order of the two events is tried
            await asyncio.sleep(0)


@pytest.mark.parametrize("url", ["http://.:80", f"http://{'a' * 80}:80", "http://a:99999", "http://[::1"])
async def test_an_address_that_is_none_is_a_failed_attempt(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with registered(url):  # which fails the test if the registration ends
        await asyncio.sleep(0.3)
    assert len(caplog.records) == 1 and caplog.records[0].getMessage().startswith(
        f"proxy not joined, trying on url={url} reason="
    )
