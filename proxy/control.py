"""The WebSocket that a replica keeps open to the proxy (messages: protocol.py).

The connection is the replica's presence: its first frame is a Hello, it is routable from the Welcome on, and when the
connection ends, however it ends, it is gone. Whatever else a peer sends ends the connection and is noted, never
raised: this port is also the front door.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from asyncio import Transport
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from aiohttp import WSMsgType, web

from proxy.auth import check_bearer
from proxy.config import ProxyConfig, is_http_url
from proxy.errors import BadRequest, JoinRefused, NoReplicaAvailable
from proxy.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
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
from proxy.registry import Registry
from proxy.replicas import ModelObjects
from proxy.strangers import StrangerLog

logger = logging.getLogger(__name__)

MAX_CONTROL_CONNECTIONS: Final = 1024
SILENCES_TO_CLOSE: Final = 10  # heartbeat timeouts; a line silent for so long is cut, so that the replica dials anew
MAX_HELLO_CHARS: Final = 256  # of each text in a Hello
MAX_REASON_CHARS: Final = 1000  # of a Refused; it may quote what the peer sent
CLOSE_TIMEOUT_S: Final = 1.0  # to say goodbye to a peer that may be frozen


class ControlConnections:
    """All control connections of one proxy, and what they tell the registry."""

    def __init__(
        self, *, config: ProxyConfig, registry: Registry, strangers: StrangerLog, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._registry = registry
        self._strangers = strangers
        self._clock = clock
        self._proxy_id = uuid.uuid4().hex
        self._connection_ids = itertools.count(1)
        self._open: dict[int, Transport] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """GET on protocol.CONTROL_PATH: one replica, for as long as its connection lasts."""
        check_bearer(request, self._config.proxy_token, "the proxy's token (--proxy-token)")
        if len(self._open) >= MAX_CONTROL_CONNECTIONS:
            raise NoReplicaAvailable(f"{len(self._open)} control connections are open, limit {MAX_CONTROL_CONNECTIONS}")
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, compress=False, timeout=CLOSE_TIMEOUT_S)
        if not socket.can_prepare(request).ok or request.transport is None:
            raise BadRequest("this path takes WebSocket connections of replicas only")
        connection_id = next(self._connection_ids)
        self._open[connection_id] = request.transport
        reason = "connection lost"
        try:
            await socket.prepare(request)
            reason = await self._converse(socket, connection_id)
        except (ProtocolError, JoinRefused) as err:
            reason = str(err)
            if not self._lose(connection_id, reason):
                self._strangers.note(request.remote, f"control: {reason}")
            await self._refuse(socket, reason)
        except ConnectionError as err:
            logger.debug("control connection lost connection_id=%d err=%r", connection_id, err)  # as good as its end
        finally:
            del self._open[connection_id]
            self._lose(connection_id, reason)
        return socket

    async def close_all(self, app: web.Application) -> None:
        """Ends every connection, so that the replicas look for the next proxy at once. For `app.on_shutdown`."""
        for transport in list(self._open.values()):
            transport.close()

    async def _converse(self, socket: web.WebSocketResponse, connection_id: int) -> str:
        """From the Hello to the end of the connection; returns why it ended.

        Raises ProtocolError for a frame that does not belong here, JoinRefused for a Hello that cannot be accepted.
        """
        hello = await self._receive(socket, self._config.heartbeat_timeout_s)
        if not isinstance(hello, Hello):
            raise ProtocolError("the first frame must be a Hello")
        self._join(hello, connection_id)
        await self._send(socket, Welcome(proxy_id=self._proxy_id, report_interval_s=self._config.report_interval_s))
        while True:
            message = await self._receive(socket, SILENCES_TO_CLOSE * self._config.heartbeat_timeout_s)
            match message:
                case None:
                    return f"connection closed code={socket.close_code}"
                case LoadReport():
                    self._registry.report(connection_id, message, now_s=self._clock())
                case Leaving():
                    logger.info("replica leaving replica_id=%r reason=%.200r", hello.replica_id, message.reason)
                    self._registry.leaving(connection_id)
                case _:
                    raise ProtocolError(f"a replica does not send {type(message).__name__} here")

    def _join(self, hello: Hello, connection_id: int) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise JoinRefused(f"protocol version is {hello.version}, this proxy speaks {PROTOCOL_VERSION}")
        _check_texts(hello)
        if not is_http_url(hello.url):
            raise JoinRefused(f"url {hello.url!r} is not an address to send requests to (--advertise-url)")
        former_id = self._registry.join(
            hello, _model_objects(hello, int(time.time())), connection_id=connection_id, now_s=self._clock()
        )
        if former_id is not None:
            self._open[former_id].close()
        logger.info(
            "replica joined replica_id=%r incarnation=%r url=%r model=%r again=%s",
            hello.replica_id,
            hello.incarnation,
            hello.url,
            hello.model,
            former_id is not None,
        )

    def _lose(self, connection_id: int, reason: str) -> bool:
        """The connection's replica gets no more requests; False if there is none, or a newer Hello replaced it."""
        replica = self._registry.gone(connection_id)
        if replica is not None:
            logger.info("replica gone replica_id=%r reason=%.200r", replica.replica_id, reason)
        return replica is not None

    async def _receive(self, socket: web.WebSocketResponse, timeout_s: float) -> Message | None:
        """The next message, None at the end of the connection. Raises ProtocolError for garbage and for silence.

        aiohttp's own timeout begins anew with each ping, so the deadline is around it: a ping is no message.
        """
        try:
            async with asyncio.timeout(timeout_s):
                frame = await socket.receive()
        except TimeoutError as err:
            raise ProtocolError(f"nothing came for {timeout_s:g} s") from err
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            return None
        if frame.type is WSMsgType.ERROR:
            raise ProtocolError(f"not a WebSocket frame of at most {MAX_FRAME_BYTES} bytes: {frame.data}")
        if frame.type is not WSMsgType.BINARY:
            raise ProtocolError("frames are binary")
        return decode(frame.data)

    async def _send(self, socket: web.WebSocketResponse, message: Message) -> None:
        """Raises ProtocolError if the peer does not read."""
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                await socket.send_bytes(encode(message))
        except TimeoutError as err:
            raise ProtocolError("the peer does not read what it is sent") from err

    async def _refuse(self, socket: web.WebSocketResponse, reason: str) -> None:
        """Tells the peer why and closes; a peer that is gone needs neither."""
        try:
            await self._send(socket, Refused(reason=reason[:MAX_REASON_CHARS]))
            await socket.close()
        except (ConnectionError, ProtocolError) as err:
            logger.debug("refusal not delivered reason=%.200r err=%r", reason, err)


def _check_texts(hello: Hello) -> None:
    """Raises JoinRefused for a text that is missing, or that has no place in a log line, a label or a header."""
    if not (hello.replica_id and hello.model):
        raise JoinRefused("replica_id and model must not be empty")
    for name, text in asdict(hello).items():
        if isinstance(text, str):
            if len(text) > MAX_HELLO_CHARS:
                raise JoinRefused(f"{name} has {len(text)} characters, limit is {MAX_HELLO_CHARS}")
            if not text.isprintable():
                raise JoinRefused(f"{name} is {text!r}; it must have printable characters only")


def _model_objects(hello: Hello, created: int) -> ModelObjects:
    """The model as /v1/models shows it; `created` is when this proxy first knew of it, in Unix seconds."""
    model: dict[str, Any] = {
        "id": hello.model,
        "object": "model",
        "created": created,
        "owned_by": "lockstep",
        "max_model_len": hello.max_model_len,
    }
    return {hello.model: model}
