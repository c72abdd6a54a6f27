"""Connections to replicas: kept alive, one request at a time on each.

An `Upstream` reads an answer's head, finds where its body ends, and tells the exchange that has it. It knows nothing
of clients. A connection goes back to its pool only after a whole answer to a whole request, with nothing behind it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

from proxy.errors import ConnectFailed, GarbledAnswer, Malformed, UpstreamFailed
from proxy.framing import Body, Bytes, ChunkedBody, EndlessBody, SizedBody
from proxy.http1 import MAX_HEAD_BYTES, AnswerHead, HeadParser

# Below uvicorn's 5 s, the shortest of the servers met: a connection that is about to be closed is not used again.
IDLE_CONNECTION_S: Final = 4.0
# What the kernel may hold of an answer that is not read; doubled by it, half of that is data. One read is never more,
# so twice this bounds what a client that does not read costs here.
RECEIVE_BUFFER_BYTES: Final = 96 * 1024
NO_BODY: Final = (204, 304)


class Answered(Protocol):
    """The exchange that an upstream connection serves."""

    wants_payload: bool  # the answer's body is wanted without its framing

    def answer_began(self, head: AnswerHead, *, is_chunked: bool) -> None:
        """The head is here."""

    def answer_part(self, data: bytes, boundary: int) -> None:
        """The next bytes of the body, as they came; up to `boundary` they end with a whole chunk."""

    def answer_payload(self, parts: Sequence[Bytes]) -> None:
        """The next bytes of the body, without framing."""

    def answer_read(self) -> None:
        """The read that brought the head ends here."""

    def answer_ended(self) -> None:
        """The body is whole."""

    def upstream_lost(self, err: UpstreamFailed) -> None:
        """There will be no more of it."""

    def upstream_full(self) -> None:
        """The replica does not read as fast as the client sends."""

    def upstream_drained(self) -> None:
        """It has caught up."""


class Upstream(asyncio.Protocol):
    """One connection to one replica."""

    __slots__ = (
        "_after_target",
        "_base",
        "_body",
        "_exchange",
        "_head",
        "_is_kept_alive",
        "_is_paused",
        "_pool",
        "_transport",
        "idle_since_s",
        "url",
    )

    def __init__(self, pool: Pool, url: str) -> None:
        self.url = url  # the replica's
        parts = urlsplit(url)
        self._base = b" " + parts.path.encode()
        self._after_target = b" HTTP/1.1\r\nHost: " + parts.netloc.encode()
        self.idle_since_s = 0.0
        self._pool = pool
        self._exchange: Answered | None = None
        self._transport: asyncio.Transport | None = None
        self._head = b""  # the start of a head that is not whole
        self._body: Body | None = None
        self._is_kept_alive = False
        self._is_paused = False

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing() and self._exchange is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)

    def first_lines(self, method: bytes, target: bytes) -> bytes:
        """The request line of a request, and its Host."""
        return method + self._base + target + self._after_target

    def send(self, exchange: Answered, parts: Sequence[Bytes]) -> None:
        """The first bytes of a request, head included, whose answer goes to the exchange."""
        self._exchange = exchange
        self.send_more(parts)

    def send_more(self, parts: Sequence[Bytes]) -> None:
        """The next bytes of the request's body."""
        if self._transport is not None:
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.writelines(parts)

    def data_received(self, data: bytes) -> None:
        """From asyncio."""
        exchange, body = self._exchange, self._body
        if exchange is None:
            self.abort()  # nobody asked for these bytes
            return
        try:
            if body is None:
                self._begin(exchange, self._head + data if self._head else data)
                return
            if exchange.wants_payload:
                parts: list[Bytes] = []
                used = body.feed(data, parts)
                if parts:
                    exchange.answer_payload(parts)
            else:
                used = body.feed(data)
                if used:
                    exchange.answer_part(data if used == len(data) else data[:used], body.boundary)
        except (Malformed, GarbledAnswer) as err:
            self.give_up()
            exchange.upstream_lost(GarbledAnswer(f"the replica's answer is malformed: {err}"))
            return
        if body.is_done and self._exchange is exchange:
            self._end(exchange, has_more=used < len(data))

    def _begin(self, exchange: Answered, data: bytes) -> None:
        """Takes the head off the first bytes of an answer, once it is whole, and passes on what follows it.

        Raises GarbledAnswer and Malformed.
        """
        found = self._read_head(data)
        if found is None:
            return
        head, data = found
        length = 0 if head.status in NO_BODY else head.content_length
        self._is_kept_alive = head.is_kept_alive and (length is not None or head.is_chunked)
        if length is not None:
            self._body = SizedBody(length)
        else:
            self._body = ChunkedBody() if head.is_chunked else EndlessBody()
        exchange.answer_began(head, is_chunked=length is None and head.is_chunked)
        if self._exchange is exchange and (data or length == 0):  # it may have given the answer up when it saw the head
            self.data_received(data)
        if self._exchange is exchange:
            exchange.answer_read()

    def _read_head(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """The final head at the beginning of the bytes, and what follows it; None as long as it is not whole."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise GarbledAnswer(f"its head is longer than {MAX_HEAD_BYTES} bytes")
                if not data.startswith(b"HTTP/1."[: len(data)]):
                    raise GarbledAnswer("it is no HTTP/1.1")
                self._head = data
                return None
            head = self._pool.parser.answer(data[:end])
            data = data[end + 4 :]
            if head.status >= 200:
                self._head = b""
                return head, data
            if head.status == 101:
                raise GarbledAnswer("it switches protocols")

    def _end(self, exchange: Answered, has_more: bool) -> None:
        """The answer is whole."""
        self._exchange, self._body = None, None
        if self._is_kept_alive and not has_more:
            if self._is_paused:  # by its last part, for a client that does not read as fast
                self.resume()
            self._pool.put_back(self)
        else:
            self.abort()
        exchange.answer_ended()

    def eof_received(self) -> None:
        """From asyncio: the replica sends no more, and asyncio closes the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio."""
        self._transport = None
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and isinstance(self._body, EndlessBody):
            exchange.answer_ended()
        else:
            exchange.upstream_lost(UpstreamFailed("the replica broke off"))

    def give_up(self) -> None:
        """Ends the connection; the exchange hears no more of it."""
        self._exchange = None
        self.abort()

    def abort(self) -> None:
        """Ends the connection at once: the replica sees it, and stops generating."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Reads no more until `resume`: the client does not read as fast."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """From asyncio."""
        if self._exchange is not None:
            self._exchange.upstream_full()

    def resume_writing(self) -> None:
        """From asyncio."""
        if self._exchange is not None:
            self._exchange.upstream_drained()


class Pool:
    """All connections of one proxy to its replicas. `clock` gives monotonic seconds."""

    def __init__(self, connect_timeout_s: float, clock: Callable[[], float]) -> None:
        self.parser = HeadParser.for_answers()
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        # replica's URL -> its idle connections, the newest last
        self._idle: defaultdict[str, list[Upstream]] = defaultdict(list)
        self._tls: ssl.SSLContext | None = None

    def take(self, url: str) -> Upstream | None:
        """An idle connection to the replica, if there is one that can be relied on."""
        idle = self._idle.get(url)
        if not idle:
            return None
        oldest_s = self._clock() - IDLE_CONNECTION_S
        while idle:
            upstream = idle.pop()
            if upstream.is_usable and upstream.idle_since_s > oldest_s:
                return upstream
            upstream.abort()
        return None

    def put_back(self, upstream: Upstream) -> None:
        """The connection is idle from now on."""
        upstream.idle_since_s = self._clock()
        self._idle[upstream.url].append(upstream)

    def close_idle(self, *, at_all: bool = False) -> None:
        """Closes those that were idle for too long, or all that are idle."""
        oldest_s = self._clock() - IDLE_CONNECTION_S
        for url, idle in list(self._idle.items()):
            kept = [] if at_all else [each for each in idle if each.is_usable and each.idle_since_s > oldest_s]
            for upstream in set(idle).difference(kept):
                upstream.abort()
            if kept:
                self._idle[url] = kept
            else:
                del self._idle[url]

    async def dial(self, url: str) -> Upstream:
        """A new connection. Raises ConnectFailed: the replica has not seen the request."""
        try:
            upstream = Upstream(self, url)
            parts = urlsplit(url)
            is_tls = parts.scheme == "https"
            if is_tls and self._tls is None:
                self._tls = ssl.create_default_context()
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: upstream,
                    parts.hostname or "",
                    parts.port or (443 if is_tls else 80),
                    ssl=self._tls if is_tls else None,
                )
        except TimeoutError as err:
            raise ConnectFailed(f"no connection to {url} within {self._connect_timeout_s:g} s") from err
        except (OSError, ValueError) as err:  # ValueError, with UnicodeError: the host is no name to look up
            raise ConnectFailed(f"no connection to {url}: {err}") from err
        return upstream
