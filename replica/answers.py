"""Committed tokens -> the text of each choice -> OpenAI's JSON, in pieces for a stream or whole."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

from replica.errors import GenerationFailed, Unavailable
from replica.metrics import ChoiceTimes
from replica.openai_api import Options, Prompt
from replica.reasoning import ReasoningSplitter
from replica.request import FinishReason, Sequence, TokenOutput
from replica.tokenizer import Detokenizer

# All ASCII: a line separator such as U+2028 inside of an event splits it for clients that split lines as Python does.
to_json: Final = json.JSONEncoder(separators=(",", ":")).encode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output adds to a choice."""

    content: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class Choice:
    """One choice of an answer, while its tokens come."""

    def __init__(
        self,
        *,
        sequence: Sequence,
        prompt: Prompt,
        detokenizer: Detokenizer,
        splitter: ReasoningSplitter | None,
        times: ChoiceTimes,
    ) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._splitter = splitter
        self._times = times

    @property
    def index(self) -> int:
        """The choice's place in the answer."""
        return self.sequence.choice

    def push(self, output: TokenOutput) -> Delta:
        """The text of these tokens. Raises GenerationFailed, Unavailable when the sequence ended without an answer."""
        reason = self.finish_reason = output.finish_reason
        if reason is FinishReason.ERROR:
            raise GenerationFailed(output.error or "the step failed")
        if reason is FinishReason.ABORT:
            raise Unavailable("the replica stopped before the answer was complete")
        self.num_tokens += len(output.token_ids)
        self._times.output(len(output.token_ids))
        # The token that stops an answer is counted but is no part of its text.
        text_ids = output.token_ids[:-1] if reason is FinishReason.STOP else output.token_ids
        text = self._detokenizer.push(text_ids)
        if reason is not None:
            text += self._detokenizer.flush()
        if self._splitter is None:
            return Delta(text, "", output.token_ids, reason)
        split = self._splitter.push(text)
        content, reasoning = split.content, split.reasoning
        if reason is not None:
            last = self._splitter.flush()
            content, reasoning = content + last.content, reasoning + last.reasoning
        return Delta(content, reasoning, output.token_ids, reason)

    def close(self) -> None:
        """To be called once, when nobody reads the choice any more."""
        self._times.end(self.finish_reason or FinishReason.ABORT)


class Format(Protocol):
    """How an endpoint writes its answers."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """The chunk of a choice that comes before its first token."""

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """The part of a chunk's choice that carries text."""

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """The part of a whole answer's choice that carries text. `delta` is all of it."""


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """Only what is new."""
        made: Json = {}
        if delta.reasoning:
            made["reasoning_content"] = delta.reasoning
        if delta.content:
            made["content"] = delta.content
        return {"delta": made}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """A message."""
        return {
            "message": {
                "role": "assistant",
                "content": delta.content,
                "reasoning_content": delta.reasoning or None,
                "refusal": None,
            }
        }


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """Nothing, but for the prompt's ids when they are asked for."""
        return {"text": "", "prompt_token_ids": choice.prompt.token_ids} if options.return_token_ids else None

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """The new text."""
        return {"text": delta.content}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """The text."""
        ids = {"prompt_token_ids": choice.prompt.token_ids} if options.return_token_ids else {}
        return {"text": delta.content} | ids


class Answer:
    """The answer to one request: its choices, and the JSON for what they have said."""

    def __init__(
        self,
        *,
        format_: Format,
        options: Options,
        choices: list[Choice],
        event: asyncio.Event,
        request_id: str,
        model_name: str,
    ) -> None:
        self._format = format_
        self._options = options
        self._choices = choices
        self._open = list(choices)
        self._event = event
        self._head: Json = {"id": format_.id_prefix + request_id, "created": int(time.time()), "model": model_name}

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
            said.append((choice, choice.push(output)))
            if output.finish_reason is not None:
                self._open.remove(choice)
        return said

    async def whole(self) -> Json:
        """Waits for the end of all choices and returns the answer."""
        said: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices}
        while not self.is_done:
            for choice, delta in await self.next():
                said[choice.index].append(delta)
        choices = [self._whole_choice(choice, _joined(said[choice.index])) for choice in self._choices]
        answer = {**self._head, "object": self._format.whole_object, "choices": choices, "usage": self._usage()}
        return answer | self._chat_prompt_ids()

    def opening_events(self) -> list[str]:
        """What a stream begins with."""
        events: list[str] = []
        for choice in self._choices:
            opening = self._format.opening(choice, self._options)
            if opening is not None:
                events.append(self._chunk(choice, opening, None, **self._chat_prompt_ids()))
        return events

    def events(self, choice: Choice, delta: Delta) -> list[str]:
        """What a stream says of a delta: its text, and its end apart from it."""
        events: list[str] = []
        token_ids = list(delta.token_ids)
        has_text = bool(delta.content or delta.reasoning)
        if has_text or (token_ids and delta.finish_reason is None and self._options.return_token_ids):
            events.append(self._chunk(choice, self._format.delta(choice, delta), None, token_ids))
            token_ids = []
        if delta.finish_reason is not None:
            end = self._format.delta(choice, Delta("", "", ()))
            events.append(self._chunk(choice, end, delta.finish_reason, token_ids))
        return events

    def closing_events(self) -> list[str]:
        """What a complete stream ends with."""
        if not self._options.stream_options:
            return ["[DONE]"]
        usage = {**self._head, "object": self._format.chunk_object, "choices": [], "usage": self._usage()}
        return [to_json(usage), "[DONE]"]

    def _chunk(
        self,
        choice: Choice,
        part: Json,
        finish_reason: FinishReason | None,
        token_ids: list[int] | None = None,
        **further: Any,
    ) -> str:
        made = {"index": choice.index, **part, "logprobs": None, "finish_reason": finish_reason}
        if token_ids is not None and self._options.return_token_ids:
            made["token_ids"] = token_ids
        chunk = {**self._head, "object": self._format.chunk_object, "choices": [made], **further}
        if self._options.stream_options:
            chunk["usage"] = None
        return to_json(chunk)

    def _whole_choice(self, choice: Choice, delta: Delta) -> Json:
        made = {
            "index": choice.index,
            **self._format.whole(choice, delta, self._options),
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        return made | {"token_ids": list(delta.token_ids)} if self._options.return_token_ids else made

    def _chat_prompt_ids(self) -> Json:
        """A chat has one prompt, so its ids stand beside the choices."""
        if isinstance(self._format, ChatFormat) and self._options.return_token_ids:
            return {"prompt_token_ids": self._choices[0].prompt.token_ids}
        return {}

    def _usage(self) -> Json:
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in self._choices)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        deltas[-1].finish_reason,
    )
