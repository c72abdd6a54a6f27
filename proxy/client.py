"""One client's connection: heads and bodies of its requests in, answers out; and what is no inference, to aiohttp.

A request for an inference route becomes an exchange (exchange.py). Any other is handed over with the connection and
all bytes read so far to aiohttp's own protocol, which keeps it: its answers close the connection, since the next
request on it could be for the data path.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from proxy.answers import MESSAGES_ROUTE, error_answer
from proxy.errors import BadRequest, ExpectationFailed, HeadTooLarge, Malformed, RequestError
from proxy.exchange import Exchange, Phase, too_large
from proxy.framing import Bytes, ChunkedBody, SizedBody
from proxy.http1 import MAX_HEAD_BYTES, HeadParser, RequestHead
from proxy.strangers import StrangerLog
from proxy.turns import Turns

if TYPE_CHECKING:
    from proxy.dispatcher import Dispatcher

KEEPALIVE_S: Final = 75.0  # an idle client connection
LINGER_S: Final = 2.0  # to read off what a client goes on sending after its request was refused
COPIED_BYTES: Final = 32 * 1024  # from here on, what follows a head is looked at in place
KEPT_BODY_BYTES: Final = 2**20  # a body up to this is kept, and so can be sent again; a longer one streams through
PIPELINED_BYTES: Final = 64 * 1024  # of requests that a client sends before it has its answer
# Without dots, so that no path can climb out of /v1 at the replica. GET /v1/models... is answered here.
_INFERENCE: Final = re.compile(rb"/v1/(?!models(?:/|$))([\w-]+(?:/[\w-]+)*)", re.ASCII)
_BEGINNING: Final = re.compile(rb"\r?\Z|[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}(?: |\Z)")
_ROUTES: Final = {
    path.encode(): path
    for path in (
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank"),
        *(MESSAGES_ROUTE, f"{MESSAGES_ROUTE}/count_tokens"),
        *("/tokenize", "/detokenize"),
    )
}
OTHER_ROUTE: Final = "/v1/{operation}"
# What replicas are asked without a body.
_READING: Final = {b"/version": "/version", b"/openapi.json": "/openapi.json"}
_RESPONSE: Final = re.compile(rb"/v1/responses/[\w-]+(?:/[\w-]+)?", re.ASCII)


def inference_route(head: RequestHead) -> str | None:
    """What metrics call the route of a request for the data path; None for any other request."""
    if head.method != b"POST":
        return _reading_route(head)
    route = _ROUTES.get(head.target)
    if route is not None:
        return route
    path = head.target.partition(b"?")[0]
    return _ROUTES.get(path) or (OTHER_ROUTE if _INFERENCE.fullmatch(path) else None)


def _reading_route(head: RequestHead) -> str | None:
    path = head.target.partition(b"?")[0]
    if head.method == b"GET" and path in _READING:
        return _READING[path]
    return OTHER_ROUTE if head.method in (b"GET", b"DELETE") and _RESPONSE.fullmatch(path) else None


class FrontDoor:
    """What all client connections of one proxy share."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        control_plane: Callable[[], asyncio.Protocol],
        strangers: StrangerLog,
        session_header: str,
        client_timeout_s: float,
    ) -> None:
        self.dispatcher = dispatcher
        self.control_plane = control_plane  # a new protocol of aiohttp's, for a connection that is handed over
        self.strangers = strangers
        self.client_timeout_s = client_timeout_s
        self.parser = HeadParser.for_requests(session_header)
        self.connections: set[ClientConnection] = set()
        self.turns = Turns()

    def __call__(self) -> ClientConnection:
        """For `loop.create_server`."""
        return ClientConnection(self)

    def tick(self, now_s: float) -> None:
        """Called some times a second."""
        for connection in tuple(self.connections):
            connection.check(now_s)

    def close_all(self) -> None:
        """Closes what is left."""
        for connection in tuple(self.connections):
            connection.close()


