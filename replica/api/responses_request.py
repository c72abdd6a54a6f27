"""OpenAI's /v1/responses become chats: text in and out, and function tools. Nothing is stored.

The answers are in responses_answers.py.
"""

from __future__ import annotations

from typing import Any, Final

from replica.api.answers import Json
from replica.api.fields import (
    MAX_INT32,
    TEXT,
    FieldReader,
    Schema,
    Table,
    bad,
    check_count,
    check_object,
    check_string,
    checked,
    nullable,
    string,
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
from replica.api.request_fields import CHAT

_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls"),
    *("chat_template_kwargs", "stop", "presence_penalty", "frequency_penalty", "priority"),
)
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "reasoning_text")


def chat_of_response(reader: FieldReader, body: Any) -> Json:
    """The body of a chat that asks the same.

    Raises BadRequest for what is wrong in the fields that chats have not; the others are checked when the chat is.
    """
    values = reader.read(body, RESPONSES)
    chat: Json = {name: body[name] for name in _SAME if name in body}
    messages = [] if values["instructions"] is None else [{"role": "system", "content": values["instructions"]}]
    chat |= {"messages": messages + values["input"], "max_completion_tokens": values["max_output_tokens"]}
    chat |= {"tools": values["tools"], "tool_choice": values["tool_choice"]}
    return chat | {"response_format": values["text"], "reasoning_effort": values["reasoning"]}


def _check_input(name: str, value: Any) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad(name, value, "a text or a list of at least one item")
    check_count(name, value, MAX_MESSAGES, "items")
    messages: list[Json] = []
    for i, item in enumerate(value):
        _add_item(messages, f"{name}[{i}]", check_object(f"{name}[{i}]", item))
    return messages


def _add_item(messages: list[Json], at: str, item: Json) -> None:
    """Adds an input item to the messages. What an assistant said and called is one message, as chats have it."""
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "message":
        role, content = item.get("role"), _content(f"{at}.content", item.get("content"))
        if not isinstance(role, str) or role not in _ROLES:
            raise bad(f"{at}.role", role, f"one of {', '.join(_ROLES)}")
        last = messages[-1] if messages else {}
        if role == "assistant" == last.get("role") and not last["content"]:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {name: check_string(f"{at}.{name}", item.get(name)) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(f"{at}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        text = _content(f"{at}.content", item.get("content") or [])
        messages.append({"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})})
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


def _check_tools(name: str, value: Any) -> list[Json]:
    if not isinstance(value, list):
        raise bad(name, value, "a list of tools")
    check_count(name, value, MAX_TOOLS, "tools")
    made: list[Json] = []
    for i, tool in enumerate(value):
        at = f"{name}[{i}]"
        if check_object(at, tool).get("type") != "function":
            raise bad(f"{at}.type", tool.get("type"), "function; tools of the server are not supported")
        function: Json = {"name": check_tool_name(f"{at}.name", tool.get("name"))}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if tool.get("parameters") is not None:
            function["parameters"] = check_object(f"{at}.parameters", tool["parameters"])
        made.append({"type": "function", "function": function})
    return made


def _check_tool_choice(name: str, value: Any) -> Any:
    """As a chat has it."""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": check_tool_name(f"{name}.name", value.get("name"))}}
    raise bad(name, value, '"auto", "none", "required", or {"type": "function", "name": ...}')


def _check_text(name: str, value: Any) -> Json | None:
    """The format, as a chat has it."""
    format_ = check_object(name, value).get("format")
    if format_ is None:
        return None
    kind = check_object(f"{name}.format", format_).get("type")
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        raise bad(f"{name}.format.type", kind, "one of text, json_object, json_schema")
    if kind != "json_schema":
        return {"type": kind}
    schema = check_object(f"{name}.format.schema", format_.get("schema"))
    return {"type": kind, "json_schema": {"name": format_.get("name"), "schema": schema}}


def _check_reasoning(name: str, value: Any) -> str | None:
    effort = check_object(name, value).get("effort")
    return None if effort is None else check_string(f"{name}.effort", effort)


_PART: Final = an_object(("type", "text"), type={"enum": list(_TEXT_PARTS)}, text=TEXT)
_CONTENT: Final[Schema] = {"anyOf": [TEXT, list_of(_PART, maxItems=MAX_PARTS)]}
_ITEM: Final[Schema] = {
    "anyOf": [
        an_object(("role", "content"), type={"enum": ["message", None]}, role={"enum": list(_ROLES)}, content=_CONTENT),
        an_object(("type", "name", "arguments"), type={"const": "function_call"}, name=TEXT, arguments=TEXT),
        an_object(("type", "output"), type={"const": "function_call_output"}, output=_CONTENT),
        an_object(("type",), type={"const": "reasoning"}, content=nullable(_CONTENT)),
    ]
}
_TOOL: Final = an_object(
    ("type", "name"), type={"const": "function"}, name=TOOL_NAME, parameters=nullable({"type": "object"})
)
_FORMAT: Final[Schema] = {
    "anyOf": [
        an_object(("type",), type={"enum": ["text", "json_object"]}),
        an_object(("type", "schema"), type={"const": "json_schema"}, schema={"type": "object"}),
        {"type": "null"},
    ]
}
RESPONSES: Final = Table(
    served={
        **{name: CHAT.served[name] for name in _SAME},
        "input": checked(_check_input, None, anyOf=[TEXT, list_of(_ITEM, minItems=1, maxItems=MAX_MESSAGES)]),
        "instructions": string(),
        "max_output_tokens": whole(1, MAX_INT32),
        "tools": checked(_check_tools, [], **list_of(_TOOL, maxItems=MAX_TOOLS)),
        "tool_choice": checked(
            _check_tool_choice,
            "auto",
            anyOf=[
                {"enum": ["auto", "none", "required"]},
                an_object(("type", "name"), type={"const": "function"}, name=TOOL_NAME),
            ],
        ),
        "text": checked(_check_text, None, **an_object((), format=_FORMAT)),
        "reasoning": checked(_check_reasoning, None, **an_object((), effort=nullable(TEXT))),
        "metadata": checked(check_object, {}, type="object"),
    },
    not_served={
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
    },
    ignored=frozenset(
        {
            *("user", "store", "include", "service_tier", "safety_identifier", "prompt_cache_key", "max_tool_calls"),
            *("prompt_cache_retention", "stream_options"),
        }
    ),
    required=("input",),
)
