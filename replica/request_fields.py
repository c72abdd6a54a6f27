"""The fields of the OpenAI API as tables: how each is checked, and what happens to those that are not served.

A field is in exactly one place: in a table of fields that are served, in NOT_SERVED (it would change the answer, so
anything but a value that changes nothing is refused), or in IGNORED (it changes no answer). A field in none of them is
accepted and logged once, since clients send fields of other servers. `null` is the same as leaving the field out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from replica.errors import BadRequest

logger = logging.getLogger(__name__)

Check = Callable[[str, Any], Any]  # (name, value) -> the value to use; raises BadRequest

MAX_INT32: Final = 2**31 - 1
MAX_STOP_TOKENS: Final = 1024
MAX_UNKNOWN_LOGGED: Final = 256  # names of unknown fields that are remembered, and so logged once
ROLES: Final = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Field:
    """A served field: its check, and the value when the client sends none."""

    check: Check
    default: Any = None


def bad(name: str, value: Any, expected: str) -> BadRequest:
    """The error for a field with a wrong value."""
    shown = repr(value)
    if len(shown) > 100:
        shown = shown[:100] + "..."
    return BadRequest(f"{name} is {shown}, must be {expected}", param=name)


def number(low: float, high: float) -> Check:
    """A finite number from `low` to `high`."""

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # false for NaN, too
            raise bad(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def whole(low: int, high: int) -> Check:
    """A whole number from `low` to `high`; 3.0 is one."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            limit = f"of at least {low}" if high == MAX_INT32 else f"from {low} to {high}"
            raise bad(name, value, f"a whole number {limit}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise bad(name, value, "true or false")
    return value


def string(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise bad(name, value, "a string")
    return value


def object_(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise bad(name, value, "an object")
    return value


def stop_token_ids(name: str, value: Any) -> frozenset[int]:
    """A list of token ids."""
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i <= MAX_INT32 for i in value):
        raise bad(name, value, "a list of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise BadRequest(f"{name} has {len(value)} ids, limit is {MAX_STOP_TOKENS}", param=name)
    return frozenset(value)


def include_usage(name: str, value: Any) -> bool:
    """`stream_options`, of which one option is served."""
    options = object_(name, value)
    if options.get("continuous_usage_stats"):
        raise BadRequest(f"{name}.continuous_usage_stats is not supported", param=f"{name}.continuous_usage_stats")
    return flag(f"{name}.include_usage", options.get("include_usage") or False)


def tool_choice(name: str, value: Any) -> str:
    """Who decides whether a tool is called."""
    if value not in ("auto", "none"):
        raise bad(name, value, "'auto' or 'none'; required and named tools are not supported")
    return str(value)


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Further variables of the chat template."""
    kwargs = object_(name, value)
    for key in ("messages", "tools", "documents", "add_generation_prompt"):
        if key in kwargs:
            raise BadRequest(f"{name}.{key} cannot be set; the request itself does", param=f"{name}.{key}")
    return kwargs


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """OpenAI's function tools."""
    if not isinstance(value, list):
        raise bad(name, value, "a list of tools")
    for i, tool in enumerate(value):
        function = object_(f"{name}[{i}]", tool).get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad(f"{name}[{i}]", tool, '{"type": "function", "function": {...}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad(f"{name}[{i}].function.name", function.get("name"), "a name")
    return value


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """A conversation: at least one message, text only."""
    if not isinstance(value, list) or not value:
        raise bad(name, value, "a list of at least one message")
    for i, message in enumerate(value):
        _check_message(f"{name}[{i}]", message)
    return value


def prompts(name: str, value: Any) -> list[str | list[int]]:
    """One prompt (a text or token ids) or a list of them."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    many = [value] if is_one else value
    if not isinstance(many, list) or not many or not all(map(_is_prompt, many)):
        raise bad(name, value, "a text, a list of token ids, or a list of one or more of either")
    return many


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value))


def _check_message(name: str, message: Any) -> None:
    role = object_(name, message).get("role")
    if role not in ROLES:
        raise bad(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            if object_(f"{name}.content[{i}]", part).get("type") != "text":
                raise bad(f"{name}.content[{i}].type", part.get("type"), "'text'; nothing else is supported")
            string(f"{name}.content[{i}].text", part.get("text"))
    elif content is not None or role != "assistant":
        string(f"{name}.content", content)
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad(f"{name}.tool_calls", calls, "a list")
    for i, call in enumerate(calls):
        at = f"{name}.tool_calls[{i}]"
        function = object_(f"{at}.function", object_(at, call).get("function"))
        string(f"{at}.function.name", function.get("name"))


SHARED_FIELDS: Final[Mapping[str, Field]] = {
    "model": Field(string),
    "stream": Field(flag, False),
    "stream_options": Field(include_usage, False),
    "max_tokens": Field(whole(1, MAX_INT32)),
    "max_completion_tokens": Field(whole(1, MAX_INT32)),
    "temperature": Field(number(0, 2)),
    "top_p": Field(number(0, 1)),
    "top_k": Field(whole(-1, MAX_INT32)),
    "min_p": Field(number(0, 1)),
    "seed": Field(whole(-(2**63), 2**64 - 1)),
    "stop_token_ids": Field(stop_token_ids, frozenset()),
    "ignore_eos": Field(flag, False),
    "skip_special_tokens": Field(flag, True),
    "return_token_ids": Field(flag, False),
}
CHAT_FIELDS: Final[Mapping[str, Field]] = {
    **SHARED_FIELDS,
    "messages": Field(messages),
    "tools": Field(tools),
    "tool_choice": Field(tool_choice, "auto"),
    "chat_template_kwargs": Field(template_kwargs, {}),
}
COMPLETION_FIELDS: Final[Mapping[str, Field]] = {**SHARED_FIELDS, "prompt": Field(prompts)}

# Name -> the values that change nothing.
NOT_SERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "stop": ("", []),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
IGNORED: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "reasoning_effort",
        "verbosity",
        "request_id",
        "session_id",
        "priority",
    }
)


class FieldReader:
    """Reads request bodies by table. Remembers which unknown fields it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, body: Any, table: Mapping[str, Field]) -> dict[str, Any]:
        """The value of each field of the table. Raises BadRequest."""
        if not isinstance(body, dict):
            raise BadRequest(f"the body is a JSON {type(body).__name__}, must be an object")
        values = {name: field.default for name, field in table.items()}
        for name, value in body.items():
            if value is None or name in IGNORED:
                continue
            if name in table:
                values[name] = table[name].check(name, value)
            elif name in NOT_SERVED:
                _check_neutral(name, value)
            else:
                self._log_unknown(name)
        return values

    def _log_unknown(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_UNKNOWN_LOGGED:
            self._logged.add(name)
            logger.info("unknown request field ignored name=%.64r", name)


def _check_neutral(name: str, value: Any) -> None:
    for neutral in NOT_SERVED[name]:
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    if not NOT_SERVED[name]:
        raise BadRequest(f"{name} is not supported; leave it out", param=name)
    allowed = " or ".join(repr(neutral) for neutral in NOT_SERVED[name])
    raise BadRequest(f"{name} is not supported; leave it out or send {allowed}", param=name)
