"""OpenAI's /v1/responses on top of chats: text in and out, and function tools. Nothing is stored.

Its requests become chats, its answers are written from the same deltas.
"""

from __future__ import annotations

import time
from typing import Any, Final

from replica.api.answer_blocks import Block, Blocks, Change, Kind
from replica.api.answers import Event, Json, to_json, usage_of
from replica.api.choice import Choice, Delta
from replica.api.fields import bad, check_count, check_object, check_string
from replica.api.message_fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from replica.errors import BadRequest, RequestError

_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls"),
    *("chat_template_kwargs", "stop", "presence_penalty", "frequency_penalty"),
)
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
# Name -> the values that change nothing.
_NOT_SERVED: Final[dict[str, tuple[Any, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}


def chat_of_response(body: Any) -> Json:
    """The body of a chat that asks the same.

    Raises BadRequest for what cannot be told in a chat; all else is checked when the chat is.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}, must be an object")
    for name, neutrals in _NOT_SERVED.items():
        if body.get(name) is not None and not any(body[name] is n or body[name] == n for n in neutrals):
            raise BadRequest(f"{name} is not supported; leave it out", param=name)
    chat: Json = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _messages(body.get("instructions"), body.get("input"))
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("text") is not None:
        chat["response_format"] = _response_format(check_object("text", body["text"]).get("format"))
    if body.get("reasoning") is not None:
        chat["reasoning_effort"] = check_object("reasoning", body["reasoning"]).get("effort")
    return chat


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


def _messages(instructions: Any, given: Any) -> list[Json]:
    messages: list[Json] = []
    if instructions is not None:
        messages.append({"role": "system", "content": check_string("instructions", instructions)})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad("input", given, "a text or a list of at least one item")
    check_count("input", given, MAX_MESSAGES, "items")
    for i, item in enumerate(given):
        _add_item(messages, f"input[{i}]", check_object(f"input[{i}]", item))
    return messages


def _add_item(messages: list[Json], at: str, item: Json) -> None:
    """Adds an input item to the messages. What an assistant said and called is one message, as chats have it."""
    kind = item.get("type") or "message"
    if kind == "message":
        role, content = item.get("role"), _content(f"{at}.content", item.get("content"))
        last = messages[-1] if messages else {}
        if role == "assistant" == last.get("role") and not last["content"]:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": check_string(f"{at}.arguments", item.get("arguments"))}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(f"{at}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or []
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
    else:
        raise bad(f"{at}.type", kind, "message, function_call, function_call_output or reasoning")


def _assistant(messages: list[Json]) -> Json:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(name, value, "a text or a list of text parts")
    check_count(name, value, MAX_PARTS, "parts")
    texts: list[str] = []
    for i, part in enumerate(value):
        kind = check_object(f"{name}[{i}]", part).get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise bad(f"{name}[{i}].type", kind, "a text part; nothing else is supported")
        texts.append(check_string(f"{name}[{i}].text", part.get("text")))
    return "\n".join(texts)


def _tools(value: Any) -> list[Json]:
    if not isinstance(value, list):
        raise bad("tools", value, "a list of tools")
    check_count("tools", value, MAX_TOOLS, "tools")
    made: list[Json] = []
    for i, tool in enumerate(value):
        if check_object(f"tools[{i}]", tool).get("type") != "function":
            raise bad(f"tools[{i}].type", tool.get("type"), "function; tools of the server are not supported")
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(format_: Any) -> Any:
    if isinstance(format_, dict) and format_.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": format_.get("name"), "schema": format_.get("schema")}}
    return format_