def _discard(data: bytes) -> None:
    """Where bytes go for a client that is gone."""


class ClientConnection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_body",
        "_deadline_s",
        "_door",
        "_exchange",
        "_is_full",
        "_is_kept_alive",
        "_is_lingering",
        "_is_streaming",
        "_parts",
        "_send",
        "_size",
        "_stalled_bytes",
        "_transport",
        "_turns",
        "_unread",
        "is_http_1_1",
    )

    def __init__(self, door: FrontDoor) -> None:
        self.is_http_1_1 = True
        self._door = door
        self._turns = door.turns
        self._transport: asyncio.Transport | None = None
        self._send: Callable[[bytes], object] = _discard  # the transport's own `write` while it lives
        self._exchange: Exchange | None = None
        self._unread = b""  # what came and is not yet looked at: half a head, or the next request
        self._body: SizedBody | ChunkedBody | None = None  # of the current request, until it is whole
        self._parts: list[Bytes] = []  # of the body
        self._size = 0
        self._is_streaming = False  # the body is too long to be kept, and has begun to go through
        self._deadline_s = math.inf
        self._stalled_bytes = 0  # that the client had not taken when it was last looked at
        self._is_full = False
        self._is_kept_alive = True
        self._is_lingering = False

    # From asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._send = self._transport.write
        self._door.connections.add(self)
        self._deadline_s = self._door.dispatcher.now_s + KEEPALIVE_S
        # Anything that the kernel does not take at once stops the replica's stream: a slow reader costs two reads,
        # one that waits for its turn and one that came meanwhile.
        # (Not 0: TLS transports pause at the limit, not above it.)
        self._transport.set_write_buffer_limits(high=1, low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio."""
        self._transport, self._send = None, _discard
        self._door.connections.discard(self)
        if self._exchange is not None:
            self._exchange.client_left()

    def eof_received(self) -> None:
        """From asyncio: a client that has closed its end is gone, and what it was sent is of no use to it."""
        if self._exchange is not None and self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """From asyncio."""
        if self._body is not None:
            self._take_body(data)
        elif self._exchange is not None or self._is_full:
            self._unread += data
            if len(self._unread) > PIPELINED_BYTES and self._transport is not None:
                self._transport.pause_reading()
        elif not self._is_lingering:
            self._take_head(self._unread + data if self._unread else data)

    def pause_writing(self) -> None:
        """From asyncio."""
        self._is_full = True
        self._stalled_bytes = self._unsent()
        self._deadline_s = self._door.dispatcher.now_s + self._door.client_timeout_s
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        """From asyncio."""
        self._is_full = False
        if self._exchange is not None:
            self._deadline_s = math.inf
            self._exchange.client_drained()
        else:
            self._after_answer()

    # A request.

    def _take_head(self, data: bytes) -> None:
        if data.startswith(b"\r\n"):
            data = data[2:]  # RFC 9112 section 2.2: an empty line before a request
        end = data.find(b"\r\n\r\n")
        try:
            if end < 0:
                self._await_head(data)
                return
            if end > MAX_HEAD_BYTES:
                raise HeadTooLarge(f"the head is longer than {MAX_HEAD_BYTES} bytes")
            head = self._door.parser.request(data[:end])
        except RequestError as err:
            self._refuse(err)
            return
        self._unread = b""
        route = inference_route(head)
        if route is None:
            self._hand_over(data)
        else:
            self._begin(head, route, data[end + 4 :] if len(data) <= COPIED_BYTES else memoryview(data)[end + 4 :])

    def _await_head(self, data: bytes) -> None:
        """The head is not whole. What can never become one is refused now."""
        if len(data) > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"the head is longer than {MAX_HEAD_BYTES} bytes")
        if data.count(b"\n") != data.count(b"\r\n"):
            raise BadRequest("a bare LF ends a line of the head")
        if data and not _BEGINNING.match(data):
            raise BadRequest("the request does not begin with a method")
        if not self._unread and data:
            self._deadline_s = self._door.dispatcher.now_s + self._door.client_timeout_s
        self._unread = data

    def _begin(self, head: RequestHead, route: str, data: Bytes) -> None:
        """A request whose head is here, with `data` behind it."""
        dispatcher = self._door.dispatcher
        self.is_http_1_1 = head.is_http_1_1
        self._is_kept_alive = head.is_kept_alive and not dispatcher.open_requests.is_draining
        length = head.content_length or 0
        try:
            expected = head.noted.get(b"expect")
            if expected is not None and expected.lower() != b"100-continue":
                raise ExpectationFailed("the only known expectation is 100-continue")
            exchange = dispatcher.open(self, head, route)
        except RequestError as err:
            dispatcher.metrics.request_ended(route, err.status, 0.0)
            is_whole = not head.is_chunked and len(data) >= length
            self._unread = bytes(data[length:]) if is_whole else b""
            self._is_kept_alive = self._is_kept_alive and is_whole
            self.respond(err, route, dispatcher.request_id(head), dispatcher.cors.lines(head.noted.get(b"origin")))
            self._after_answer()
            return
        self._exchange = exchange
        self._deadline_s = math.inf
        if length <= len(data) and not head.is_chunked:
            if length < len(data):
                self._unread, data = bytes(data[length:]), data[:length]
            self._body_is_whole([data] if length else [], length)
            return
        self._body = ChunkedBody() if head.is_chunked else SizedBody(length)
        self._parts, self._size, self._is_streaming = [], 0, False
        if expected is not None and not data and self.is_http_1_1:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._take_body(data)

    def _take_body(self, data: Bytes) -> None:
        """More of a body that did not come with its head."""
        body, exchange = self._body, self._exchange
        assert body is not None and exchange is not None
        self._deadline_s = self._door.dispatcher.now_s + self._door.client_timeout_s
        parts: list[Bytes] = []
        try:
            used = body.feed(data, parts) if isinstance(body, SizedBody) else body.feed(bytes(data), parts)
        except Malformed as err:
            exchange.fail(BadRequest(f"the body is malformed: {err}"))
            return
        if body.is_done:
            self._unread = bytes(data[used:])
            self._deadline_s = math.inf
        if self._is_streaming:
            if body.is_done:
                self._body = None
            exchange.more_body(parts, is_last=body.is_done)
            return
        self._parts += parts
        self._size += sum(map(len, parts))
        if self._size > self._door.dispatcher.max_body_bytes:
            exchange.fail(too_large(self._size, self._door.dispatcher.max_body_bytes))
        elif body.is_done:
            self._body = None
            self._body_is_whole(self._parts, self._size)
        elif self._size > KEPT_BODY_BYTES:
            self._stream_body(exchange)

    def _stream_body(self, exchange: Exchange) -> None:
        """The body is too long to be kept: what is here goes on its way, and the rest follows when it can."""
        if self._door.dispatcher.can_begin(exchange, self._parts, is_whole=False):
            parts, self._parts = self._parts, []
            self._is_streaming = True
            self.pause_sending()
            exchange.body_ready(parts, self._size, is_whole=False)

    def _body_is_whole(self, parts: list[Bytes], size: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._parts = []
        self._door.dispatcher.can_begin(exchange, parts, is_whole=True)
        exchange.body_ready(parts, size, is_whole=True)

    def _refuse(self, err: RequestError) -> None:
        """Answers what is no request, and ends the connection: where the next one begins is unknown."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        self._door.strangers.note(str(peer[0]) if peer else None, f"malformed HTTP: {err}")
        self._is_kept_alive = False
        self.is_http_1_1 = True
        self.respond(err, "", b"", [])
        self._after_answer()

    def _hand_over(self, data: bytes) -> None:
        """Gives the connection to aiohttp, for good."""
        transport, self._transport, self._send = self._transport, None, _discard
        self._door.connections.discard(self)
        if transport is None:
            return
        transport.set_write_buffer_limits()
        protocol = self._door.control_plane()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)

    # For the exchange.

    def write(self, data: bytes) -> None:
        """Sends bytes of an answer now, after what waits."""
        held = self._turns.waiting.pop(self, None)
        self._send(held + data if held else data)

    def write_in_turn(self, data: bytes) -> None:
        """Sends bytes of an answer that flows, once what is new has been handled; never more than one read waits."""
        if self in self._turns.waiting:
            self.write(data)
        else:
            self._turns.join(self, data)

    def write_held(self) -> None:
        """Sends what waits, if something does."""
        held = self._turns.waiting.pop(self, None)
        if held:
            self._send(held)

    def respond(self, err: RequestError, route: str, request_id: bytes, more_lines: list[bytes]) -> None:
        """Sends an error as the whole answer."""
        if self._body is not None:
            self._is_kept_alive = False  # the rest of the body is not waited for
        self.write(error_answer(err, route, request_id, [*more_lines, *self.connection_lines()]))

    def connection_lines(self) -> list[bytes]:
        """What an answer's head says of the connection."""
        if self._door.dispatcher.open_requests.is_draining or self._body is not None:
            self._is_kept_alive = False
        if not self._is_kept_alive:
            return [b"Connection: close"]
        return [] if self.is_http_1_1 else [b"Connection: keep-alive"]

    def close_after(self) -> None:
        """The end of the connection will be the end of the answer."""
        self._is_kept_alive = False

    def pause_sending(self) -> None:
        """Takes no more of the body for now."""
        if self._body is not None and self._transport is not None:
            self._deadline_s = math.inf
            self._transport.pause_reading()

    def want_more(self) -> None:
        """Takes more of the body."""
        if self._body is not None and self._transport is not None:
            self._deadline_s = self._door.dispatcher.now_s + self._door.client_timeout_s
            self._transport.resume_reading()

    def reset(self) -> None:
        """Ends the connection so that the client cannot take half an answer for a whole one."""
        if self._transport is not None:
            self._transport.abort()

    def exchange_ended(self, exchange: Exchange) -> None:
        """The answer has been written as far as it will be."""
        if self._exchange is exchange:
            self.write_held()
            self._exchange = None
            self._after_answer()

    # After an answer.

    def _after_answer(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if self._is_lingering:
            return
        if self._body is not None or not self._is_kept_alive:
            self._linger(transport)
            return
        if self._is_full:
            return  # until the client has read this answer, the next would only pile up
        self._deadline_s = self._door.dispatcher.now_s + KEEPALIVE_S
        if self._unread:
            transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """The next request, that came before its time."""
        if self._transport is not None and self._exchange is None and not self._is_lingering and self._unread:
            data, self._unread = self._unread, b""
            self._take_head(data)

    def _linger(self, transport: asyncio.Transport) -> None:
        """Closes our end and reads off the other for a moment: a close with bytes unread would destroy the answer."""
        self._body, self._parts, self._unread = None, [], b""
        self._is_lingering = True
        self._deadline_s = self._door.dispatcher.clock() + LINGER_S
        if transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
            transport.resume_reading()
        else:
            transport.close()

    def _unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def check(self, now_s: float) -> None:
        """Ends what has taken too long."""
        exchange = self._exchange
        if exchange is not None:
            exchange.check(now_s)
        if now_s < self._deadline_s or self._transport is None:
            return
        if self._is_full and self._unsent() < self._stalled_bytes:  # slow, but it reads
            self._stalled_bytes = self._unsent()
            self._deadline_s = now_s + self._door.client_timeout_s
        elif self._body is not None and exchange is not None and exchange.phase == Phase.BODY:
            exchange.fail(BadRequest(f"the body did not go on within {self._door.client_timeout_s:g} s"))
        else:
            self._transport.abort()

    def close(self) -> None:
        """Closes the connection, after what was written."""
        self.write_held()
        if self._transport is not None:
            self._transport.close()
