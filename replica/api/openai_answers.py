"""Answers in the shapes of /v1/chat/completions and /v1/completions, whole and as events."""

from __future__ import annotations

import hashlib
import time
from typing import Protocol

from replica.api.answers import Event, Json, to_json, usage_of
from replica.api.choice import Choice, Delta, joined
from replica.api.logprobs import LogprobsFormat
from replica.api.openai_api import Options
from replica.api.tokenizer import Tokenizer
from replica.api.tools import CallDelta
from replica.errors import RequestError

DONE = Event("[DONE]")


class Format(Protocol):
    """Where chats and completions differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    has_one_prompt: bool  # then its ids stand beside the choices

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """The part of the chunk of a choice that comes before its first token, if there is one."""

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """The part of a chunk's choice that carries text."""

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """The part of a whole answer's choice that carries text. `delta` is all of it."""


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """Only what is new."""
        made: Json = {}
        if delta.reasoning:
            made["reasoning_content"] = delta.reasoning
        if delta.said.content:
            made["content"] = delta.said.content
        if delta.said.calls:
            made["tool_calls"] = [_call_delta(choice, call) for call in delta.said.calls]
        return {"delta": made}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """A message."""
        message: Json = {
            "role": "assistant",
            "content": delta.said.content if delta.said.content or not delta.said.calls else None,
            "reasoning_content": delta.reasoning or None,
            "refusal": None,
        }
        if delta.said.calls:
            message["tool_calls"] = [_whole_call(choice, call) for call in delta.said.calls]
        return {"message": message}


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, choice: Choice, options: Options) -> Json | None:
        """The prompt, when it is asked for, as text or as ids."""
        if not (options.return_token_ids or options.echo):
            return None
        return {"text": self._echoed(choice, options)} | self._prompt_ids(choice, options)

    def delta(self, choice: Choice, delta: Delta) -> Json:
        """The new text."""
        return {"text": delta.said.content}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """The text."""
        return {"text": self._echoed(choice, options) + delta.said.content} | self._prompt_ids(choice, options)

    def _echoed(self, choice: Choice, options: Options) -> str:
        if not options.echo:
            return ""
        prompt = choice.prompt
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)

    def _prompt_ids(self, choice: Choice, options: Options) -> Json:
        return {"prompt_token_ids": choice.prompt.token_ids} if options.return_token_ids else {}


class OpenAIWriter:
    """See answers.Writer."""

    def __init__(
        self,
        *,
        format_: Format,
        logprobs: LogprobsFormat,
        options: Options,
        choices: list[Choice],
        request_id: str,
        model_name: str,
    ) -> None:
        self._format = format_
        self._logprobs = logprobs
        self._options = options
        self._choices = choices
        self._head: Json = {"id": format_.id_prefix + request_id, "created": int(time.time()), "model": model_name}
        self._usage, self._usage_in_each = options.stream_options

    def whole(self, said: list[list[Delta]]) -> Json:
        """See Writer."""
        answer = {
            **self._head,
            "object": self._format.whole_object,
            "choices": [
                self._whole_choice(choice, joined(deltas)) for choice, deltas in zip(self._choices, said, strict=True)
            ],
            "usage": usage_of(self._choices, num_choices=self._options.n),
        }
        return answer | self._prompt_ids()

    def opening(self) -> list[Event]:
        """See Writer."""
        events: list[Event] = []
        for choice in self._choices:
            opening = self._format.opening(choice, self._options)
            if opening is not None:
                opening |= self._logprobs_of(choice, None)
                events.append(self._chunk(choice, opening, is_begun=False, **self._prompt_ids()))
        return events

    def delta(self, choice: Choice, delta: Delta) -> list[Event]:
        """The text, and the end apart from it."""
        events: list[Event] = []
        options, token_ids = self._options, delta.token_ids
        shows_tokens = bool(token_ids) and (options.return_token_ids or options.logprobs is not None)
        part = self._logprobs_of(choice, delta)
        if delta.has_text or (shows_tokens and delta.finish_reason is None):
            part = {**self._format.delta(choice, delta), **part, **self._token_ids(token_ids)}
            events.append(self._chunk(choice, part))
            token_ids, part = (), {}
        if delta.finish_reason is not None:
            part = {**self._format.delta(choice, Delta()), **part, **self._token_ids(token_ids)}
            part |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stopped_by}
            events.append(self._chunk(choice, part))
        return events

    def closing(self) -> list[Event]:
        """See Writer."""
        if not self._usage:
            return [DONE]
        usage = {**self._head, "object": self._format.chunk_object, "choices": [], "usage": self._usage_now()}
        return [Event(to_json(usage)), DONE]

    def failure(self, err: RequestError) -> Event:
        """See Writer."""
        return Event(to_json(err.body()))

    def _chunk(self, choice: Choice, part: Json, *, is_begun: bool = True, **further: object) -> Event:
        made = {"index": choice.index, "logprobs": None, "finish_reason": None, **part}
        chunk = {**self._head, "object": self._format.chunk_object, "choices": [made], **further}
        if self._usage:
            chunk["usage"] = self._usage_now(is_begun=is_begun) if self._usage_in_each else None
        return Event(to_json(chunk))

    def _whole_choice(self, choice: Choice, delta: Delta) -> Json:
        return {
            "index": choice.index,
            **self._format.whole(choice, delta, self._options),
            "logprobs": None,
            **self._logprobs.whole(choice, delta, self._options),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stopped_by,
            **self._token_ids(delta.token_ids),
        }

    def _logprobs_of(self, choice: Choice, delta: Delta | None) -> Json:
        return self._logprobs.delta(choice, delta, self._options)

    def _token_ids(self, token_ids: tuple[int, ...]) -> Json:
        return {"token_ids": list(token_ids)} if self._options.return_token_ids else {}

    def _prompt_ids(self) -> Json:
        if self._format.has_one_prompt and self._options.return_token_ids:
            return {"prompt_token_ids": self._choices[0].prompt.token_ids}
        return {}

    def _usage_now(self, *, is_begun: bool = True) -> Json:
        return usage_of(self._choices, num_choices=self._options.n, is_begun=is_begun)


def call_id(choice: Choice, index: int) -> str:
    """The id of a tool call: a function of the request's id, so that a stream that is continued elsewhere keeps it."""
    name = f"{choice.sequence.request_id}/{choice.index}/{index}"
    return "call_" + hashlib.sha256(name.encode()).hexdigest()[:24]


def _call_delta(choice: Choice, call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(choice, call)}


def _whole_call(choice: Choice, call: CallDelta) -> Json:
    return {
        "id": call_id(choice, call.index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
