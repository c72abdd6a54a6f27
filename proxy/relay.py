"""What the exchanges of one proxy share: who is sent what, who waits, who is tried again, and what is counted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from proxy.access_log import AccessLog
from proxy.admission import Admission, Ticket, parse_priority
from proxy.breaker import RetryBudget
from proxy.client import ClientConnection
from proxy.config import ProxyConfig
from proxy.errors import (
    BadRequest,
    ConnectFailed,
    NoReplicaAvailable,
    NotBegun,
    Overloaded,
    RequestError,
    UpstreamFailed,
    UpstreamTimeout,
)
from proxy.exchange import Exchange, Phase, too_large
from proxy.framing import Bytes
from proxy.http1 import RequestHead
from proxy.keys import ApiKeys
from proxy.metrics import Metrics
from proxy.open_requests import OpenRequests
from proxy.picker import Picker
from proxy.protocol import VALID_REQUEST_ID
from proxy.registry import Registry, Replica
from proxy.routing import Routing, candidates
from proxy.scan import END_BYTES, PROMPT_BYTES, model_in_beginning, model_in_part, requested_model
from proxy.upstream import Pool

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2  # replicas that a request is sent to
VERDICT_S: Final = 0.3  # a process that died closes all its connections within milliseconds of each other
REFUSED_IN_A_ROW: Final = 16  # waiting requests that find no room before the others are not asked
MAX_REMEMBERED: Final = 1000  # replicas' addresses, before what is kept of those that are gone is dropped
BYTES_PER_TOKEN: Final = 4
_VALID_ID: Final = re.compile(VALID_REQUEST_ID.encode())
_RANK: Final = re.compile(rb"[0-9]{1,9}")


class Relay:
    """The data path of one proxy. `clock` gives monotonic seconds; `now_s` is a coarse one, good for deadlines."""

    def __init__(
        self,
        *,
        config: ProxyConfig,
        registry: Registry,
        admission: Admission,
        metrics: Metrics,
        keys: ApiKeys,
        access_log: AccessLog,
        open_requests: OpenRequests,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.clock = clock
        self.now_s = clock()
        self.silence_s = self.now_s + config.between_bytes_timeout_s  # an answer that sends now may pause until then
        self.pool = Pool(config.connect_timeout_s, clock)
        self.journal_bytes = config.journal_kb * 1024
        self.open_requests = open_requests
        self._registry = registry
        self._admission = admission
        self._keys = keys
        self._access_log = access_log
        self._picker = Picker(Routing(config.routing))
        self._budget = RetryBudget()
        self._session_header = config.session_header.lower().encode()
        self._needs_body = config.routing == Routing.PREFIX
        self._allows_any_origin = "*" in config.cors_origins
        self._origins = frozenset(origin.encode() for origin in config.cors_origins)
        self._addresses: dict[str, tuple[bytes, bytes]] = {}
        self._verdicts: dict[Exchange, UpstreamFailed] = {}
        self._is_placing = False
        self._tasks: asyncio.TaskGroup | None = None
        self._id_prefix = uuid.uuid4().hex[:20].encode()
        self._id_numbers = itertools.count(1)
        registry.on_change = self._registry_changed

    # What an exchange begins with.

    def open(self, client: ClientConnection, head: RequestHead, route: str) -> Exchange:
        """The exchange for a request whose head is here. Raises RequestError if it is refused for its head alone."""
        noted, length = head.fields.noted, head.fields.content_length or 0
        caller = self._keys.caller(noted.get(b"authorization"))
        if length > self.config.max_body_bytes:
            raise too_large(length, self.config.max_body_bytes)
        if self.config.max_waiting:  # without a queue, only a request that would have to wait is refused
            self._admission.check_queue()
        shown = noted.get(b"x-priority")
        priority = caller.priority if shown is None else parse_priority(shown.decode("latin-1"))
        ticket = Ticket(None, caller, priority, length // BYTES_PER_TOKEN)
        self._admission.take(ticket)
        self._budget.earn()
        exchange = Exchange(self, client, head, route=route, request_id=self.request_id(head), ticket=ticket)
        ticket.request = exchange
        self.open_requests.add(exchange)
        return exchange

    def request_id(self, head: RequestHead) -> bytes:
        """The client's, or a new one."""
        shown = head.fields.noted.get(b"x-request-id", b"")
        if shown and _VALID_ID.fullmatch(shown):
            return shown
        return b"%b%012x" % (self._id_prefix, next(self._id_numbers))

    def can_begin(self, exchange: Exchange, parts: list[Bytes], *, is_whole: bool) -> bool:
        """Reads from the body what routing needs; False if that takes more of it."""
        if not parts:
            return is_whole
        exchange.model = model_in_beginning(bytes(parts[0][:END_BYTES]))
        if exchange.model is None:
            text = b"".join(parts)
            exchange.model = requested_model(text) if is_whole else model_in_part(text)
        return is_whole or exchange.model is not None or len(self._models()) <= 1

    def address(self, url: str) -> tuple[bytes, bytes]:
        """The Host and the base path of a replica's URL."""
        found = self._addresses.get(url)
        if found is None:
            parts = urlsplit(url)
            found = self._addresses[url] = (parts.netloc.rpartition("@")[2].encode(), parts.path.encode())
        return found

    def cors_lines(self, head: RequestHead) -> list[bytes]:
        """The headers with which a browser lets a page of another origin read the answer."""
        origin = head.fields.noted.get(b"origin") if self.config.cors_origins else None
        if origin is None or not (self._allows_any_origin or origin in self._origins):
            return []
        return [
            b"Access-Control-Allow-Origin: " + (b"*" if self._allows_any_origin else origin),
            b"Access-Control-Expose-Headers: X-Request-Id, Retry-After",
            b"Vary: Origin",
        ]

    # Who is sent what.

    def place(self, exchange: Exchange) -> None:
        """Sends the request to a replica, lets it wait, or ends it."""
        if self._admission.waiting and not exchange.ticket.is_waiting and not exchange.tried:
            self._wait(exchange)  # behind those who wait already, unless those wait for something else
            self._place_waiting()
            return
        self._try_to_place(exchange)

    def _try_to_place(self, exchange: Exchange) -> bool:
        """False if the request must go on waiting."""
        now_s = self.clock()
        ticket = exchange.ticket
        try:
            if not (ticket.is_admitted or self._admission.has_room(ticket)):
                return self._wait(exchange)
            replica = self._choose(exchange, now_s)
        except RequestError as err:
            exchange.fail(err)
            return True
        if replica is None:
            return self._wait(exchange)
        if not ticket.is_admitted:
            if ticket.is_waiting:
                exchange.queue_s = now_s - exchange.ready_s
                self.metrics.queue_s.observe(exchange.queue_s)
            self._admission.admit(ticket)
        if not replica.breaker.is_shut:
            replica.breaker.sent(now_s)
            self._registry.broke()
        exchange.send_to(replica)
        return True

    def _choose(self, exchange: Exchange, now_s: float) -> Replica | None:
        """The replica for the request; None if it should wait for one. Raises RequestError if that is no use."""
        noted = exchange.head.fields.noted
        rank = noted.get(b"x-data-parallel-rank")
        if rank is not None and not _RANK.fullmatch(rank):
            raise BadRequest("X-data-parallel-rank is no number")
        try:
            found = candidates(
                self._registry.live(now_s=now_s),
                self._registry.known,
                model=exchange.model,
                tried=exchange.tried,
                dp_rank=None if rank is None else int(rank),
            )
        except NoReplicaAvailable:
            if self._registry.may_be_live_soon(now_s=now_s):
                return None
            raise
        body = bytes(exchange.body[0][:PROMPT_BYTES]) if self._needs_body and exchange.body else b""
        session = noted.get(self._session_header)
        replica = self._picker.pick(found, body, session)
        tokens = exchange.ticket.tokens
        if not self._has_room(replica, tokens):
            found = [replica for replica in found if self._has_room(replica, tokens)]
            return self._picker.pick(found, body, session) if found else None
        return replica

    def _has_room(self, replica: Replica, tokens: int) -> bool:
        """Whether the replica's bounds let the request in. A single one is let in however large it is."""
        if replica.in_flight >= self.config.max_replica_requests:
            return False
        most = self.config.max_replica_tokens
        return not most or not replica.in_flight or replica.in_flight_tokens + tokens <= most

    def _wait(self, exchange: Exchange) -> bool:
        """Puts the request in the queue, or ends it if that is full. Always False but for the latter."""
        try:
            self._admission.suspend(exchange.ticket, self.clock())
        except Overloaded as err:
            exchange.fail(err)
            return True
        exchange.phase = Phase.WAITING
        return False

    def _place_waiting(self) -> None:
        """Lets in who can be let in, in their turn."""
        if self._is_placing:
            return
        self._is_placing = True
        try:
            refused = 0
            for ticket in self._admission.in_turn():
                refused = 0 if self._try_to_place(ticket.request) else refused + 1
                if refused >= REFUSED_IN_A_ROW or self._admission.requests >= self._admission.max_requests:
                    break
        finally:
            self._is_placing = False

    def dial(self, exchange: Exchange, replica: Replica) -> None:
        """Opens a connection for the exchange."""
        assert self._tasks is not None, "requests come only while the proxy runs"
        self._tasks.create_task(self._dial(exchange, replica))

    async def _dial(self, exchange: Exchange, replica: Replica) -> None:
        try:
            upstream = await self.pool.dial(replica.url)
        except ConnectFailed as err:
            self._registry.connect_failed(replica)
            self.metrics.upstream_failures.labels(err.code).inc()
            logger.warning("replica refused a connection replica_id=%s err=%s", replica.replica_id, err)
            exchange.connect_failed(replica, err)
            return
        exchange.connected(upstream)

    # Who is tried again.

    def may_try_again(self, exchange: Exchange) -> bool:
        """Whether a request that did not run may be sent to one more replica."""
        return len(exchange.tried) < MAX_ATTEMPTS

    def try_again(self, exchange: Exchange, err: UpstreamFailed) -> None:
        """Sends a request that certainly did not run to another replica, if one is left and the budget allows it."""
        exchange.answer = None
        if not self.may_try_again(exchange):
            exchange.fail(NoReplicaAvailable("the replicas that were tried do not take the request; try again shortly"))
        elif not self._budget.spend():
            exchange.fail(NoReplicaAvailable("too many requests fail to try this one again; try again shortly"))
        else:
            self.metrics.retries.labels(err.code).inc()
            self._try_to_place(exchange)

    def await_verdict(self, exchange: Exchange, err: UpstreamFailed) -> None:
        """The connection broke before any byte of an answer: waits for the replica to prove dead, but not long."""
        assert exchange.replica is not None
        if exchange.replica.is_gone:
            self.try_again(exchange, err)
        elif exchange.replica.is_backend:
            exchange.fail(err)  # nothing would tell
        else:
            self._verdicts[exchange] = err
            asyncio.get_running_loop().call_later(VERDICT_S, self._end_verdict, exchange)

    def _end_verdict(self, exchange: Exchange) -> None:
        err = self._verdicts.pop(exchange, None)
        if err is not None and exchange.phase == Phase.VERDICT:
            exchange.fail(err)

    def _registry_changed(self) -> None:
        for exchange, err in list(self._verdicts.items()):
            if exchange.phase != Phase.VERDICT:
                del self._verdicts[exchange]
            elif exchange.replica is not None and exchange.replica.is_gone:
                del self._verdicts[exchange]
                self.try_again(exchange, err)
        if self._admission.waiting:
            self._place_waiting()

    # What is counted.

    def attempt_ended(self, exchange: Exchange, replica: Replica, outcome: str) -> None:
        """A request's time on a replica is over: whole, failed, timeout, cut, or neither's fault."""
        self.metrics.replica_requests[replica.replica_id, outcome] += 1
        breaker = replica.breaker
        was_shut = breaker.is_shut
        now_s = self.clock()
        if outcome == "whole":
            replica.answered(now_s - exchange.sent_s)
            breaker.ended(True, now_s)
        elif outcome in ("failed", "timeout", "cut"):
            breaker.ended(False, now_s)
        else:
            breaker.abandoned()
        if breaker.is_shut is not was_shut:
            level = logging.INFO if breaker.is_shut else logging.WARNING
            logger.log(level, "breaker changed replica_id=%s is_shut=%s", replica.replica_id, breaker.is_shut)
            self._registry.broke()

    def note_failure(self, exchange: Exchange, err: UpstreamFailed | UpstreamTimeout) -> None:
        """A replica did not answer and the client gets an error for it."""
        if not isinstance(err, ConnectFailed | NotBegun):
            self.metrics.upstream_failures.labels(err.code).inc()
        replica_id = exchange.replica.replica_id if exchange.replica else ""
        logger.warning(
            "request failed replica_id=%s request_id=%s err=%s", replica_id, exchange.request_id.decode(), err
        )

    def note_cut(self, exchange: Exchange, err: RequestError) -> None:
        """An answer that had begun could not be finished."""
        self.metrics.upstream_failures.labels("cut").inc()
        logger.warning("answer cut request_id=%s reason=%r", exchange.request_id.decode(), str(err))

    def ended(self, exchange: Exchange, status: int, outcome: str) -> None:
        """The exchange is over: its place in everything is free."""
        self._admission.give_back(exchange.ticket)
        exchange.ticket.request = None  # or the two would wait for the garbage collector
        self.open_requests.discard(exchange)
        now_s = self.clock()
        self.count(exchange.route, status, now_s - exchange.started_s)
        if self._access_log.is_on:
            self._log(exchange, status, outcome, now_s - exchange.started_s)
        if self._admission.waiting:
            self._place_waiting()

    def count(self, route: str, status: int, duration_s: float) -> None:
        """A request ended."""
        self.metrics.requests[route, status] += 1
        self.metrics.duration_s[route].observe(duration_s)

    def _log(self, exchange: Exchange, status: int, outcome: str, duration_s: float) -> None:
        self._access_log.note(
            time_s=time.time(),
            request_id=exchange.request_id.decode(),
            key=exchange.ticket.caller.name,
            route=exchange.route,
            model=exchange.model,
            replica_id=exchange.replica.replica_id if exchange.replica else "",
            status=status,
            outcome=outcome,
            attempts=len(exchange.tried),
            request_bytes=exchange.size,
            answer_bytes=exchange.answer_bytes,
            queue_s=exchange.queue_s,
            first_byte_s=exchange.first_byte_s,
            duration_s=duration_s,
        )

    def _models(self) -> set[str]:
        return {model for replica in self._registry.known() for model in replica.models}

    # Time.

    async def run(self) -> None:
        """Opens connections for the exchanges until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.sleep(1.0)
                self._keys.reload()
                self._access_log.reopen()
                if len(self._addresses) > MAX_REMEMBERED:
                    self._addresses.clear()
                    self.metrics.forget_replicas({replica.replica_id for replica in self._registry.known()})

    def tick(self, now_s: float) -> None:
        """Called some times a second: what waited too long, what is idle, what is to be written."""
        self.now_s = now_s
        self.silence_s = now_s + self.config.between_bytes_timeout_s
        for ticket in self._admission.overdue(now_s) if self._admission.waiting else ():
            waited_s = now_s - ticket.request.ready_s
            ticket.request.fail(Overloaded(f"no replica had room within {waited_s:.1f} s (--queue-timeout-s)"))
        self.pool.close_idle()
        self._access_log.flush()
