"""The fields of /v1/chat/completions and /v1/completions. How tables work is told in fields.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from replica.api.fields import (
    MAX_INT32,
    TEXT,
    Field,
    Schema,
    Table,
    bad,
    check_count,
    check_object,
    checked,
    flag,
    number,
    string,
    whole,
)
from replica.api.message_fields import (
    MESSAGES,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    TEMPLATE_KWARGS,
    TOOL_CHOICE,
    TOOLS,
    check_messages,
    check_response_format,
    check_stream_options,
    check_template_kwargs,
    check_tool_choice,
    check_tools,
    list_of,
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
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(type(i) is int for i in value))


_STOP: Final[Schema] = {"type": "string", "maxLength": MAX_STOP_CHARS}
_PROMPT_TOKENS: Final = list_of({"type": "integer"}, minItems=1, maxItems=MAX_PROMPT_TOKENS)

SHARED_FIELDS: Final[Mapping[str, Field]] = {
    "model": string(),
    "stream": flag(False),
    "stream_options": checked(check_stream_options, (False, False), **STREAM_OPTIONS),
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
    "logit_bias": checked(
        check_logit_bias,
        {},
        type="object",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MAX_BIASES,
    ),
    "stop": checked(check_stop, (), anyOf=[_STOP, list_of(_STOP, maxItems=MAX_STOP_STRINGS)]),
    "stop_token_ids": checked(
        check_stop_token_ids,
        frozenset(),
        **list_of({"type": "integer", "minimum": 0, "maximum": MAX_INT32}, maxItems=MAX_STOP_TOKENS),
    ),
    "include_stop_str_in_output": flag(False),
    "ignore_eos": flag(False),
    "skip_special_tokens": flag(True),
    "return_token_ids": flag(False),
    "priority": whole(-(2**31), MAX_INT32),
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
    }
)
# What decides how a conversation becomes a prompt; /tokenize has these, too.
CONVERSATION_FIELDS: Final[Mapping[str, Field]] = {
    "messages": checked(check_messages, None, **MESSAGES),
    "tools": checked(check_tools, None, **TOOLS),
    "chat_template_kwargs": checked(check_template_kwargs, {}, **TEMPLATE_KWARGS),
    "add_generation_prompt": flag(None),
    "continue_final_message": flag(False),
}
CHAT: Final = Table(
    served={
        **SHARED_FIELDS,
        **CONVERSATION_FIELDS,
        "tool_choice": checked(check_tool_choice, "auto", **TOOL_CHOICE),
        "parallel_tool_calls": flag(True),
        "response_format": checked(check_response_format, None, **RESPONSE_FORMAT),
        "logprobs": flag(False),
        "top_logprobs": whole(0, MAX_TOP_LOGPROBS, 0),
        "reasoning_effort": string(),
    },
    not_served={**_NOT_SERVED, "echo": (False,)},
    ignored=_IGNORED,
    required=("messages",),
)
COMPLETION: Final = Table(
    served={
        **SHARED_FIELDS,
        "prompt": checked(
            check_prompts,
            None,
            anyOf=[
                TEXT,
                _PROMPT_TOKENS,
                list_of({"anyOf": [TEXT, _PROMPT_TOKENS]}, minItems=1, maxItems=MAX_PROMPTS),
            ],
        ),
        "echo": flag(False),
        "logprobs": whole(0, MAX_TOP_LOGPROBS),
    },
    not_served={**_NOT_SERVED, "response_format": ({"type": "text"},), "top_logprobs": (0,)},
    ignored=_IGNORED,
    required=("prompt",),
)
