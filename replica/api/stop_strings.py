"""Ends a text at the first of several stop strings, while it comes in pieces cut anywhere.

What might be the begin of a stop string is held back until that is decided, so that no part of one is ever seen. The
first stop string to be complete counts; of those complete with the same character, the longest.

Tags, which reasoning.py and tools.py look for, are held back in the same way: `without_undecided_end`.
"""

from __future__ import annotations


class StopStrings:
    """For one choice. `stops`: not empty, without empty strings. `keeps`: the stop string stays in the text."""

    def __init__(self, stops: tuple[str, ...], *, keeps: bool) -> None:
        self._stops = stops
        self._keeps = keeps
        self._longest = max(map(len, stops))
        self._held = ""  # not said yet: may begin a stop string
        self.found: str | None = None

    def push(self, text: str, *, counts: bool = True) -> str:
        """What can be said now; nothing follows once a stop string is `found`.

        A stop string that ends within a text that does not count is none.
        """
        known = len(self._held)
        text = self._held + text
        end, start = self._first(text, known) if counts else (-1, 0)
        if end >= 0:
            self.found, self._held = text[start:end], ""
            return text[: end if self._keeps else start]
        held = self._num_undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, int]:
        """End and start of the stop string that is complete first, after `known` characters; an end of -1 is none."""
        best = (-1, 0)
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best[0] < 0 or (end, start) < best:
                    best = (end, start)
        return best

    def _num_undecided(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


def without_undecided_end(text: str, tag: str) -> str:
    """The text without an end that may be the begin of `tag`, and without the newlines before that."""
    for length in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:length]):
            text = text[:-length]
            break
    return text.rstrip("\n")
