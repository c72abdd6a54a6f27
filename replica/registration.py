"""The control connection that a replica keeps to each proxy (messages: proxy/protocol.py).

    connect -> Hello -> Welcome -> LoadReport on change and at least every report interval -> Leaving on drain

Whatever ends it, the replica dials again: for ever, and so often that a proxy which restarts knows all its replicas
within a second. Every wait has a deadline; a proxy that is silent where it must answer counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    WSMsgType,
    WSServerHandshakeError,
)

from proxy.protocol import (
    CONTROL_PATH,
    MAX_FRAME_BYTES,
    Hello,
    Leaving,
    LoadReport,
    Message,
    ProtocolError,
    Refused,
    Welcome,
    decode,
    encode,
)
from replica.config import ReplicaConfig
from replica.group_state import GroupPhase
from replica.step_loop import EngineStats

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 0.8  # with jitter at most 0.88 s, so that a proxy that is back is found within a second
JITTER: Final = 0.1  # share of a pause, either way: replicas that lost one proxy do not dial it in step
ANSWER_TIMEOUT_S: Final = 3.0  # to connect, to welcome, to take a frame
HEARTBEAT_S: Final = 5.0  # a WebSocket ping so often; no pong within half of it ends the connection
CLOSE_TIMEOUT_S: Final = 1.0  # for the proxy to answer a goodbye
SHORTEST_REPORT_S: Final = 0.05  # changes within it are one report

_HANDSHAKES: Final = {  # why a proxy does not take the connection, by its answer's status
    401: "401, it has a proxy token: set LOCKSTEP_PROXY_TOKEN to the same here",
    404: "404, no Lockstep proxy answers there",
}


class LoadSource(Protocol):
    """The part of StepLoop that a registration uses."""

    def stats(self) -> EngineStats:
        """The load now."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back on every change, until the returned function is called."""


class ProxyLost(Exception):
    """The connection cannot go on; why is for the log."""


class Registration:
    """Introduces one replica to its proxies and tells them its load. One `run` per proxy."""

    def __init__(self, *, config: ReplicaConfig, hello: Hello, loop: LoadSource) -> None:
        self._config = config
        self._hello = hello
        self._loop = loop
        self._links: list[_Link] = []
        self._leaving: Leaving | None = None

    async def run(self, proxy_url: str) -> NoReturn:
        """Stays registered with one proxy until cancelled."""
        pause_s = FIRST_RETRY_S
        last_reason = ""
        while True:
            link = _Link(self._config, proxy_url)
            self._links.append(link)
            try:
                await link.converse(self._hello, self._loop, self._leaving)
            except ProxyLost as err:
                if str(err) != last_reason:  # the same again, ten times a second, tells nobody anything
                    last_reason = str(err)
                    event = "lost" if link.was_welcome else "not joined, trying on"
                    logger.warning("proxy %s url=%s reason=%s", event, proxy_url, last_reason)
            finally:
                self._links.remove(link)
            if link.was_welcome:
                pause_s, last_reason = FIRST_RETRY_S, ""
            await asyncio.sleep(pause_s * random.uniform(1 - JITTER, 1 + JITTER))
            pause_s = min(LAST_RETRY_S, 2 * pause_s)

    def leaving(self, reason: str) -> None:
        """Tells every proxy, now and whenever it is met again, to send no new requests."""
        self._leaving = Leaving(reason=reason)
        for link in self._links:
            link.leave(self._leaving)


