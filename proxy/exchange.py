"""One request, from its head to the end of its answer, whatever happens on the way.

A state machine between a client's connection and a replica's. It is told what arrives at either side and what time
it is, and tells the other side; what several requests share (who may be sent what, the queue, the metrics) is the
relay's. Its phases:

    BODY        the client sends the request
    WAITING     for room, or for a group that reconfigures
    CONNECTING  to a replica
    SENT        nothing of the answer's body has come
    VERDICT     the connection broke before any byte of an answer: it is sent again only if the replica proves dead
    ANSWERING   bytes go to the client
    ENDED

An answer has these ends:

    whole                                  the client's answer ends as the replica's did
    the replica refuses the connection     nothing was sent, so another replica is tried
    it says that it did not begin          likewise
    it breaks off before any byte, and     likewise: that life of it can no longer run the request
    its control connection is gone
    it fails before the first body byte    502 or 504: it may have done the work
    it fails later, in an event stream     every byte that came, then an error event in OpenAI's form, then the end;
                                           never a `[DONE]` that the replica did not send
    it fails later, otherwise              the client's connection is reset, so that half an answer never looks whole
    the client leaves, at any time         the connection to the replica closes at once
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from proxy.admission import Ticket
from proxy.answers import error_end, passed_head
from proxy.breaker import FAILED_STATUSES
from proxy.errors import (
    BodyTooLarge,
    ConnectFailed,
    NotBegun,
    RequestError,
    UpstreamFailed,
    UpstreamTimeout,
)
from proxy.framing import LAST_CHUNK, Body, Bytes, ChunkedBody, chunk, first_payload
from proxy.http1 import AnswerHead, RequestHead
from proxy.journal import Journal
from proxy.registry import InFlight, Replica
from proxy.upstream import NO_BODY, Upstream

if TYPE_CHECKING:
    from proxy.client import ClientConnection
    from proxy.relay import Relay

logger = logging.getLogger(__name__)

EVENT_STREAM: Final = b"text/event-stream"
HELD_BYTES: Final = 64 * 1024  # of an event that is not whole; a longer one is passed on in parts
JOINED_BYTES: Final = 16 * 1024  # up to here, copying two pieces together is cheaper than writing them apart
CLIENT_LEFT_STATUS: Final = 499  # nginx's number for it; in metrics and logs only


class Phase:
    """How far a request is. Plain numbers: an Enum's members cost a tenth of a microsecond each to look up."""

    BODY: Final = 0
    WAITING: Final = 1
    CONNECTING: Final = 2
    SENT: Final = 3
    VERDICT: Final = 4
    ANSWERING: Final = 5
    ENDED: Final = 6


