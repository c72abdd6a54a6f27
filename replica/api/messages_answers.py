"""Answers of /v1/messages in Anthropic's shapes, whole and as events, and its errors."""

from __future__ import annotations

import json
from typing import Any, Final

from replica.api.answer_blocks import Block, Blocks, Change, Kind
from replica.api.answers import Event, Json, to_json, usage_of
from replica.api.choice import TOOL_CALLS, Choice, Delta
from replica.errors import RequestError

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(err: RequestError) -> Json:
    """An error in Anthropic's shape."""
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(err.status, "api_error"), "message": str(err)}}


class MessagesWriter:
    """See answers.Writer."""

    def __init__(self, *, choices: list[Choice], request_id: str, model_name: str) -> None:
        (self._choice,) = choices
        self._blocks = Blocks()
        self._finish = Delta()
        self._head: Json = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model_name}

    def whole(self, said: list[list[Delta]]) -> Json:
        """See Writer."""
        for delta in said[0]:
            self.delta(self._choice, delta)
        content = [_whole_block(block) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def opening(self) -> list[Event]:
        """See Writer."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        return [_event("message_start", message={**message, "usage": usage})]

    def delta(self, choice: Choice, delta: Delta) -> list[Event]:
        """See Writer."""
        if delta.finish_reason is not None:
            self._finish = delta
        return [_block_event(*change) for change in self._blocks.push(choice, delta)]

    def closing(self) -> list[Event]:
        """See Writer."""
        return [_event("message_delta", delta=self._stop(), usage=self._usage()), _event("message_stop")]

    def failure(self, err: RequestError) -> Event:
        """See Writer."""
        return Event(to_json(error_body(err)), "error")

    def _stop(self) -> Json:
        by = self._finish.stopped_by
        if isinstance(by, str) and self._finish.finish_reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        return {"stop_reason": _STOP_REASONS[str(self._finish.finish_reason)], "stop_sequence": None}

    def _usage(self) -> Json:
        usage = usage_of([self._choice], num_choices=1)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _event(kind: str, **fields: Any) -> Event:
    return Event(to_json({"type": kind, **fields}), kind)


def _block_event(change: Change, block: Block, text: str) -> Event:
    if change is Change.BEGIN:
        return _event("content_block_start", index=block.index, content_block=_empty_block(block))
    if change is Change.END:
        return _event("content_block_stop", index=block.index)
    if block.kind is Kind.REASONING:
        delta = {"type": "thinking_delta", "thinking": text}
    elif block.kind is Kind.TEXT:
        delta = {"type": "text_delta", "text": text}
    else:
        delta = {"type": "input_json_delta", "partial_json": text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _empty_block(block: Block) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole_block(block: Block) -> Json:
    made = _empty_block(block)
    if block.kind is Kind.REASONING:
        return made | {"thinking": block.text}
    if block.kind is Kind.TEXT:
        return made | {"text": block.text}
    return made | {"input": _object_in(block.text)}


def _object_in(arguments: str) -> Json:
    """The object that a call's arguments mean; empty when the answer was cut off in them."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
