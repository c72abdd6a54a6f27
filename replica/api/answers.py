"""The answer to one request: gathers what its choices say, whichever of them says it, until all have ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from replica.api.choice import Choice, Delta
from replica.errors import RequestError
from replica.request import Sequence

# All ASCII: a line separator such as U+2028 inside of an event splits it for clients that split lines as Python does.
to_json: Final = json.JSONEncoder(separators=(",", ":")).encode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: its data, and its name in the APIs that give one."""

    data: str
    name: str | None = None


class Writer(Protocol):
    """How an API writes the answer to one request. Made for it, and used once: whole, or event by event."""

    def whole(self, said: list[list[Delta]]) -> Json:
        """The whole answer. `said` has the deltas of each choice."""

    def opening(self) -> list[Event]:
        """What a stream begins with."""

    def delta(self, choice: Choice, delta: Delta) -> list[Event]:
        """What a stream says of a delta."""

    def closing(self) -> list[Event]:
        """What a complete stream ends with."""

    def failure(self, err: RequestError) -> Event:
        """The last event of a stream that breaks off."""


class Answer:
    """The choices of one request, while they go on."""

    def __init__(self, *, choices: list[Choice], event: asyncio.Event, abort: Callable[[list[Sequence]], None]) -> None:
        self._choices = choices
        self._open = list(choices)
        self._event = event
        self._abort = abort

    @property
    def is_done(self) -> bool:
        """Whether all choices have ended."""
        return not self._open

    async def next(self) -> list[tuple[Choice, Delta]]:
        """What the choices say next; waits until one of them says something."""
        await self._event.wait()
        self._event.clear()
        said: list[tuple[Choice, Delta]] = []
        for choice in list(self._open):
            output = choice.sequence.stream.take()
            if output is None:
                continue
            delta = choice.push(output)
            said.append((choice, delta))
            if delta.finish_reason is not None:
                self._open.remove(choice)
                if output.finish_reason is None:  # a stop string, which the step loop does not know
                    self._abort([choice.sequence])
        return said

    async def whole(self) -> list[list[Delta]]:
        """Waits for the end of all choices and returns what each has said."""
        said: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices}
        while not self.is_done:
            for choice, delta in await self.next():
                said[choice.index].append(delta)
        return [said[choice.index] for choice in self._choices]


def usage_of(choices: list[Choice], *, num_choices: int, is_begun: bool = True) -> Json:
    """OpenAI's usage. Of `num_choices` choices each, which have one prompt together, that prompt counts once.

    `is_begun`: false for what stands in a stream before its first token.
    """
    prompts = choices[::num_choices]
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompts)
    cached_tokens = sum(choice.sequence.num_cached or 0 for choice in prompts)
    completion_tokens = sum(choice.num_tokens for choice in choices) if is_begun else 0
    reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices) if is_begun else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
