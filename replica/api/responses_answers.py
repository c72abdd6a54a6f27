"""Answers of /v1/responses in OpenAI's shapes, whole and as events."""

from __future__ import annotations

import time
from typing import Any

from replica.api.answer_blocks import Block, Blocks, Change, Kind
from replica.api.answers import Event, Json, to_json, usage_of
from replica.api.choice import Choice, Delta
from replica.errors import RequestError


class ResponsesWriter:
    """See answers.Writer. `body` is the request's: a response repeats what it was asked."""

    def __init__(self, *, body: Json, choices: list[Choice], request_id: str, model_name: str) -> None:
        (self._choice,) = choices
        self._request_id = request_id
        self._blocks = Blocks()
        self._finish_reason: str | None = None
        self._num_events = 0
        self._head: Json = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "error": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": choices[0].sequence.params.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": choices[0].sequence.params.top_p,
            "truncation": "disabled",
        }

    def whole(self, said: list[list[Delta]]) -> Json:
        """See Writer."""
        for delta in said[0]:
            self.delta(self._choice, delta)
        return self._response()

    def opening(self) -> list[Event]:
        """See Writer."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]

    def delta(self, choice: Choice, delta: Delta) -> list[Event]:
        """See Writer."""
        self._finish_reason = delta.finish_reason
        return [event for change in self._blocks.push(choice, delta) for event in self._block_events(*change)]

    def closing(self) -> list[Event]:
        """See Writer."""
        response = self._response()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, err: RequestError) -> Event:
        """See Writer."""
        return self._event("error", code=err.code or err.kind, message=str(err), param=err.param)

    def _response(self) -> Json:
        is_cut = self._finish_reason == "length"
        usage = usage_of([self._choice], num_choices=1)
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block, "completed") for block in self._blocks.blocks],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def _item(self, block: Block, status: str) -> Json:
        """An output item; one that is in progress has nothing in it yet."""
        made: Json = {"id": self._item_id(block), "status": status}
        is_begun = status == "in_progress"
        if block.kind is Kind.CALL:
            arguments = "" if is_begun else block.text
            return made | {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": arguments,
            }
        content = [] if is_begun else [_part(block, block.text)]
        if block.kind is Kind.TEXT:
            return made | {"type": "message", "role": "assistant", "content": content}
        return made | {"type": "reasoning", "summary": [], "content": content}

    def _item_id(self, block: Block) -> str:
        prefix = {Kind.CALL: "fc", Kind.TEXT: "msg", Kind.REASONING: "rs"}[block.kind]
        return f"{prefix}_{self._request_id}_{block.index}"

    def _block_events(self, change: Change, block: Block, text: str) -> list[Event]:
        item: Json = {"output_index": block.index}
        at: Json = {"item_id": self._item_id(block), "output_index": block.index}
        part_at = {**at, "content_index": 0}
        is_call = block.kind is Kind.CALL
        kind = {Kind.CALL: "function_call_arguments", Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text"}[
            block.kind
        ]
        logprobs: Json = {"logprobs": []} if block.kind is Kind.TEXT else {}
        if change is Change.BEGIN:
            begun = [self._event("response.output_item.added", **item, item=self._item(block, "in_progress"))]
            if not is_call:
                begun.append(self._event("response.content_part.added", **part_at, part=_part(block, "")))
            return begun
        if change is Change.MORE:
            return [self._event(f"response.{kind}.delta", **(at if is_call else part_at), delta=text, **logprobs)]
        if is_call:
            ended = [self._event(f"response.{kind}.done", **at, name=block.name, arguments=block.text)]
        else:
            ended = [
                self._event(f"response.{kind}.done", **part_at, text=block.text, **logprobs),
                self._event("response.content_part.done", **part_at, part=_part(block, block.text)),
            ]
        return [*ended, self._event("response.output_item.done", **item, item=self._item(block, "completed"))]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event(to_json({"type": kind, "sequence_number": self._num_events, **fields}), kind)
        self._num_events += 1
        return event


def _part(block: Block, text: str) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
