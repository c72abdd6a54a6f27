"""Fields of a wrong type, size or value are refused by name; unknown ones are accepted, and none is in two places."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Final

import pytest

from replica.api.fields import FieldReader, Table, preview
from replica.api.request_fields import CHAT, COMPLETION
from replica.errors import BadRequest
from tests.unit.openai_requests import MESSAGES, chat, completion, parse_chat

NAN: Final = float("nan")
INFINITE: Final = float("inf")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INFINITE}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": NAN}, "max_tokens"),
        ({"max_tokens": False}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": "6"}, "max_completion_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"continuous_usage_stats": "x"}}, "stream_options.continuous_usage_stats"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": NAN}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": NAN}}, "logit_bias.5"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"model": 3}, "model"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(BadRequest) as caught:
            parse(**fields)
        assert caught.value.param == param
        assert str(caught.value).startswith(param)
        assert len(str(caught.value)) < 300


def test_error_names_the_value_and_the_limit() -> None:
    with pytest.raises(BadRequest, match=r"temperature is 2\.5, must be a number from 0 to 2"):
        chat(temperature=2.5)
    with pytest.raises(BadRequest, match="max_tokens is 0, must be a whole number of at least 1"):
        chat(max_tokens=0)


NOT_NEUTRAL: Final[dict[str, Any]] = {
    "best_of": 2,
    "suffix": "x",
    "function_call": {"name": "f"},
    "echo": True,
    "response_format": {"type": "json_object"},
    "top_logprobs": 2,
}


@pytest.mark.parametrize(("parse", "table"), [(chat, CHAT), (completion, COMPLETION)], ids=["chat", "completion"])
def test_field_that_would_change_the_answer_is_refused_if_it_is_not_served(parse: Any, table: Table) -> None:
    for name, neutrals in table.not_served.items():
        for neutral in (None, *neutrals):
            parse(**{name: neutral})
        with pytest.raises(BadRequest, match=f"^{name} is not supported") as caught:
            parse(**{name: NOT_NEUTRAL.get(name, "anything")})
        assert caught.value.param == name


def test_flag_is_not_taken_for_a_neutral_number() -> None:
    with pytest.raises(BadRequest, match="best_of is not supported; leave it out or send 1"):
        chat(best_of=True)


@pytest.mark.parametrize("table", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_each_field_is_in_one_place(table: Table) -> None:
    served, not_served = set(table.served), set(table.not_served)
    assert not served & not_served and not served & table.ignored and not not_served & table.ignored


def test_unknown_field_is_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = FieldReader()
    body = json.dumps({"messages": MESSAGES, "no_such_field": 1, "user": "u", "metadata": {}}).encode()
    with caplog.at_level(logging.INFO):
        parse_chat(reader, body)
        parse_chat(reader, body)
    assert [record.getMessage() for record in caplog.records] == ["unknown request field ignored name='no_such_field'"]


def test_names_of_unknown_fields_are_not_remembered_without_bound(caplog: pytest.LogCaptureFixture) -> None:
    reader = FieldReader()
    with caplog.at_level(logging.INFO):
        reader.read({"messages": MESSAGES, **{f"field {i}": 1 for i in range(10_000)}}, CHAT)
    assert len(caplog.records) == 256


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe{}", b'{"messages": }', b"[" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}", b"\x00"],
    ids=lambda body: repr(body[:12]),
)
def test_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        parse_chat(FieldReader(), body)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null"])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="must be an object"):
        parse_chat(FieldReader(), body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [None] * 2000}, "stop_token_ids has 2000 ids, limit is 1024"),
        ({"messages": [None] * 20_000}, "messages has 20000 messages, limit is 16384"),
        ({"messages": [{"role": "user", "content": [None] * 5000}]}, "content has 5000 parts, limit is 4096"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [None] * 2000}]},
            "messages[0].tool_calls has 2000 calls, limit is 1024",
        ),
        ({"tools": [None] * 300}, "tools has 300 tools, limit is 256"),
        ({"stop": [None] * 100}, "stop has 100 strings, limit is 64"),
    ],
    ids=str,
)
def test_elements_are_counted_before_they_are_looked_at(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        chat(**fields)


@pytest.mark.parametrize("prompt", [[None] * 20_000, [1] + [None] * 2**20], ids=["prompts", "tokens"])
def test_prompts_are_counted_before_they_are_looked_at(prompt: list[Any]) -> None:
    with pytest.raises(BadRequest, match=r"prompt has \d+ (prompts|tokens), limit is"):
        completion(prompt=prompt)


def test_an_error_shows_the_first_of_a_wrong_value_and_looks_at_nothing_else() -> None:
    class Unseen:
        def __repr__(self) -> str:
            raise AssertionError("it was looked at")

    many = [0] * 8 + [Unseen()]
    assert preview(many) == "[0, 0, 0, 0, 0, 0, 0, 0, ...]"
    assert preview({str(i): many if i < 1 else 1 for i in range(9)}).startswith("{'0': [0, 0,")
    assert preview([[[[Unseen()]]]]) == "[[[...]]]"
    assert preview("x" * 10**6) == repr("x" * 100) + "..."
    assert preview({"a": [1, "b", None]}) == repr({"a": [1, "b", None]})
