"""Tool calls in the Hermes form that Qwen models write, taken out of an answer while it comes.

    Let me look.                                     content "Let me look."
    <tool_call>                                      a call of f, with the arguments {"x": 1}
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

Arguments are passed on as the model writes them, character by character, so what a stream says of a call is what a
whole answer says. Text comes in pieces cut anywhere; the joined pieces are the same however it was cut. What looks
like a call and is none stays content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Final

from replica.api.stop_strings import without_undecided_end

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
# How nearly every call begins; a call in another order of its keys is passed on when it is whole.
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS: Final = 1024  # a head that is no head by then is none


@dataclass(slots=True)
class CallDelta:
    """What is new of one call: its name once, and then its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """A piece of an answer, taken apart: texts and what is new of calls, in their order."""

    parts: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text, without calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        """The calls, without text."""
        return [part for part in self.parts if isinstance(part, CallDelta)]

    def add(self, part: str | CallDelta) -> None:
        """Adds a part, or more of the last one."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str):
            if isinstance(last, str):
                self.parts[-1] = last + part
            elif part:
                self.parts.append(part)
        elif isinstance(last, CallDelta) and last.index == part.index:
            last.arguments += part.arguments
        else:
            self.parts.append(CallDelta(part.index, part.name, part.arguments))

    def add_all(self, more: Said) -> None:
        """Adds what follows."""
        for part in more.parts:
            self.add(part)


class ToolSplitter:
    """Incremental splitter for one answer. `parallel`: more than one call is wanted; if not, others are dropped."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._held = ""
        self._state = self._content
        self._num_calls = 0
        self._arguments = _ObjectEnd()

    @property
    def has_calls(self) -> bool:
        """Whether there was a call."""
        return self._num_calls > 0

    def push(self, text: str) -> Said:
        """What this piece of text decides."""
        self._held += text
        split = Said()
        while self._state(split):
            pass
        return split

    def flush(self) -> Said:
        """What is still held back, at the end of the answer."""
        split = Said()
        held, self._held = self._held, ""
        if self._state == self._content:
            split.add(held if not self.has_calls else held.rstrip("\n"))
        elif self._state == self._head:
            self._whole_call(held, split, closed=False)
        return split

    # Each state takes what it can of `_held` and says whether the next state is to go on.

    def _content(self, split: Said) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            split.add(before.rstrip("\n"))
            self._held = after
            self._state = self._head
            return True
        decided = without_undecided_end(before, OPEN)
        split.add(decided)
        self._held = before[len(decided) :]
        return False

    def _head(self, split: Said) -> bool:
        match = _HEAD.match(self._held[:_MAX_HEAD_CHARS])
        name = _unquoted(match[1]) if match else None
        if match and name is not None:
            self._held = self._held[match.end() :]
            self._begin_call(name, split)
            self._arguments = _ObjectEnd()
            self._state = self._arguments_of_call
            return True
        body, tag, after = self._held.partition(CLOSE)
        if not tag:
            return False
        self._held = after
        self._whole_call(body, split, closed=True)
        self._state = self._content
        return True

    def _arguments_of_call(self, split: Said) -> bool:
        end = self._arguments.find(self._held)
        self._add_arguments(self._held if end < 0 else self._held[:end], split)
        self._held = "" if end < 0 else self._held[end:]
        if end >= 0:
            self._state = self._tail
        return end >= 0

    def _tail(self, split: Said) -> bool:
        """After the arguments: a brace and the closing tag."""
        _, tag, after = self._held.partition(CLOSE)
        if not tag:
            return False
        self._held = after
        self._state = self._content
        return True

    def _whole_call(self, body: str, split: Said, *, closed: bool) -> None:
        try:
            call = json.loads(body, strict=False)
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(name, str):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            split.add(OPEN + body + (CLOSE if closed else ""))  # no call; the reader sees what was written
            return
        self._begin_call(name, split)
        self._add_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments), split)

    def _begin_call(self, name: str, split: Said) -> None:
        if self._parallel or not self._num_calls:
            split.add(CallDelta(self._num_calls, name))
        self._num_calls += 1

    def _add_arguments(self, text: str, split: Said) -> None:
        index = self._num_calls - 1
        if not text or (index and not self._parallel):
            return
        split.add(CallDelta(index, None, text))


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int:
        """Where the object ends within this piece; -1 while it goes on."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return -1


def _unquoted(text: str) -> str | None:
    try:
        value: str = json.loads(text, strict=False)
        return value
    except ValueError:  # an escape that JSON does not have
        return None
