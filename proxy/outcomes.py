"""How things end: a request's time on one replica, and the request itself.

Names for metrics and the access log. Code that every request passes binds a member to a name of its module once,
because looking one up in its Enum costs as much as a dict's entry (Python 3.11).
"""

from __future__ import annotations

from enum import StrEnum


class Attempt(StrEnum):
    """How a request's time on one replica ended."""

    WHOLE = "whole"  # with an answer that says nothing against the replica
    FAILED = "failed"  # broken off or garbled before the answer's first byte, or 500, 502, 504
    TIMEOUT = "timeout"  # nothing came for too long
    CUT = "cut"  # broken off after the answer's first byte
    CONNECT_FAILED = "connect_failed"  # never accepted
    NOT_BEGUN = "not_begun"  # handed back by the replica
    LOST = "lost"  # the replica's group went on without it
    LEFT = "left"  # by what the client did


AGAINST_THE_REPLICA = frozenset({Attempt.FAILED, Attempt.TIMEOUT, Attempt.CUT})  # what a breaker counts


class End(StrEnum):
    """How a request ended."""

    WHOLE = "whole"  # as the replica's answer did
    CUT = "cut"  # after the answer had begun
    ERROR = "error"  # with an error of the proxy's, as the whole answer
    LEFT = "left"  # the client was gone first
    STOPPED = "stopped"  # the proxy ended first
