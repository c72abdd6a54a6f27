"""One request, from its head to the end of its answer, whatever happens on the way.

A state machine between a client's connection and a replica's. It is told what arrives at either side and what time
it is, and tells the other side; what several requests share (who may be sent what, the queue, the metrics) is the
dispatcher's. Its phases:

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
    it hands the request back              likewise: it did not begin, or stopped before any byte
    it breaks off before any byte, and     likewise: that life of it can no longer run the request
    its control connection is gone
    its group evicts it before any byte    likewise
    it fails before the first body byte    502 or 504: it may have done the work
    it fails later, in an event stream     every byte that came, then an error event in the API's form, then the end;
                                           never a `[DONE]` that the replica did not send
    it fails later, otherwise              the client's connection is reset, so that half an answer never looks whole
    the client leaves, at any time         the connection to the replica closes at once
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.admission import Ticket
from proxy.answers import error_end, passed_head
from proxy.breaker import FAILED_STATUSES
from proxy.errors import (
    BodyTooLarge,
    ConnectFailed,
    GarbledAnswer,
    NotBegun,
    ReplicaLost,
    RequestError,
    UpstreamFailed,
    UpstreamTimeout,
)
from proxy.framing import LAST_CHUNK, Bytes, chunk, first_payload
from proxy.http1 import AnswerHead, RequestHead
from proxy.journal import Journal
from proxy.outcomes import Attempt, End
from proxy.replicas import InFlight, Replica
from proxy.upstream import NO_BODY, Upstream

if TYPE_CHECKING:
    from proxy.client import ClientConnection
    from proxy.dispatcher import Dispatcher

EVENT_STREAM: Final = b"text/event-stream"
HELD_BYTES: Final = 64 * 1024  # of an event that is not whole; a longer one is passed on in parts
JOINED_BYTES: Final = 16 * 1024  # up to here, copying two pieces together is cheaper than writing them apart
CLIENT_LEFT_STATUS: Final = 499  # nginx's number for it; in metrics and logs only
_ATTEMPT_WHOLE: Final = Attempt.WHOLE
_END_WHOLE: Final = End.WHOLE


class Phase:
    """How far a request is. Plain numbers: an Enum's members cost a tenth of a microsecond each to look up."""

    BODY: Final = 0
    WAITING: Final = 1
    CONNECTING: Final = 2
    SENT: Final = 3
    VERDICT: Final = 4
    ANSWERING: Final = 5
    ENDED: Final = 6


