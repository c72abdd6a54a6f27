"""Anthropic's /v1/messages on top of chats: its requests become chats, its answers are written from the same deltas."""

from __future__ import annotations

import json
from typing import Any, Final

from replica.api.answer_blocks import Block, Blocks, Change, Kind
from replica.api.answers import Event, Json, to_json, usage_of
from replica.api.choice import TOOL_CALLS, Choice, Delta
from replica.api.fields import bad, check_count, check_flag, check_object, check_string
from replica.api.message_fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from replica.errors import BadRequest, RequestError

_SAME: Final = ("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "chat_template_kwargs")
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def chat_of_messages(body: Any, *, counts: bool = False) -> Json:
    """The body of a chat that asks the same. `counts`: for count_tokens, which needs no max_tokens.

    Raises BadRequest for what cannot be told in a chat; all else is checked when the chat is.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}, must be an object")
    if body.get("max_tokens") is None and not counts:
        raise BadRequest("max_tokens is missing", param="max_tokens")
    messages = _system(body.get("system"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise bad("messages", given, "a list of at least one message")
    check_count("messages", given, MAX_MESSAGES, "messages")
    for i, message in enumerate(given):
        messages += _messages(f"messages[{i}]", message)
    chat: Json = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": messages, "max_tokens": body.get("max_tokens"), "stop": body.get("stop_sequences")}
    if messages and messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True  # Anthropic's way to begin the answer oneself
    if body.get("tools") is not None:
        chat["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        chat |= _tool_choice(check_object("tool_choice", body["tool_choice"]))
    thinking = body.get("thinking")
    if thinking is not None:
        thinks = check_object("thinking", thinking).get("type") != "disabled"
        kwargs = check_object("chat_template_kwargs", chat.get("chat_template_kwargs") or {})
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, **kwargs}
    return chat


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


def _system(value: Any) -> list[Json]:
    if value is None:
        return []
    return [{"role": "system", "content": _text_of("system", value)}]


def _messages(name: str, message: Any) -> list[Json]:
    """A message's blocks as chat messages, in order: results of tools are messages of their own."""
    role, content = check_object(name, message).get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad(f"{name}.role", role, "user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise bad(f"{name}.content", content, "a text or a list of at least one block")
    check_count(f"{name}.content", content, MAX_PARTS, "blocks")
    blocks = [(f"{name}.content[{i}]", check_object(f"{name}.content[{i}]", part)) for i, part in enumerate(content)]
    return [_assistant_message(blocks)] if role == "assistant" else _user_messages(blocks)


def _user_messages(blocks: list[tuple[str, Json]]) -> list[Json]:
    made: list[Json] = []
    for at, block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content")
            text = "" if content is None else _text_of(f"{at}.content", content)
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            continue
        if block.get("type") != "text":
            raise bad(f"{at}.type", block.get("type"), "text or tool_result; nothing else is supported")
        text = check_string(f"{at}.text", block.get("text"))
        if made and made[-1]["role"] == "user":
            made[-1]["content"] += "\n" + text
        else:
            made.append({"role": "user", "content": text})
    return made


def _assistant_message(blocks: list[tuple[str, Json]]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for at, block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(check_string(f"{at}.text", block.get("text")))
        elif kind == "thinking":
            thoughts.append(check_string(f"{at}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            arguments = to_json(check_object(f"{at}.input", block.get("input")))
            function = {"name": check_string(f"{at}.name", block.get("name")), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # nobody can read that one
            raise bad(f"{at}.type", kind, "text, thinking or tool_use; nothing else is supported")
    made: Json = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    return made | {"tool_calls": calls} if calls else made


def _text_of(name: str, value: Any) -> str:
    """A text, or the texts of blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(name, value, "a text or a list of text blocks")
    check_count(name, value, MAX_PARTS, "blocks")
    texts: list[str] = []
    for i, block in enumerate(value):
        if check_object(f"{name}[{i}]", block).get("type") != "text":
            raise bad(f"{name}[{i}].type", block.get("type"), "text; nothing else is supported")
        texts.append(check_string(f"{name}[{i}].text", block.get("text")))
    return "\n".join(texts)


def _tools(value: Any) -> list[Json]:
    if not isinstance(value, list):
        raise bad("tools", value, "a list of tools")
    check_count("tools", value, MAX_TOOLS, "tools")
    made: list[Json] = []
    for i, tool in enumerate(value):
        if check_object(f"tools[{i}]", tool).get("type") not in (None, "custom"):
            raise bad(f"tools[{i}].type", tool.get("type"), "custom; tools of the server are not supported")
        description = {} if tool.get("description") is None else {"description": tool["description"]}
        function = {"name": tool.get("name"), **description, "parameters": tool.get("input_schema")}
        made.append({"type": "function", "function": function})  # in the order in which models have read such
    return made


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    made: Json = {}
    if choice.get("disable_parallel_tool_use") is not None:
        name = "tool_choice.disable_parallel_tool_use"
        made["parallel_tool_calls"] = not check_flag(name, choice["disable_parallel_tool_use"])
    if kind == "tool":
        return made | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in ("auto", "any", "none"):
        raise bad("tool_choice.type", kind, "one of auto, any, tool, none")
    return made | {"tool_choice": "required" if kind == "any" else kind}


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