class Exchange:
    """See the module. Everything public is called by the client's connection, the upstream one, or the relay."""

    __slots__ = (
        "_held",
        "_is_client_full",
        "_is_resendable",
        "_last",
        "_pending",
        "_place",
        "_wants_whole_chunks",
        "answer",
        "answer_bytes",
        "body",
        "client",
        "deadline_s",
        "first_byte_s",
        "head",
        "is_body_whole",
        "is_event_stream",
        "journal",
        "model",
        "phase",
        "queue_s",
        "ready_s",
        "relay",
        "replica",
        "request_id",
        "route",
        "sent_s",
        "size",
        "started_s",
        "ticket",
        "tried",
        "upstream",
        "wants_payload",
    )

    def __init__(
        self,
        relay: Relay,
        client: ClientConnection,
        head: RequestHead,
        *,
        route: str,
        request_id: bytes,
        ticket: Ticket,
    ) -> None:
        self.relay = relay
        self.client = client
        self.head = head
        self.route = route
        self.request_id = request_id
        self.ticket = ticket
        self.started_s = relay.clock()
        self.phase: int = Phase.BODY
        self.deadline_s = math.inf
        self.body: Sequence[Bytes] = ()
        self.size = 0
        self.is_body_whole = False
        self.model: str | None = None
        self.tried: list[Replica] = []
        self.replica: Replica | None = None
        self.upstream: Upstream | None = None
        self.answer: AnswerHead | None = None
        self.is_event_stream = False
        self.wants_payload = False
        self.journal: Journal | None = None
        self.ready_s = self.sent_s = self.first_byte_s = self.queue_s = 0.0
        self.answer_bytes = 0
        self._is_client_full = False
        self._is_resendable = True
        self._place: InFlight | None = None
        self._pending = b""  # the answer's head, until the first of its body goes with it
        self._held = b""  # the start of a chunk
        self._last = b""  # of what the client was sent
        self._wants_whole_chunks = False

    # The request's body, from the client's connection.

    def body_ready(self, parts: Sequence[Bytes], size: int, *, is_whole: bool) -> None:
        """The body, or as much of it as is kept: the rest then comes by `more_body`."""
        self.body, self.size, self.is_body_whole = parts, size, is_whole
        self._is_resendable = is_whole
        self.ready_s = self.relay.clock()
        self.relay.place(self)

    def more_body(self, parts: list[Bytes], *, is_last: bool) -> None:
        """More of a body that is too long to be kept."""
        self.size += sum(map(len, parts))
        if self.size > self.relay.config.max_body_bytes:
            self.fail(too_large(self.size, self.relay.config.max_body_bytes))
            return
        if self.head.fields.is_chunked:
            parts = [*map(chunk, parts), LAST_CHUNK] if is_last else [*map(chunk, parts)]
        self.is_body_whole = is_last
        if self.upstream is not None:
            self.deadline_s = self.relay.clock() + self.relay.config.first_byte_timeout_s
            if parts:
                self.upstream.send_more(parts)

    # The way to a replica, from the relay.

    def send_to(self, replica: Replica) -> None:
        """Takes a place on the replica, then a connection, and sends the request."""
        self.tried.append(replica)
        self.replica = replica
        self._place = InFlight(replica, self.ticket.tokens)
        upstream = self.relay.pool.take(replica.url)
        if upstream is not None:
            self._send(upstream)
        else:
            self.phase = Phase.CONNECTING
            self.relay.dial(self, replica)

    def connected(self, upstream: Upstream) -> None:
        """The connection that was wanted is there; if it is not wanted any more, it is kept for others."""
        if self.phase == Phase.CONNECTING and self.replica is not None and self.replica.url == upstream.url:
            self._send(upstream)
        else:
            self.relay.pool.put_back(upstream)

    def connect_failed(self, replica: Replica, err: ConnectFailed) -> None:
        """The replica did not accept the connection."""
        if self.phase == Phase.CONNECTING and self.replica is replica:
            self._lose_place("connect_failed")
            self.relay.try_again(self, err)

    def _send(self, upstream: Upstream) -> None:
        relay = self.relay
        self.upstream = upstream
        self.phase = Phase.SENT
        self.sent_s = relay.clock()
        self.deadline_s = self.sent_s + relay.config.first_byte_timeout_s
        relay.metrics.own_s.observe(self.sent_s - self.ready_s - self.queue_s)
        fields = self.head.fields
        if self.is_body_whole:
            length = b"Content-Length: %d" % self.size
        elif fields.is_chunked:
            length = b"Transfer-Encoding: chunked"
        else:
            length = b"Content-Length: %d" % (fields.content_length or 0)
        host, base = relay.address(upstream.url)
        head = b"\r\n".join(
            (
                b"POST %b%b HTTP/1.1\r\nHost: %b" % (base, self.head.target, host),
                *fields.passing,
                b"X-Request-Id: %b\r\n%b\r\n\r\n" % (self.request_id, length),
            )
        )
        if fields.is_chunked and not self.is_body_whole:
            upstream.send(self, [head, *map(chunk, self.body)])
        elif len(self.body) == 1 and self.size <= JOINED_BYTES:
            upstream.send(self, (head + bytes(self.body[0]),))
        else:
            upstream.send(self, [head, *self.body])
        if not self.is_body_whole:
            self.body = ()
            self.client.want_more()

    # The answer, from the upstream connection.

    def answer_began(self, head: AnswerHead, body: Body) -> None:
        """The answer's head is here; it goes to the client with the first of its body."""
        noted = head.fields.noted
        if head.status == 503 and b"x-not-begun" in noted and self._can_retry():
            assert self.upstream is not None
            self.upstream.give_up()
            self.upstream = None
            self._lose_place("not_begun")
            self.relay.try_again(self, NotBegun("the replica did not begin the request"))
            return
        self.answer = head
        self.is_event_stream = noted.get(b"content-type", b"").lower().startswith(EVENT_STREAM)
        is_chunked = isinstance(body, ChunkedBody)
        has_length = head.fields.content_length is not None or head.status in NO_BODY
        if not has_length:
            self.wants_payload = not (is_chunked and self.client.is_http_1_1)
        if self.is_event_stream and head.status == 200:
            self._wants_whole_chunks = is_chunked and not self.wants_payload
            if self.relay.journal_bytes:
                self.journal = Journal(self.relay.journal_bytes)
        if not (self.client.is_http_1_1 or has_length):
            self.client.close_after()
        self._pending = passed_head(
            head,
            self.request_id,
            is_chunked=not has_length and self.client.is_http_1_1,
            more_lines=[*self.relay.cors_lines(self.head), *self.client.connection_lines()],
        )

    def answer_read(self) -> None:
        """The read that brought the head is over: an event stream's head does not wait for its first event."""
        if self._pending and self.is_event_stream and self.phase == Phase.SENT:
            self.client.write(self._pending)
            self._pending = b""

    def answer_part(self, data: bytes, boundary: int) -> None:
        """The next bytes of the body, as they came; up to `boundary` they end with a whole chunk."""
        if self.phase != Phase.ANSWERING:
            self._first_byte()
        self.answer_bytes += len(data)
        if self._wants_whole_chunks:
            if self._held or boundary != len(data):
                data = self._whole_chunks(data, boundary)
                if not data:
                    return
            if self.journal is not None:
                self.journal.record(data)
        if self._pending:
            self._to_client(data)
            return
        if not self._is_client_full:  # as in _to_client, without a call: this is where events pass
            self.deadline_s = self.relay.silence_s
        self._last = data
        self.client.write(data)

    def answer_payload(self, parts: Sequence[Bytes]) -> None:
        """The next bytes of the body, without framing."""
        if self.phase != Phase.ANSWERING:
            self._first_byte()
        self.answer_bytes += sum(map(len, parts))
        data = b"".join(map(chunk, parts) if self.client.is_http_1_1 else parts)
        if self.journal is not None:
            self.journal.record(data)
        self._to_client(data)

    def _to_client(self, data: bytes) -> None:
        if not self._is_client_full:
            self.deadline_s = self.relay.silence_s
        self._last = data
        if self._pending:
            if len(data) <= JOINED_BYTES:
                data = self._pending + data
            else:
                self.client.write(self._pending)
            self._pending = b""
        self.client.write(data)

    def _first_byte(self) -> None:
        self.phase = Phase.ANSWERING
        now_s = self.relay.clock()
        self.first_byte_s = now_s - self.sent_s
        assert self.replica is not None
        self.relay.metrics.first_byte_s[self.replica.replica_id].observe(self.first_byte_s)

    def _whole_chunks(self, data: bytes, boundary: int) -> bytes:
        """What can be passed on: whole chunks. The start of one is held back, but not of one that is very long."""
        if boundary:
            whole, self._held = self._held + data[:boundary], data[boundary:]
        else:
            whole, self._held = b"", self._held + data
        if len(self._held) > HELD_BYTES:
            whole += chunk(first_payload(self._held))
            self._held = b""
            self._wants_whole_chunks, self.wants_payload = False, True
        return whole

    def answer_ended(self) -> None:
        """The answer is whole."""
        self.upstream = None
        assert self.answer is not None
        tail = self._pending
        if self.wants_payload and self.client.is_http_1_1:
            tail += LAST_CHUNK
        if self.phase != Phase.ANSWERING:
            self._first_byte()
        if tail:
            self.client.write(tail)
        self._end_attempt("failed" if self.answer.status in FAILED_STATUSES else "whole")
        self._end(self.answer.status, "whole")

    def upstream_lost(self, err: UpstreamFailed) -> None:
        """There will be no more of the answer."""
        self.upstream = None
        if self._is_begun():
            self._cut(err)
            return
        self._lose_place("failed")
        if self.answer is None and self._can_retry():
            self.phase = Phase.VERDICT
            self.relay.await_verdict(self, err)
        else:
            self.fail(err)

    def upstream_full(self) -> None:
        """The replica does not read as fast as the client sends."""
        self.client.pause_sending()

    def upstream_drained(self) -> None:
        """It has caught up."""
        self.client.want_more()

    # The client's connection.

    def client_full(self) -> None:
        """The client does not read as fast as the replica answers."""
        self._is_client_full = True
        if self.upstream is not None and self.phase == Phase.ANSWERING:
            self.deadline_s = math.inf  # the silence is the client's from here on
            self.upstream.pause()

    def client_drained(self) -> None:
        """The client has caught up."""
        self._is_client_full = False
        if self.upstream is not None and self.phase == Phase.ANSWERING:
            self.deadline_s = self.relay.clock() + self.relay.config.between_bytes_timeout_s
            self.upstream.resume()

    def client_left(self) -> None:
        """The client closed its connection."""
        if self.phase != Phase.ENDED:
            self._drop_upstream("left")
            self._end(CLIENT_LEFT_STATUS, "left")

    # Time, and other ends.

    def check(self, now_s: float) -> None:
        """Ends what has taken too long."""
        if now_s < self.deadline_s:
            return
        if self.phase == Phase.SENT:
            self._drop_upstream("timeout")
            err = UpstreamTimeout("the replica did not begin its answer in time")
            if self._is_begun():
                self._cut(err)
            else:
                self.fail(err)
        elif self.phase == Phase.ANSWERING:
            self._drop_upstream("timeout")
            self._cut(UpstreamTimeout("the replica went silent in its answer"))

    def fail(self, err: RequestError) -> None:
        """Ends the request with an error, by its status if nothing was sent and otherwise as a cut."""
        if self.phase == Phase.ENDED:
            return
        self._drop_upstream("failed" if isinstance(err, UpstreamFailed) else "left")
        if self._is_begun():
            self._cut(err)
            return
        if isinstance(err, UpstreamFailed | UpstreamTimeout):
            self.relay.note_failure(self, err)
        self.client.respond(err, self.request_id, self.relay.cors_lines(self.head))
        self._end(err.status, "error")

    def stop(self) -> None:
        """Ends the request as if the client had left, since the proxy stops."""
        if self.phase != Phase.ENDED:
            self._drop_upstream("left")
            self._end(CLIENT_LEFT_STATUS, "stopped")
            self.client.reset()

    def _cut(self, err: RequestError) -> None:
        """Ends an answer that has begun and cannot be finished."""
        self.relay.note_cut(self, err)
        self._end_attempt("cut")
        assert self.answer is not None
        fields = self.answer.fields
        is_plain = b"content-encoding" not in fields.noted and fields.content_length is None
        if not (self.is_event_stream and is_plain):
            self._end(self.answer.status, "cut")
            self.client.reset()
            return
        held = first_payload(self._held) if self._held else b""
        end = error_end(err, last=self._last, held=held, is_chunked=self.client.is_http_1_1)
        self.client.write(self._pending + end)
        self._end(self.answer.status, "cut")

    def _is_begun(self) -> bool:
        """Whether the client was sent anything of an answer."""
        return self.phase == Phase.ANSWERING or (self.answer is not None and not self._pending)

    def _can_retry(self) -> bool:
        return self._is_resendable and self.relay.may_try_again(self)

    def _drop_upstream(self, outcome: str) -> None:
        if self.upstream is not None:
            self.upstream.give_up()
            self.upstream = None
        if self._place is not None:
            self._lose_place(outcome)

    def _lose_place(self, outcome: str) -> None:
        """The attempt is over, the request perhaps not."""
        self._end_attempt(outcome)
        self.deadline_s = math.inf

    def _end_attempt(self, outcome: str) -> None:
        """Gives back the place on the replica, exactly once."""
        if self._place is not None and self.replica is not None:
            self._place.release()
            self._place = None
            self.relay.attempt_ended(self, self.replica, outcome)

    def _end(self, status: int, outcome: str) -> None:
        assert self.phase != Phase.ENDED, "an exchange ends once"
        self.phase = Phase.ENDED
        self.body = ()
        self.relay.ended(self, status, outcome)
        self.client.exchange_ended(self)


def too_large(size: int, limit: int) -> BodyTooLarge:
    """The error for a body over the limit."""
    return BodyTooLarge(f"body has {size} bytes or more, limit is {limit} (--max-body-mb)")
