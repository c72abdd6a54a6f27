"""The fields of /v1/chat/completions and /v1/completions. How tables work is told in fields.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from replica.api.fields import (
    MAX_INT32,
    Check,
    Field,
    Schema,
    Table,
    bad,
    check_count,
    check_object,
    flag,
    number,
    string,
    whole,
)
from replica.api.message_fields import (
    ROLES,
    check_messages,
    check_response_format,
    check_stream_options,
    check_template_kwargs,
    check_tool_choice,
    check_tools,
)
from replica.errors import BadRequest

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 1024
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_BIASES: Final = 1024
MAX_PROMPTS: Final = 16384
MAX_PROMPT_TOKENS: Final = 2**20


def check_stop(name: str, value: Any) -> tuple[str, ...]:
    """A stop string or a list of them; empty ones stop nothing."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad(name, value, "a string or a list of strings")
    check_count(name, stops, MAX_STOP_STRINGS, "strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise bad(name, value, "a string or a list of strings")
        if len(stop) > MAX_STOP_CHARS:
            raise BadRequest(f"{name} has a string of {len(stop)} characters, limit is {MAX_STOP_CHARS}", param=name)
    return tuple(stop for stop in stops if stop)


def check_stop_token_ids(name: str, value: Any) -> frozenset[int]:
    """A list of token ids."""
    if not isinstance(value, list):
        raise bad(name, value, "a list of token ids")
    check_count(name, value, MAX_STOP_TOKENS, "ids")
    if not all(type(i) is int and 0 <= i <= MAX_INT32 for i in value):
        raise bad(name, value, "a list of token ids")
    return frozenset(value)


def check_logit_bias(name: str, value: Any) -> dict[int, float]:
    """Token ids, as JSON's keys are: strings, and from -100 to 100 for each."""
    biases = check_object(name, value)
    check_count(name, biases, MAX_BIASES, "tokens")
    check = number(-100, 100).check
    made: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad(name, key, "an object whose keys are token ids")
        made[int(key)] = check(f"{name}.{key}", bias)
    return made


def check_prompts(name: str, value: Any) -> list[str | list[int]]:
    """One prompt (a text or token ids) or a list of them."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    many = [value] if is_one else value
    if isinstance(many, list):
        check_count(name, many, MAX_PROMPTS, "prompts")
        if is_one and isinstance(value, list):
            check_count(name, value, MAX_PROMPT_TOKENS, "tokens")
    if not isinstance(many, list) or not many or not all(map(_is_prompt, many)):
        raise bad(name, value, "a text, a list of token ids, or a list of one or more of either")
    return many


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value))


def _checked(check: Check, default: Any, **schema: Any) -> Field:
    return Field(check, default, schema)


_TEXT: Final[Schema] = {"type": "string"}
_TOKENS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_PARTS: Final[Schema] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
    },
}
MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": [_TEXT, _TEXT_PARTS]}},
    "required": ["role", "content"],
}
_FUNCTION: Final[Schema] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
        "description": _TEXT,
        "parameters": {"type": "object"},
    },
    "required": ["name"],
}
TOOL: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}

SHARED_FIELDS: Final[Mapping[str, Field]] = {
    "model": string(),
    "stream": flag(False),
    "stream_options": _checked(
        check_stream_options,
        (False, False),
        type="object",
        properties={"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
    ),
    "max_tokens": whole(1, MAX_INT32),
    "max_completion_tokens": whole(1, MAX_INT32),
    "min_tokens": whole(0, MAX_INT32, 0),
    "n": whole(1, MAX_CHOICES, 1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole(-1, MAX_INT32),
    "min_p": number(0, 1),
    "seed": whole(-(2**63), 2**64 - 1),
    "presence_penalty": number(-2, 2, 0.0),
    "frequency_penalty": number(-2, 2, 0.0),
    "repetition_penalty": number(0.01, 100),
    "logit_bias": _checked(
        check_logit_bias, {}, type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}
    ),
    "stop": _checked(
        check_stop, (), anyOf=[_TEXT, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS}]
    ),
    "stop_token_ids": _checked(check_stop_token_ids, frozenset(), **_TOKENS, maxItems=MAX_STOP_TOKENS),
    "include_stop_str_in_output": flag(False),
    "ignore_eos": flag(False),
    "skip_special_tokens": flag(True),
    "return_token_ids": flag(False),
}
_NOT_SERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "bad_words": ([],),
    "length_penalty": (1,),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_IGNORED: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "request_id",
        "session_id",
        "priority",
    }
)
# What decides how a conversation becomes a prompt; /tokenize has these, too.
CONVERSATION_FIELDS: Final[Mapping[str, Field]] = {
    "messages": _checked(check_messages, None, type="array", items=MESSAGE, minItems=1),
    "tools": _checked(check_tools, None, type="array", items=TOOL, maxItems=256),
    "chat_template_kwargs": _checked(check_template_kwargs, {}, type="object", maxProperties=0),
    "add_generation_prompt": flag(None),
    "continue_final_message": flag(False),
}
CHAT: Final = Table(
    served={
        **SHARED_FIELDS,
        **CONVERSATION_FIELDS,
        "tool_choice": _checked(check_tool_choice, "auto", enum=["auto", "none"]),
        "parallel_tool_calls": flag(True),
        "response_format": _checked(
            check_response_format,
            None,
            type="object",
            properties={"type": {"enum": ["text", "json_object"]}},
            required=["type"],
        ),
        "logprobs": flag(False),
        "top_logprobs": whole(0, MAX_TOP_LOGPROBS, 0),
        "reasoning_effort": string(),
    },
    not_served={**_NOT_SERVED, "echo": (False,)},
    ignored=_IGNORED,
    required="messages",
)
COMPLETION: Final = Table(
    served={
        **SHARED_FIELDS,
        "prompt": _checked(
            check_prompts,
            None,
            anyOf=[
                {"type": "string", "minLength": 1},
                {**_TOKENS, "minItems": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 4},
                {"type": "array", "items": {**_TOKENS, "minItems": 1}, "minItems": 1, "maxItems": 4},
            ],
        ),
        "echo": flag(False),
        "logprobs": whole(0, MAX_TOP_LOGPROBS),
    },
    not_served={**_NOT_SERVED, "response_format": ({"type": "text"},), "top_logprobs": (0,)},
    ignored=_IGNORED,
    required="prompt",
)
