"""Splits an answer into its reasoning, `<think>...</think>`, and its content.

    "<think>\nhm\n</think>\n\nyes"  ->  reasoning "hm", content "yes"

The newlines beside the tags are the template's markup and belong to neither. A template may already have opened
`<think>` in the prompt; then the answer begins inside. An answer that begins otherwise has no reasoning.

Text comes in pieces cut anywhere, so what might be part of a tag is held back until it is decided. The joined pieces
are the same however the text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from replica.api.stop_strings import without_undecided_end

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of an answer, taken apart."""

    reasoning: str = ""
    content: str = ""


class _State(Enum):
    START = auto()  # only white space and perhaps a part of `<think>` so far
    OPENED = auto()  # after `<think>`; its newlines are skipped
    REASONING = auto()
    CLOSED = auto()  # after `</think>`; its newlines are skipped
    CONTENT = auto()


def is_opened_by(prompt: str) -> bool:
    """Whether the prompt's text ends inside of `<think>`."""
    return prompt.rstrip().endswith(OPEN)


def is_closed_by(prompt: str) -> bool:
    """Whether the prompt's text ends with reasoning that is over, so that the answer has none."""
    return prompt.rstrip().endswith(CLOSE)


class ReasoningSplitter:
    """Incremental splitter for one answer. `opened`: the prompt has opened the reasoning already."""

    def __init__(self, *, opened: bool) -> None:
        self._state = _State.OPENED if opened else _State.START
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text now read is reasoning."""
        return self._state in (_State.OPENED, _State.REASONING)

    def push(self, text: str) -> Split:
        """What this piece of text decides."""
        if self._is(_State.CONTENT):
            return Split(content=text)
        self._held += text
        reasoning = content = ""
        if self._is(_State.START):
            self._start()
        if self._is(_State.OPENED):
            self._skip_newlines(_State.REASONING)
        if self._is(_State.REASONING):
            reasoning = self._reason()
        if self._is(_State.CLOSED):
            self._skip_newlines(_State.CONTENT)
        if self._is(_State.CONTENT):
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def flush(self) -> Split:
        """What is still held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._is(_State.REASONING):
            return Split(reasoning=held.rstrip("\n"))
        return Split(content=held if self._state is _State.START else "")

    def _is(self, state: _State) -> bool:
        return self._state is state

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held = begun[len(OPEN) :]
            self._state = _State.OPENED
        elif not OPEN.startswith(begun):
            self._state = _State.CONTENT

    def _skip_newlines(self, then: _State) -> None:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = then

    def _reason(self) -> str:
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._held = after
            self._state = _State.CLOSED
            return before.rstrip("\n")
        decided = len(without_undecided_end(before, CLOSE))
        self._held = before[decided:]
        return before[:decided]