class _Link:
    """One connection to one proxy, from its first byte to its last."""

    def __init__(self, config: ReplicaConfig, proxy_url: str) -> None:
        self.was_welcome = False
        self._url = proxy_url.rstrip("/") + CONTROL_PATH
        self._proxy_url = proxy_url
        self._config = config
        self._changed = asyncio.Event()
        self._leaving: Leaving | None = None

    def leave(self, message: Leaving) -> None:
        """Sends this as soon as the connection is up."""
        self._leaving = message
        self._changed.set()

    async def converse(self, hello: Hello, loop: LoadSource, leaving: Leaving | None) -> NoReturn:
        """Runs the connection. Raises ProxyLost when it ends."""
        self._leaving = leaving
        headers = {"Authorization": f"Bearer {self._config.proxy_token}"} if self._config.proxy_token else {}
        timeout = ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT_S)
        try:
            async with ClientSession(timeout=timeout, headers=headers) as session:
                socket = await self._dial(session)
                try:
                    report_interval_s = await self._introduce(socket, hello)
                    await self._report(socket, loop, report_interval_s)
                finally:
                    await socket.close()
        except TimeoutError as err:
            raise ProxyLost(f"no answer within {ANSWER_TIMEOUT_S:g} s") from err
        except WSServerHandshakeError as err:
            raise ProxyLost(_HANDSHAKES.get(err.status, f"it answered {err.status}")) from err
        except (ClientError, ConnectionError, ProtocolError, ValueError) as err:  # ValueError: a URL that is none
            raise ProxyLost(str(err) or type(err).__name__) from err

    async def _dial(self, session: ClientSession) -> ClientWebSocketResponse:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await session.ws_connect(self._url, heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES, compress=0)

    async def _introduce(self, socket: ClientWebSocketResponse, hello: Hello) -> float:
        """Hello and its answer; returns the longest time between two reports."""
        await self._send(socket, hello)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await _receive(socket)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the proxy answered a Hello with {type(answer).__name__}")
        self.was_welcome = True
        logger.info("proxy joined url=%s proxy_id=%s", self._proxy_url, answer.proxy_id)
        return min(answer.report_interval_s, self._config.report_interval_s)

    async def _report(self, socket: ClientWebSocketResponse, loop: LoadSource, interval_s: float) -> NoReturn:
        """Sends reports, and watches for the end of the connection. A change while one is sent makes another."""
        unsubscribe = loop.subscribe(self._changed.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_reports(socket, loop, interval_s))
                await _watch(socket)  # here, because a group that only waits leaves `cancelling()` wrong
        except ExceptionGroup as group:
            _raise_if_cancelled()
            raise group.exceptions[0] from group
        finally:
            unsubscribe()
        raise AssertionError("neither of them returns")

    async def _send_reports(self, socket: ClientWebSocketResponse, loop: LoadSource, interval_s: float) -> NoReturn:
        sequence = 0
        has_left = False
        while True:
            self._changed.clear()
            if self._leaving is not None and not has_left:
                await self._send(socket, self._leaving)
                has_left = True
            stats = loop.stats()
            sequence += 1
            await self._send(
                socket,
                LoadReport(
                    sequence=sequence,
                    running=stats.running,
                    waiting=stats.waiting,
                    queued_prefill_tokens=stats.queued_prefill_tokens,
                    free_blocks=stats.free_blocks,
                    total_blocks=stats.total_blocks,
                    step=stats.step,
                    epoch=stats.epoch,
                    is_reconfiguring=stats.group.state is GroupPhase.RECONFIGURING,
                    members=list(stats.group.members),
                ),
            )
            sent_s = time.monotonic()
            try:
                async with asyncio.timeout(interval_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # nothing has changed, and the proxy hears that
            await asyncio.sleep(max(0.0, SHORTEST_REPORT_S - (time.monotonic() - sent_s)))

    async def _send(self, socket: ClientWebSocketResponse, message: Message) -> None:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await socket.send_bytes(encode(message))


def _raise_if_cancelled() -> None:
    """Before Python 3.13 a TaskGroup that fails forgets that its own task was cancelled at the same moment."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _receive(socket: ClientWebSocketResponse) -> Message:
    """The proxy's next message. Raises ProxyLost at the end of the connection and for a Refused."""
    frame = await socket.receive()
    if frame.type is WSMsgType.BINARY:
        message = decode(frame.data)
        if isinstance(message, Refused):
            raise ProxyLost(f"refused: {message.reason}")
        return message
    if frame.type is WSMsgType.ERROR:
        raise ProxyLost(f"the connection failed: {frame.data}")
    raise ProxyLost(f"the proxy closed the connection, code {socket.close_code}")


async def _watch(socket: ClientWebSocketResponse) -> NoReturn:
    """Reads on. A proxy has nothing to say after its Welcome but a Refused."""
    while True:
        message = await _receive(socket)
        logger.debug("message ignored type=%s", type(message).__name__)
