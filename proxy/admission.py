"""How much may be under way at once, and who waits for it. Pure state, the time is passed in.

A ticket is a request's place: it is admitted, or it waits, and is given back exactly once whatever becomes of the
request. Those who wait are let in by priority, and within a priority by turns between API keys, so that one key's
thousand requests do not stand before another's first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from proxy.errors import BadRequest, KeyOverLimit, Overloaded


class Priority(IntEnum):
    """What waits less long; `X-Priority` names it."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


PRIORITIES: Final = {priority.name.lower(): priority for priority in Priority}


def parse_priority(text: str) -> Priority:
    """Raises BadRequest for a name that is none."""
    priority = PRIORITIES.get(text.strip().lower())
    if priority is None:
        raise BadRequest(f"X-Priority is {text!r}, must be one of {', '.join(PRIORITIES)}")
    return priority


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """Who asks, and how much at once; `0` is no limit. One object per API key."""

    name: str
    max_requests: int = 0
    max_tokens: int = 0
    priority: Priority = Priority.NORMAL
    requests: int = 0  # admitted or waiting
    tokens: int = 0


class Ticket:
    """One request's place."""

    __slots__ = ("caller", "deadline_s", "is_admitted", "is_waiting", "priority", "request", "tokens")

    def __init__(self, request: Any, caller: Caller, priority: Priority, tokens: int) -> None:
        self.request = request  # whose place it is; nothing here looks at it
        self.caller = caller
        self.priority = priority
        self.tokens = tokens
        self.is_admitted = False
        self.is_waiting = False
        self.deadline_s = 0.0


@dataclass(slots=True, kw_only=True)
class Admission:
    """The bounds of one proxy, and its queue."""

    max_requests: int
    max_tokens: int  # 0: no limit
    max_waiting: int
    queue_timeout_s: float
    requests: int = 0  # admitted
    tokens: int = 0
    waiting: int = 0
    # per priority: caller -> its tickets, oldest first; the caller whose turn it is stands first
    _queues: tuple[dict[Caller, dict[Ticket, None]], ...] = field(default_factory=lambda: tuple({} for _ in Priority))

    def take(self, ticket: Ticket) -> None:
        """Counts a request against its key. Raises KeyOverLimit; then nothing was counted."""
        caller = ticket.caller
        if caller.max_requests and caller.requests >= caller.max_requests:
            raise KeyOverLimit(
                f"key {caller.name!r} has {caller.requests} requests open, limit {caller.max_requests}", of="requests"
            )
        if caller.max_tokens and caller.requests and caller.tokens + ticket.tokens > caller.max_tokens:
            raise KeyOverLimit(
                f"key {caller.name!r} has {caller.tokens} tokens open, limit {caller.max_tokens}", of="tokens"
            )
        caller.requests += 1
        caller.tokens += ticket.tokens

    def has_room(self, ticket: Ticket) -> bool:
        """Whether the proxy's own bounds let the request in. A single one is let in however large it is."""
        if self.requests >= self.max_requests:
            return False
        return not self.max_tokens or not self.requests or self.tokens + ticket.tokens <= self.max_tokens

    def admit(self, ticket: Ticket) -> None:
        """The request is under way; its key's next turn comes after the others'."""
        if self.waiting:
            self._dequeue(ticket)
            queue = self._queues[ticket.priority]
            if ticket.caller in queue:
                queue[ticket.caller] = queue.pop(ticket.caller)
        ticket.is_admitted = True
        self.requests += 1
        self.tokens += ticket.tokens

    def check_queue(self) -> None:
        """Raises Overloaded if the queue is full."""
        if self.waiting >= self.max_waiting:
            raise Overloaded(f"{self.waiting} requests wait already, limit {self.max_waiting} (--max-waiting)")

    def suspend(self, ticket: Ticket, now_s: float) -> None:
        """The request waits; the first time sets its deadline. Raises Overloaded if the queue is full."""
        if ticket.is_waiting:
            return
        self.check_queue()
        if ticket.is_admitted:
            self._retract(ticket)
        ticket.is_waiting = True
        ticket.deadline_s = ticket.deadline_s or now_s + self.queue_timeout_s
        self._queues[ticket.priority].setdefault(ticket.caller, {})[ticket] = None
        self.waiting += 1

    def give_back(self, ticket: Ticket) -> None:
        """The request has ended; wherever its ticket was, it is there no more."""
        self._dequeue(ticket)
        if ticket.is_admitted:
            self._retract(ticket)
        ticket.caller.requests -= 1
        ticket.caller.tokens -= ticket.tokens

    def in_turn(self) -> Iterator[Ticket]:
        """Those who wait, in the order in which they should be let in. Letting in the one just given is allowed."""
        for queue in self._queues:
            depth = 0
            while True:
                found = is_one_in = False
                for caller in list(queue):
                    ticket = _nth(queue.get(caller, {}), depth)
                    if ticket is None:
                        continue
                    found = True
                    yield ticket
                    is_one_in = is_one_in or not ticket.is_waiting
                if not found:
                    break
                depth += not is_one_in

    def overdue(self, now_s: float) -> list[Ticket]:
        """Those who waited too long."""
        return [
            ticket
            for queue in self._queues
            for tickets in queue.values()
            for ticket in tickets
            if now_s >= ticket.deadline_s
        ]

    def _dequeue(self, ticket: Ticket) -> None:
        if not ticket.is_waiting:
            return
        ticket.is_waiting = False
        self.waiting -= 1
        queue = self._queues[ticket.priority]
        tickets = queue[ticket.caller]
        del tickets[ticket]
        if not tickets:
            del queue[ticket.caller]

    def _retract(self, ticket: Ticket) -> None:
        ticket.is_admitted = False
        self.requests -= 1
        self.tokens -= ticket.tokens


def _nth(tickets: dict[Ticket, None], index: int) -> Ticket | None:
    for number, ticket in enumerate(tickets):
        if number == index:
            return ticket
    return None
