"""The fields that carry a conversation: messages, tools, the choice of a tool, the format of the answer.

Each is a check and, beside it, the JSON schema of what passes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from replica.api.fields import (
    BOOLEAN,
    TEXT,
    Schema,
    bad,
    check_count,
    check_flag,
    check_object,
    check_string,
    nullable,
)
from replica.errors import BadRequest

MAX_TOOLS: Final = 256
MAX_MESSAGES: Final = 16384
MAX_PARTS: Final = 4096  # of one message
MAX_CALLS: Final = 1024  # of one message
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# Names stand in grammars and templates: nothing in them needs quoting.
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_SET_BY_REQUEST: Final = ("messages", "tools", "documents", "add_generation_prompt")  # not by template variables


def an_object(required: tuple[str, ...], **properties: Schema) -> Schema:
    """The schema of an object with these properties, and perhaps others that nobody looks at."""
    return {"type": "object", "properties": properties, "required": list(required)}


def list_of(items: Schema, **bounds: int) -> Schema:
    """The schema of a list."""
    return {"type": "array", "items": items, **bounds}


TOOL_NAME: Final[Schema] = {"type": "string", "pattern": f"^{_TOOL_NAME.pattern}$"}
_TEXT_OR_PARTS: Final[Schema] = {
    "anyOf": [TEXT, list_of(an_object(("type", "text"), type={"const": "text"}, text=TEXT), maxItems=MAX_PARTS)]
}
_CALLS: Final = nullable(
    list_of(an_object(("function",), function=an_object(("name",), name=TEXT)), maxItems=MAX_CALLS)
)
_MESSAGE: Final[Schema] = {
    "anyOf": [
        an_object(("role", "content"), role={"enum": list(ROLES)}, content=_TEXT_OR_PARTS, tool_calls=_CALLS),
        an_object(("role",), role={"const": "assistant"}, content=nullable(_TEXT_OR_PARTS), tool_calls=_CALLS),
    ]
}
MESSAGES: Final = list_of(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
_FUNCTION: Final = an_object(("name",), name=TOOL_NAME, parameters=nullable({"type": "object"}))
TOOLS: Final = list_of(
    an_object(("type", "function"), type={"const": "function"}, function=_FUNCTION), maxItems=MAX_TOOLS
)
TOOL_CHOICE: Final[Schema] = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        an_object(("type", "function"), type={"const": "function"}, function=an_object(("name",), name=TOOL_NAME)),
    ]
}
RESPONSE_FORMAT: Final[Schema] = {
    "anyOf": [
        an_object(("type",), type={"enum": ["text", "json_object"]}),
        an_object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=an_object(("schema",), schema={"type": "object"}),
        ),
    ]
}
TEMPLATE_KWARGS: Final = an_object((), **{name: {"not": {}} for name in _SET_BY_REQUEST})
STREAM_OPTIONS: Final = an_object((), include_usage=nullable(BOOLEAN), continuous_usage_stats=nullable(BOOLEAN))


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """JSON that the answer must be. `schema` is a JSON schema."""

    schema: Any


def check_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """A conversation: at least one message, text only."""
    if not isinstance(value, list) or not value:
        raise bad(name, value, "a list of at least one message")
    check_count(name, value, MAX_MESSAGES, "messages")
    for i, message in enumerate(value):
        _check_message(f"{name}[{i}]", message)
    return value


def check_tools(name: str, value: Any) -> list[dict[str, Any]]:
    """OpenAI's function tools."""
    if not isinstance(value, list):
        raise bad(name, value, "a list of tools")
    check_count(name, value, MAX_TOOLS, "tools")
    for i, tool in enumerate(value):
        function = check_object(f"{name}[{i}]", tool).get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad(f"{name}[{i}]", tool, '{"type": "function", "function": {...}}')
        check_tool_name(f"{name}[{i}].function.name", function.get("name"))
        if function.get("parameters") is not None:
            check_object(f"{name}[{i}].function.parameters", function["parameters"])
    return value


def check_tool_name(name: str, value: Any) -> str:
    """The name of a tool."""
    if not isinstance(value, str) or not _TOOL_NAME.fullmatch(value):
        raise bad(name, value, "a name of 1 to 128 letters, digits, or any of _ . : / -")
    return value


def check_tool_choice(name: str, value: Any) -> str | dict[str, str]:
    """Who decides whether a tool is called: auto, none, required, or {"name": the one to call}."""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        return {"name": check_tool_name(f"{name}.function.name", value["function"].get("name"))}
    raise bad(name, value, '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}')


def check_response_format(name: str, value: Any) -> ResponseFormat | None:
    """Text, any JSON object, or what a JSON schema says."""
    kind = check_object(name, value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat({"type": "object"})
    if kind != "json_schema":
        raise bad(f"{name}.type", kind, "one of text, json_object, json_schema")
    wrapped = check_object(f"{name}.json_schema", value.get("json_schema"))
    return ResponseFormat(check_object(f"{name}.json_schema.schema", wrapped.get("schema")))


def check_template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Further variables of the chat template."""
    kwargs = check_object(name, value)
    for key in _SET_BY_REQUEST:
        if key in kwargs:
            raise BadRequest(f"{name}.{key} cannot be set; the request itself does", param=f"{name}.{key}")
    return kwargs


def check_stream_options(name: str, value: Any) -> tuple[bool, bool]:
    """include_usage, continuous_usage_stats."""
    options = check_object(name, value)
    names = ("include_usage", "continuous_usage_stats")
    usage, continuous = (check_flag(f"{name}.{key}", _or_false(options.get(key))) for key in names)
    return usage, usage and continuous


def _or_false(value: Any) -> Any:
    return False if value is None else value


def _check_message(name: str, message: Any) -> None:
    role = check_object(name, message).get("role")
    if role not in ROLES:
        raise bad(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        check_count(f"{name}.content", content, MAX_PARTS, "parts")
        for i, part in enumerate(content):
            if check_object(f"{name}.content[{i}]", part).get("type") != "text":
                raise bad(f"{name}.content[{i}].type", part.get("type"), "'text'; nothing else is supported")
            check_string(f"{name}.content[{i}].text", part.get("text"))
    elif content is not None or role != "assistant":
        check_string(f"{name}.content", content)
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad(f"{name}.tool_calls", calls, "a list")
    check_count(f"{name}.tool_calls", calls, MAX_CALLS, "calls")
    for i, call in enumerate(calls):
        at = f"{name}.tool_calls[{i}]"
        function = check_object(f"{at}.function", check_object(at, call).get("function"))
        check_string(f"{at}.function.name", function.get("name"))
