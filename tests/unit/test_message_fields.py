"""Messages, tools, the choice of a tool and the format of the answer are refused by the place that is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from replica.errors import BadRequest
from tests.unit.openai_requests import MESSAGES, TOOL, chat


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*MESSAGES, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([*MESSAGES, {"role": "assistant", "tool_calls": [1]}], "messages[1].tool_calls[0]"),
        ([*MESSAGES, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        (
            [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[1].tool_calls[0].function.name",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_message_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([1], "tools[0]"),
        ([{"type": "function"}], "tools[0]"),
        ([{"type": "retrieval", "function": {"name": "f"}}], "tools[0]"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 'a"b'}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([TOOL] * 300, "tools"),
    ],
    ids=str,
)
def test_wrong_tool_is_refused_by_its_place(tools: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(tools=tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": 1}, 'tool_choice is 1, must be "auto", "none", "required"'),
        ({"tool_choice": "any"}, "tool_choice is 'any', must be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is {'type': 'function'}, must be"),
        ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice names 'g', which is none of the tools",
        ),
    ],
    ids=str,
)
def test_choice_of_no_tool_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)) as caught:
        chat(**fields)
    assert str(caught.value.param).startswith("tool_choice")


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema.schema"),
    ],
    ids=str,
)
def test_wrong_response_format_is_refused_by_its_place(response_format: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(response_format=response_format)
    assert caught.value.param == param


def test_variables_that_the_request_itself_sets_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.messages"):
        chat(chat_template_kwargs={"messages": []})
