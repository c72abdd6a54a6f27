"""Anthropic's /v1/messages become chats. The answers are in messages_answers.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from replica.api.answers import Json, to_json
from replica.api.fields import (
    BOOLEAN,
    MAX_INT32,
    TEXT,
    FieldReader,
    Schema,
    Table,
    bad,
    check_count,
    check_flag,
    check_object,
    check_string,
    checked,
    nullable,
    whole,
)
from replica.api.message_fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    TOOL_NAME,
    an_object,
    check_tool_name,
    list_of,
)
from replica.api.request_fields import CHAT, check_stop

_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "chat_template_kwargs", "priority"),
)


def chat_of_messages(reader: FieldReader, body: Any, *, counts: bool = False) -> Json:
    """The body of a chat that asks the same. `counts`: for count_tokens, which needs no max_tokens.

    Raises BadRequest for what is wrong in the fields that chats have not; the others are checked when the chat is.
    """
    values = reader.read(body, COUNT_TOKENS if counts else MESSAGES)
    chat: Json = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": values["system"] + values["messages"], "max_tokens": values["max_tokens"]}
    chat |= {"stop": list(values["stop_sequences"]), "tools": values["tools"], **values["tool_choice"]}
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True  # Anthropic's way to begin the answer oneself
    if values["thinking"] is not None:
        kwargs = values["chat_template_kwargs"]
        chat["chat_template_kwargs"] = {"enable_thinking": values["thinking"], **kwargs}
    return chat


def _check_system(name: str, value: Any) -> list[Json]:
    return [{"role": "system", "content": _text_of(name, value)}]


def _check_messages(name: str, value: Any) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise bad(name, value, "a list of at least one message")
    check_count(name, value, MAX_MESSAGES, "messages")
    return [made for i, message in enumerate(value) for made in _chat_messages(f"{name}[{i}]", message)]


def _chat_messages(name: str, message: Any) -> list[Json]:
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


def _check_tools(name: str, value: Any) -> list[Json]:
    if not isinstance(value, list):
        raise bad(name, value, "a list of tools")
    check_count(name, value, MAX_TOOLS, "tools")
    made: list[Json] = []
    for i, tool in enumerate(value):
        at = f"{name}[{i}]"
        if check_object(at, tool).get("type") not in (None, "custom"):
            raise bad(f"{at}.type", tool.get("type"), "custom; tools of the server are not supported")
        function: Json = {"name": check_tool_name(f"{at}.name", tool.get("name"))}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if tool.get("input_schema") is not None:
            function["parameters"] = check_object(f"{at}.input_schema", tool["input_schema"])
        made.append({"type": "function", "function": function})  # in the order in which models have read such
    return made


def _check_tool_choice(name: str, value: Any) -> Json:
    """The fields of a chat that say the same."""
    choice = check_object(name, value)
    kind = choice.get("type")
    made: Json = {}
    if choice.get("disable_parallel_tool_use") is not None:
        at = f"{name}.disable_parallel_tool_use"
        made["parallel_tool_calls"] = not check_flag(at, choice["disable_parallel_tool_use"])
    if kind == "tool":
        function = {"name": check_tool_name(f"{name}.name", choice.get("name"))}
        return made | {"tool_choice": {"type": "function", "function": function}}
    if not isinstance(kind, str) or kind not in ("auto", "any", "none"):
        raise bad(f"{name}.type", kind, "one of auto, any, tool, none")
    return made | {"tool_choice": "required" if kind == "any" else kind}


def _check_thinking(name: str, value: Any) -> bool:
    return check_object(name, value).get("type") != "disabled"


def _block(kind: str, **properties: Schema) -> Schema:
    return an_object(("type", *properties), type={"const": kind}, **properties)


_TEXT_BLOCK: Final = _block("text", text=TEXT)
_TEXTS: Final[Schema] = {"anyOf": [TEXT, list_of(_TEXT_BLOCK, maxItems=MAX_PARTS)]}
_TOOL_RESULT: Final = an_object(("type",), type={"const": "tool_result"}, content=nullable(_TEXTS))
_TOOL_USE: Final = _block("tool_use", name=TEXT, input={"type": "object"})
_THINKING: Final = [_block("thinking", thinking=TEXT), _block("redacted_thinking")]


def _message(role: str, blocks: list[Schema]) -> Schema:
    content = {"anyOf": [TEXT, list_of({"anyOf": blocks}, minItems=1, maxItems=MAX_PARTS)]}
    return an_object(("role", "content"), role={"const": role}, content=content)


_MESSAGES: Final = [
    _message("user", [_TEXT_BLOCK, _TOOL_RESULT]),
    _message("assistant", [_TEXT_BLOCK, _TOOL_USE, *_THINKING]),
]
_TOOL: Final = an_object(
    ("name",), name=TOOL_NAME, input_schema=nullable({"type": "object"}), type={"enum": ["custom", None]}
)
_PARALLEL: Final = nullable(BOOLEAN)
MESSAGES: Final = Table(
    served={
        **{name: CHAT.served[name] for name in _SAME},
        "max_tokens": whole(1, MAX_INT32),
        "messages": checked(_check_messages, None, **list_of({"anyOf": _MESSAGES}, minItems=1, maxItems=MAX_MESSAGES)),
        "system": checked(_check_system, [], **_TEXTS),
        "stop_sequences": checked(check_stop, (), **CHAT.served["stop"].schema),
        "tools": checked(_check_tools, [], **list_of(_TOOL, maxItems=MAX_TOOLS)),
        "tool_choice": checked(
            _check_tool_choice,
            {},
            anyOf=[
                an_object(("type",), type={"enum": ["auto", "any", "none"]}, disable_parallel_tool_use=_PARALLEL),
                an_object(
                    ("type", "name"), type={"const": "tool"}, name=TOOL_NAME, disable_parallel_tool_use=_PARALLEL
                ),
            ],
        ),
        "thinking": checked(_check_thinking, None, type="object"),
    },
    not_served={"container": (), "mcp_servers": ([],)},
    ignored=frozenset({"metadata", "service_tier", "context_management", "output_config", "betas"}),
    required=("messages", "max_tokens"),
)
COUNT_TOKENS: Final = replace(MESSAGES, required=("messages",))
