"""Whether a replica that accepts requests also answers them. Pure state, the time is passed in.

What the replica did wrong counts: a broken or garbled answer, none in time, a 500, 502 or 504. What a client did
(4xx, leaving) and what a replica may say (429, 503) does not: a busy replica or a bad request must not cost a replica.
A ratio over a window decides, so neither one failure nor many among very many puts a replica out. Out for `OPEN_S`,
then one request finds out: it closes the breaker or opens it again.
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 10.0
MIN_OUTCOMES: Final = 10  # below this a ratio says nothing
MAX_FAILED: Final = 0.5  # of the window's requests; more open the breaker
OPEN_S: Final = 5.0
FAILED_STATUSES: Final = frozenset({500, 502, 504})


class Breaker:
    """One replica's. Shut means that requests pass, as with a switch."""

    __slots__ = ("_failed", "_old_failed", "_old_whole", "_open_until_s", "_probe_since_s", "_turn_s", "_whole")

    def __init__(self) -> None:
        self._open_until_s = 0.0  # 0: shut
        self._probe_since_s = 0.0  # 0: no probe is under way
        self._begin_window()

    @property
    def is_shut(self) -> bool:
        """Whether all requests pass."""
        return not self._open_until_s

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        if not self._open_until_s:
            return True
        if now_s < self._open_until_s:
            return False
        return not self._probe_since_s or now_s - self._probe_since_s > WINDOW_S  # a probe may never have ended

    def sent(self, now_s: float) -> None:
        """A request was sent; while the breaker is open, it is the probe."""
        if self._open_until_s:
            self._probe_since_s = now_s

    def ended(self, is_whole: bool, now_s: float) -> bool:
        """A request ended by what the replica did; whether this opened the breaker or shut it."""
        if self._open_until_s:
            if is_whole:
                self._open_until_s = self._probe_since_s = 0.0
                self._begin_window()
            else:
                self._open(now_s)
            return is_whole
        if now_s >= self._turn_s:
            self._turn(now_s)
        if is_whole:
            self._whole += 1
            return False
        self._failed += 1
        failed = self._failed + self._old_failed
        outcomes = failed + self._whole + self._old_whole
        if outcomes < MIN_OUTCOMES or failed <= MAX_FAILED * outcomes:
            return False
        self._open(now_s)
        return True

    def abandoned(self) -> bool:
        """A request ended by what the client did: it says nothing, and another may be the probe. Never turns it."""
        self._probe_since_s = 0.0
        return False

    def _open(self, now_s: float) -> None:
        self._open_until_s, self._probe_since_s = now_s + OPEN_S, 0.0

    def _begin_window(self) -> None:
        self._whole = self._failed = 0  # in the current half window
        self._old_whole = self._old_failed = 0  # in the half before
        self._turn_s = 0.0  # when the current half ends

    def _turn(self, now_s: float) -> None:
        """The next half of the window begins."""
        is_next = now_s < self._turn_s + WINDOW_S / 2
        self._old_whole, self._old_failed = (self._whole, self._failed) if is_next else (0, 0)
        self._whole = self._failed = 0
        self._turn_s = now_s + WINDOW_S / 2


class RetryBudget:
    """Retries over all requests: at most a fifth of them, and a few to begin with."""

    RATIO: Final = 0.2
    MOST: Final = 10.0  # saved up in quiet times

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved = self.MOST

    def earn(self) -> None:
        """A request came."""
        if self._saved < self.MOST:
            self._saved += self.RATIO

    def spend(self) -> bool:
        """Whether a retry is allowed; if so, it is counted."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
