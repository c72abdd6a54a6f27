"""An answer as a list of blocks (reasoning, text, calls of tools), for the APIs that number such blocks.

A whole answer is what is left when its stream is over, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from replica.api.choice import Choice, Delta
from replica.api.openai_answers import call_id
from replica.api.tools import CallDelta


class Kind(Enum):
    """What a block holds."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Change(Enum):
    """What happens to a block."""

    BEGIN = auto()
    MORE = auto()
    END = auto()


@dataclass(slots=True)
class Block:
    """One block and its text so far; of a call, that is its arguments."""

    kind: Kind
    index: int
    text: str = ""
    call_index: int = -1
    name: str = ""
    call_id: str = ""


class Blocks:
    """The blocks of one choice."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def push(self, choice: Choice, delta: Delta) -> Iterator[tuple[Change, Block, str]]:
        """What a delta changes, in order; with Change.MORE comes the piece of text."""
        if delta.reasoning:
            yield from self._add(Kind.REASONING, delta.reasoning)
        for part in delta.said.parts:
            if isinstance(part, str):
                yield from self._add(Kind.TEXT, part)
            else:
                yield from self._add_call(choice, part)
        if delta.finish_reason is not None:
            if not self.blocks:
                yield from self._begin(Block(Kind.TEXT, 0))  # an answer has at least one
            yield from self._end()

    def _add_call(self, choice: Choice, call: CallDelta) -> Iterator[tuple[Change, Block, str]]:
        if call.name is not None:
            yield from self._end()
            call_index, index = call.index, len(self.blocks)
            block = Block(Kind.CALL, index, "", call_index, call.name, call_id(choice, call_index))
            yield from self._begin(block)
        if call.arguments:
            yield from self._more(self._of_call(call.index), call.arguments)

    def _add(self, kind: Kind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if not (self._is_open and self.blocks[-1].kind is kind):
            yield from self._end()
            yield from self._begin(Block(kind, len(self.blocks)))
        yield from self._more(self.blocks[-1], text)

    def _of_call(self, call_index: int) -> Block:
        return next(block for block in reversed(self.blocks) if block.call_index == call_index)

    def _begin(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        self.blocks.append(block)
        self._is_open = True
        yield Change.BEGIN, block, ""

    def _more(self, block: Block, text: str) -> Iterator[tuple[Change, Block, str]]:
        block.text += text
        yield Change.MORE, block, text

    def _end(self) -> Iterator[tuple[Change, Block, str]]:
        if self._is_open:
            self._is_open = False
            yield Change.END, self.blocks[-1], ""
