"""What the exchanges of one proxy share: who is sent what, who waits, and who is tried again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from proxy.access_log import AccessLog
from proxy.admission import Admission, Priority, Ticket, parse_priority
from proxy.breaker import RetryBudget
from proxy.client import ClientConnection
from proxy.config import ProxyConfig
from proxy.cors import Cors
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
from proxy.outcomes import Attempt, End
from proxy.picker import Picker
from proxy.protocol import VALID_REQUEST_ID
from proxy.registry import Registry
from proxy.replicas import Replica
from proxy.routing import Routing, candidates
from proxy.scan import PROMPT_BYTES, model_in_beginning, model_in_part, requested_model
from proxy.upstream import Pool

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2  # replicas that a request is sent to
VERDICT_S: Final = 0.3  # a process that died closes all its connections within milliseconds of each other
REFUSED_IN_A_ROW: Final = 16  # waiting requests that find no room before the others are not asked
MAX_REMEMBERED: Final = 1000  # replicas with metrics, before those of replicas that are gone are dropped
BYTES_PER_TOKEN: Final = 4
_VALID_ID: Final = re.compile(VALID_REQUEST_ID.encode())
_RANK: Final = re.compile(rb"[0-9]{1,9}")


class Dispatcher:
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
        cors: Cors,
        open_requests: OpenRequests,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.cors = cors
        self.clock = clock
        self.now_s = clock()
        self.pool = Pool(config.connect_timeout_s, clock)
        self.journal_bytes = config.journal_kb * 1024
        self.max_body_bytes = config.max_body_bytes
        self.open_requests = open_requests
        self._registry = registry
        self._admission = admission
        self._keys = keys
        self._access_log = access_log
        self._picker = Picker(Routing(config.routing))
        self._budget = RetryBudget()
        self._session_header = config.session_header.lower().encode()
        self._max_replica_requests = config.max_replica_requests
        self._max_replica_tokens = config.max_replica_tokens
        self._needs_body = config.routing == Routing.PREFIX
        self._verdicts: dict[Exchange, UpstreamFailed] = {}
        self._is_placing = False
        self._tasks: asyncio.TaskGroup | None = None
        self._id_prefix = uuid.uuid4().hex[:20].encode()
        self._id_numbers = itertools.count(1)
        registry.on_change = self._registry_changed
        registry.on_eviction = self._replica_evicted

    # What an exchange begins with.

    def open(self, client: ClientConnection, head: RequestHead, route: str) -> Exchange:
        """The exchange for a request whose head is here. Raises RequestError if it is refused for its head alone."""
        noted, length = head.noted, head.content_length or 0
        caller = self._keys.caller(noted.get(b"authorization"), noted.get(b"x-api-key"))
        if length > self.max_body_bytes:
            raise too_large(length, self.max_body_bytes)
        if self.config.max_waiting:  # without a queue, only a request that would have to wait is refused
            self._admission.check_queue()
        shown = noted.get(b"x-priority")
        if shown is not None:
            priority = parse_priority(shown.decode("latin-1"))
        else:
            priority = caller.priority
            if priority is not Priority.NORMAL:  # the replica does not know whose key it is
                head.passing.append(b"X-Priority: " + priority.name.lower().encode())
        ticket = Ticket(None, caller, priority, length // BYTES_PER_TOKEN)
        self._admission.take(ticket)
        self._budget.earn()
        exchange = Exchange(self, client, head, route, self.request_id(head), ticket, self.clock())
        ticket.request = exchange
        self.open_requests.add(exchange)
        return exchange

    def request_id(self, head: RequestHead) -> bytes:
        """The client's, or a new one."""
        shown = head.noted.get(b"x-request-id")
        if shown is not None and _VALID_ID.fullmatch(shown):
            return shown
        return b"%b%012x" % (self._id_prefix, next(self._id_numbers))

    def can_begin(self, exchange: Exchange, parts: list[Bytes], *, is_whole: bool) -> bool:
        """Reads from the body what routing needs; False if that takes more of it."""
        if not parts:
            return is_whole
        exchange.model = model_in_beginning(parts[0])
        if exchange.model is None:
            text = b"".join(parts)
            exchange.model = requested_model(text) if is_whole else model_in_part(text)
        return is_whole or exchange.model is not None or len(self._models()) <= 1

    def _models(self) -> set[str]:
        return {model for replica in self._registry.known() for model in replica.models}

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
            self._registry.trial_sent(replica, now_s=now_s)
        exchange.send_to(replica)
        return True

    def _choose(self, exchange: Exchange, now_s: float) -> Replica | None:
        """The replica for the request; None if it should wait for one. Raises RequestError if that is no use."""
        noted = exchange.head.noted
        rank = noted.get(b"x-data-parallel-rank")
        found: Sequence[Replica] = self._registry.serving(exchange.model, now_s=now_s)
        if not found or rank is not None or exchange.tried:
            try:
                found = self._candidates(exchange, rank, now_s)
            except NoReplicaAvailable:
                if self._registry.may_be_live_soon(exchange.model, now_s=now_s):
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

    def _candidates(self, exchange: Exchange, rank: bytes | None, now_s: float) -> Sequence[Replica]:
        """Who may have a request that not simply anybody who serves its model may have. Raises RequestError."""
        if rank is not None and not _RANK.fullmatch(rank):
            raise BadRequest("X-data-parallel-rank is no number")
        return candidates(
            self._registry.live(now_s=now_s),
            self._registry.known,
            model=exchange.model,
            tried=exchange.tried,
            dp_rank=None if rank is None else int(rank),
        )

    def _has_room(self, replica: Replica, tokens: int) -> bool:
        """Whether the replica's bounds let the request in. A single one is let in however large it is."""
        if replica.in_flight >= self._max_replica_requests:
            return False
        most = self._max_replica_tokens
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
        """Sends a request that certainly does not run to another replica, if one is left and the budget allows it.

        The budget keeps replicas that refuse from doubling the load. A dead one gives its requests away only once.
        """
        is_dead = exchange.replica is not None and exchange.replica.is_dead
        if not self.may_try_again(exchange):
            exchange.fail(NoReplicaAvailable("the replicas that were tried do not take the request; try again shortly"))
        elif not is_dead and not self._budget.spend():
            exchange.fail(NoReplicaAvailable("too many requests fail to try this one again; try again shortly"))
        else:
            self.metrics.retries.labels(err.code).inc()
            self._try_to_place(exchange)

    def await_verdict(self, exchange: Exchange, err: UpstreamFailed) -> None:
        """The connection broke before any byte of an answer: waits for the replica to prove dead, but not long."""
        assert exchange.replica is not None
        if exchange.replica.is_dead:
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
            elif exchange.replica is not None and exchange.replica.is_dead:
                del self._verdicts[exchange]
                self.try_again(exchange, err)
        if self._admission.waiting:
            self._place_waiting()

    def _replica_evicted(self, replica: Replica) -> None:
        """Its requests will not be answered, even if its connections stay open."""
        for exchange in self.open_requests:
            if exchange.replica is replica:
                exchange.replica_evicted()

    # What is counted.

    def attempt_ended(self, exchange: Exchange, replica: Replica, attempt: Attempt) -> None:
        """A request's time on a replica is over."""
        now_s = self.clock()
        self.metrics.attempts[replica.replica_id][attempt] += 1
        self._registry.attempt_ended(replica, attempt, took_s=now_s - exchange.sent_s, now_s=now_s)

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

    def ended(self, exchange: Exchange, status: int, end: End) -> None:
        """The exchange is over: its place in everything is free."""
        self._admission.give_back(exchange.ticket)
        exchange.ticket.request = None  # or the two would wait for the garbage collector
        self.open_requests.discard(exchange)
        duration_s = self.clock() - exchange.started_s
        self.metrics.request_ended(exchange.route, status, duration_s)
        if self._access_log.is_on:
            self._access_log.note(exchange, status, end, duration_s)
        if self._admission.waiting:
            self._place_waiting()

    # Time.

    async def run(self) -> None:
        """Opens connections for the exchanges until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.sleep(1.0)
                self._keys.reload()
                self._access_log.reopen()
                if len(self.metrics.attempts) > MAX_REMEMBERED:
                    self.metrics.forget_replicas({replica.replica_id for replica in self._registry.known()})

    def tick(self, now_s: float) -> None:
        """Called some times a second: what waited too long, what is idle, what is to be written."""
        self.now_s = now_s
        for ticket in self._admission.overdue(now_s) if self._admission.waiting else ():
            waited_s = now_s - ticket.request.ready_s
            ticket.request.fail(Overloaded(f"no replica had room within {waited_s:.1f} s (--queue-timeout-s)"))
        self.pool.close_idle()
        self._access_log.flush()