@dataclass(slots=True, eq=False)
class Exchange:
    """See the module. Everything public is called by the client's connection, the upstream one, or the dispatcher."""

    dispatcher: Dispatcher
    client: ClientConnection
    head: RequestHead
    route: str
    request_id: bytes
    ticket: Ticket
    started_s: float

    phase: int = Phase.BODY
    deadline_s: float = math.inf
    body: Sequence[Bytes] = ()
    size: int = 0
    is_body_whole: bool = False
    model: str | None = None
    ready_s: float = 0.0  # when the body was there as far as it is kept
    queue_s: float = 0.0
    tried: list[Replica] = field(default_factory=list)
    replica: Replica | None = None
    upstream: Upstream | None = None
    sent_s: float = 0.0
    answer: AnswerHead | None = None
    first_byte_s: float = 0.0  # after `sent_s`
    answer_bytes: int = 0
    _checked_bytes: int = 0  # of the answer, when the time was last looked at
    is_event_stream: bool = False
    wants_payload: bool = False
    journal: Journal | None = None
    _is_client_full: bool = False
    _is_flowing: bool = False  # a part that ends with a whole chunk can go to the client as it is
    _is_resendable: bool = True
    _place: InFlight | None = None
    _pending: bytes = b""  # the answer's head, until the first of its body goes with it
    _held: bytes = b""  # the start of a chunk
    _last: bytes = b""  # of what the client was sent
    _wants_whole_chunks: bool = False

    # The request's body, from the client's connection.

    def body_ready(self, parts: Sequence[Bytes], size: int, *, is_whole: bool) -> None:
        """The body, or as much of it as is kept: the rest then comes by `more_body`."""
        self.body, self.size, self.is_body_whole = parts, size, is_whole
        self._is_resendable = is_whole
        self.ready_s = self.dispatcher.clock()
        self.dispatcher.place(self)

    def more_body(self, parts: list[Bytes], *, is_last: bool) -> None:
        """More of a body that is too long to be kept."""
        self.size += sum(map(len, parts))
        if self.size > self.dispatcher.max_body_bytes:
            self.fail(too_large(self.size, self.dispatcher.max_body_bytes))
            return
        if self.head.is_chunked:
            parts = [*map(chunk, parts), LAST_CHUNK] if is_last else [*map(chunk, parts)]
        self.is_body_whole = is_last
        if self.upstream is not None:
            self.deadline_s = self.dispatcher.clock() + self.dispatcher.config.first_byte_timeout_s
            if parts:
                self.upstream.send_more(parts)

    # The way to a replica, from the dispatcher.

    def send_to(self, replica: Replica) -> None:
        """Takes a place on the replica, then a connection, and sends the request."""
        self.tried.append(replica)
        self.replica = replica
        self._place = InFlight(replica, self.ticket.tokens)
        upstream = self.dispatcher.pool.take(replica.url)
        if upstream is not None:
            self._send(upstream)
        else:
            self.phase = Phase.CONNECTING
            self.dispatcher.dial(self, replica)

    def connected(self, upstream: Upstream) -> None:
        """The connection that was wanted is there; if it is not wanted any more, it is kept for others."""
        if self.phase == Phase.CONNECTING and self.replica is not None and self.replica.url == upstream.url:
            self._send(upstream)
        else:
            self.dispatcher.pool.put_back(upstream)

    def connect_failed(self, replica: Replica, err: ConnectFailed) -> None:
        """The replica did not accept the connection."""
        if self.phase == Phase.CONNECTING and self.replica is replica:
            self._try_again(Attempt.CONNECT_FAILED, err)

    def replica_evicted(self) -> None:
        """The replica's group goes on without it: nothing more will come of what it was doing."""
        if self.phase not in (Phase.CONNECTING, Phase.SENT, Phase.ANSWERING):
            return
        err = ReplicaLost("the replica was lost while it worked on the answer; ask again")
        if self._is_begun():
            self._drop_upstream(Attempt.LOST)
            self._cut(err)
        elif self._can_retry():
            self._try_again(Attempt.LOST, err)
        else:
            self._drop_upstream(Attempt.LOST)
            self.fail(err)

    def _send(self, upstream: Upstream) -> None:
        dispatcher, head = self.dispatcher, self.head
        self.upstream = upstream
        self.phase = Phase.SENT
        self.sent_s = dispatcher.clock()
        self.deadline_s = self.sent_s + dispatcher.config.first_byte_timeout_s
        dispatcher.metrics.own_s.observe(self.sent_s - self.ready_s - self.queue_s)
        if self.is_body_whole:
            length = b"Content-Length: %d" % self.size
        elif head.is_chunked:
            length = b"Transfer-Encoding: chunked"
        else:
            length = b"Content-Length: %d" % (head.content_length or 0)
        lines = [
            upstream.first_lines(head.method, head.target),
            *head.passing,
            b"X-Request-Id: " + self.request_id,
            length,
            b"",
        ]
        if self.is_body_whole and self.size <= JOINED_BYTES:
            lines.append(b"".join(self.body))
            upstream.send(self, (b"\r\n".join(lines),))
            return
        lines.append(b"")
        is_chunked = head.is_chunked and not self.is_body_whole
        upstream.send(self, [b"\r\n".join(lines), *(map(chunk, self.body) if is_chunked else self.body)])
        if not self.is_body_whole:
            self.body = ()
            self.client.want_more()

    # The answer, from the upstream connection.

    def answer_began(self, head: AnswerHead, *, is_chunked: bool) -> None:
        """The answer's head is here; it goes to the client with the first of its body."""
        if head.status == 503 and self._is_handed_back(head):
            return
        client = self.client
        self.answer = head
        self.is_event_stream = head.noted.get(b"content-type", b"").lower().startswith(EVENT_STREAM)
        has_length = head.content_length is not None or head.status in NO_BODY
        if not has_length:
            self.wants_payload = not (is_chunked and client.is_http_1_1)
            if not client.is_http_1_1:
                client.close_after()
        if self.is_event_stream and head.status == 200:
            self._wants_whole_chunks = is_chunked and not self.wants_payload
            if self.dispatcher.journal_bytes:
                self.journal = Journal(self.dispatcher.journal_bytes)
        self._pending = passed_head(
            head,
            self.request_id,
            is_chunked=not has_length and client.is_http_1_1,
            more_lines=self.dispatcher.cors.lines(self.head.noted.get(b"origin")) + client.connection_lines(),
        )

    def _is_handed_back(self, head: AnswerHead) -> bool:
        """Whether the replica will not answer and another one may; the request is then on its way there."""
        is_not_begun = b"x-not-begun" in head.noted
        if not (is_not_begun or b"x-interrupted" in head.noted) or not self._can_retry():
            return False
        if is_not_begun:
            self._try_again(Attempt.NOT_BEGUN, NotBegun("the replica did not begin the request"))
        else:
            self._try_again(Attempt.LOST, ReplicaLost("the replica stopped before it answered"))
        return True

    def answer_read(self) -> None:
        """The read that brought the head is over: an event stream's head does not wait for its first event."""
        if self._pending and self.is_event_stream and self.phase == Phase.SENT:
            self.client.write(self._pending)
            self._pending = b""

    def answer_part(self, data: bytes, boundary: int) -> None:
        """The next bytes of the body, as they came; up to `boundary` they end with a whole chunk."""
        if boundary != len(data) or not self._is_flowing:
            self._begin_to_flow(data, boundary)
            return
        # This is where events pass, so it asks and calls as little as can be.
        self.answer_bytes += boundary
        self._last = data
        if self.journal is not None:
            self.journal.record(data)
        self.client.write_in_turn(data)

    def _begin_to_flow(self, data: bytes, boundary: int) -> None:
        """Passes on the first part, or one that does not end with a whole chunk, or that goes on with such a chunk."""
        if self.phase != Phase.ANSWERING:
            self._first_byte()
        self.answer_bytes += len(data)
        if self._wants_whole_chunks:
            data = self._whole_chunks(data, boundary)
        if data:
            if self.journal is not None:
                self.journal.record(data)
            self._to_client(data)
        self._is_flowing = not self._held

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
        self._last = data
        if self._pending:
            if len(data) <= JOINED_BYTES:
                data = self._pending + data
            else:
                self.client.write(self._pending)
            self._pending = b""
        self.client.write(data)

    def _first_byte(self) -> None:
        now_s = self.dispatcher.clock()
        self.phase = Phase.ANSWERING
        self.deadline_s = now_s + self.dispatcher.config.between_bytes_timeout_s
        self.first_byte_s = now_s - self.sent_s
        assert self.replica is not None
        self.dispatcher.metrics.first_byte_s[self.replica.replica_id].observe(self.first_byte_s)

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
        status = self.answer.status
        self._end_attempt(Attempt.FAILED if status in FAILED_STATUSES else _ATTEMPT_WHOLE)
        self._end(status, _END_WHOLE)

    def upstream_lost(self, err: UpstreamFailed) -> None:
        """There will be no more of the answer."""
        self.upstream = None
        if self._is_begun():
            self._cut(err if isinstance(err, GarbledAnswer) else ReplicaLost(f"{err}; ask again"))
            return
        self._drop_upstream(Attempt.FAILED)
        if self.answer is None and self._can_retry():
            self.phase = Phase.VERDICT
            self.dispatcher.await_verdict(self, err)
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
            self.deadline_s = self.dispatcher.clock() + self.dispatcher.config.between_bytes_timeout_s
            self.upstream.resume()

    def client_left(self) -> None:
        """The client closed its connection."""
        if self.phase != Phase.ENDED:
            self._drop_upstream(Attempt.LEFT)
            self._end(CLIENT_LEFT_STATUS, End.LEFT)

    # Time, and other ends.

    def check(self, now_s: float) -> None:
        """Ends what has taken too long. An answer that went on since the last look may be silent from now on."""
        if self.answer_bytes != self._checked_bytes:
            self._checked_bytes = self.answer_bytes
            if not self._is_client_full:
                self.deadline_s = now_s + self.dispatcher.config.between_bytes_timeout_s
        if now_s < self.deadline_s:
            return
        if self.phase == Phase.SENT:
            self._drop_upstream(Attempt.TIMEOUT)
            err = UpstreamTimeout("the replica did not begin its answer in time")
            if self._is_begun():
                self._cut(err)
            else:
                self.fail(err)
        elif self.phase == Phase.ANSWERING:
            self._drop_upstream(Attempt.TIMEOUT)
            self._cut(UpstreamTimeout("the replica went silent in its answer"))

    def fail(self, err: RequestError) -> None:
        """Ends the request with an error, by its status if nothing was sent and otherwise as a cut."""
        if self.phase == Phase.ENDED:
            return
        self._drop_upstream(Attempt.FAILED if isinstance(err, UpstreamFailed) else Attempt.LEFT)
        if self._is_begun():
            self._cut(err)
            return
        if isinstance(err, UpstreamFailed | UpstreamTimeout):
            self.dispatcher.note_failure(self, err)
        more_lines = self.dispatcher.cors.lines(self.head.noted.get(b"origin"))
        self.client.respond(err, self.route, self.request_id, more_lines)
        self._end(err.status, End.ERROR)

    def stop(self) -> None:
        """Ends the request as if the client had left, since the proxy stops."""
        if self.phase != Phase.ENDED:
            self._drop_upstream(Attempt.LEFT)
            self._end(CLIENT_LEFT_STATUS, End.STOPPED)
            self.client.reset()

    def _try_again(self, attempt: Attempt, err: UpstreamFailed) -> None:
        """This replica certainly does not run the request: another one may."""
        self._drop_upstream(attempt)
        self.dispatcher.try_again(self, err)

    def _cut(self, err: RequestError) -> None:
        """Ends an answer that has begun and cannot be finished."""
        self.dispatcher.note_cut(self, err)
        self._end_attempt(Attempt.CUT)
        assert self.answer is not None
        answer = self.answer
        is_plain = b"content-encoding" not in answer.noted and answer.content_length is None
        if not (self.is_event_stream and is_plain):
            self._end(answer.status, End.CUT)
            self.client.reset()
            return
        held = first_payload(self._held) if self._held else b""
        end = error_end(err, self.route, last=self._last, held=held, is_chunked=self.client.is_http_1_1)
        self.client.write(self._pending + end)
        self._end(answer.status, End.CUT)

    def _is_begun(self) -> bool:
        """Whether the client was sent anything of an answer."""
        return self.phase == Phase.ANSWERING or (self.answer is not None and not self._pending)

    def _can_retry(self) -> bool:
        return self._is_resendable and self.dispatcher.may_try_again(self)

    def _drop_upstream(self, attempt: Attempt) -> None:
        """Closes the connection to the replica, if there is one, and ends the time on it."""
        if self.upstream is not None:
            self.upstream.give_up()
            self.upstream = None
        self._end_attempt(attempt)
        self.deadline_s = math.inf

    def _end_attempt(self, attempt: Attempt) -> None:
        """Gives back the place on the replica, exactly once."""
        if self._place is not None and self.replica is not None:
            self._place.release()
            self._place = None
            self.dispatcher.attempt_ended(self, self.replica, attempt)

    def _end(self, status: int, end: End) -> None:
        assert self.phase != Phase.ENDED, "an exchange ends once"
        self.phase = Phase.ENDED
        self.body = ()
        self.dispatcher.ended(self, status, end)
        self.client.exchange_ended(self)


def too_large(size: int, limit: int) -> BodyTooLarge:
    """The error for a body over the limit."""
    return BodyTooLarge(f"body has {size} bytes or more, limit is {limit} (--max-body-mb)")
