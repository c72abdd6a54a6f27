"""/v1/responses, /v1/messages and the token routes: their shapes, and how their requests become chats."""

from __future__ import annotations

import logging
from typing import Any, Final

import pytest
from aiohttp import ClientSession

from replica.api.fields import FieldReader
from replica.api.messages_request import chat_of_messages
from replica.api.responses_request import chat_of_response
from replica.errors import BadRequest
from tests.protocol.fake_loop import MODEL, FakeLoop, replica
from tests.protocol.http_probe import ANSWER, CHAT, post

CALL: Final = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
USER: Final = {"role": "user", "content": "hi"}


async def test_response_has_openais_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        body = {"model": "tiny-moe", "input": "hi", "metadata": {"k": "v"}}
        status, answer = await post(session, url + "/v1/responses", body, headers={"X-Request-Id": "r"})
    assert status == 200 and answer["object"] == "response" and answer["id"] == "resp_r"
    assert (answer["status"], answer["incomplete_details"], answer["metadata"]) == ("completed", None, {"k": "v"})
    assert answer["output"] == [
        {
            "id": "rs_r_0",
            "status": "completed",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "id": "msg_r_1",
            "status": "completed",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}],
        },
    ]
    prompt = len(loop.submitted[0].prompt_ids)
    assert answer["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(loop.script),
        "output_tokens_details": {"reasoning_tokens": loop.script.index(635)},  # `</think>`
        "total_tokens": prompt + len(loop.script),
    }


async def test_response_that_is_cut_off_is_incomplete(session: ClientSession) -> None:
    async with replica(FakeLoop("abc")) as url:
        _, answer = await post(session, url + "/v1/responses", {"input": "hi", "max_output_tokens": 2})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_message_has_anthropics_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        body = {"model": "tiny-moe", "messages": [USER], "max_tokens": 100}
        status, answer = await post(session, url + "/v1/messages", body, headers={"X-Request-Id": "r"})
    assert status == 200
    assert answer == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny-moe",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": ANSWER},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(loop.submitted[0].prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(loop.script),
        },
    }


async def test_message_that_uses_a_tool_says_so(session: ClientSession) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    async with replica(FakeLoop(CALL)) as url:
        body = {"messages": [USER], "max_tokens": 100, "tools": [tool]}
        _, answer = await post(session, url + "/v1/messages", body, headers={"X-Request-Id": "r"})
        _, chat = await post(
            session,
            url + CHAT,
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
            headers={"X-Request-Id": "r"},
        )
    call = chat["choices"][0]["message"]["tool_calls"][0]
    assert answer["content"] == [{"type": "tool_use", "id": call["id"], "name": "f", "input": {"x": 1}}]
    assert answer["stop_reason"] == "tool_use" and chat["choices"][0]["finish_reason"] == "tool_calls"
    assert chat["choices"][0]["message"]["content"] is None


async def test_errors_of_messages_have_anthropics_shape_and_its_key_is_read(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        status, answer = await post(session, url + "/v1/messages", {"messages": [USER]})
        assert (status, answer) == (
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens is missing"}},
        )
        status, answer = await post(session, url + "/v1/messages", {"model": "x", "messages": [USER], "max_tokens": 1})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")


async def test_tokens_are_counted_as_they_are_charged(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        _, counted = await post(session, url + "/v1/messages/count_tokens", {"messages": [USER], "system": "s"})
        body = {"messages": [USER], "system": "s", "max_tokens": 5}
        _, answer = await post(session, url + "/v1/messages", body)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] == len(loop.submitted[0].prompt_ids)


async def test_texts_and_chats_are_tokenized_and_back(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        _, text = await post(session, url + "/tokenize", {"prompt": "a \N{ROCKET}", "return_token_strs": True})
        assert text["count"] == len(text["tokens"]) == len(text["token_strs"]) and text["max_model_len"] == 4096
        assert await post(session, url + "/detokenize", {"tokens": text["tokens"]}) == (200, {"prompt": "a \N{ROCKET}"})
        _, chat = await post(session, url + "/tokenize", {"messages": [USER]})
        await post(session, url + CHAT, {"messages": [USER]})
        assert chat["tokens"] == loop.submitted[0].prompt_ids
        for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {"tokens": [640]})):
            status, answer = await post(session, url + path, body)
            assert status == 400 and answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hi"}, {"messages": [USER]}),
        ({"input": [USER], "instructions": "i"}, {"messages": [{"role": "system", "content": "i"}, USER]}),
        ({"input": [{**USER, "content": [{"type": "input_text", "text": "hi"}]}]}, {"messages": [USER]}),
        (
            {
                "input": [
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "r"},
                ]
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "reasoning_content": "hm",
                        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "r"},
                ]
            },
        ),
        ({"input": "hi", "max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"input": "hi", "reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        (
            {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        ),
        (
            {"input": "hi", "tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        ),
    ],
    ids=str,
)
def test_response_becomes_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    made = chat_of_response(FieldReader(), body)
    assert {name: made[name] for name in chat} == chat


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {"messages": [USER], "max_tokens": 5}),
        ({"system": [{"type": "text", "text": "s"}]}, {"messages": [{"role": "system", "content": "s"}, USER]}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        (
            {"messages": [USER, {"role": "assistant", "content": "I "}]},
            {"messages": [USER, {"role": "assistant", "content": "I "}], "continue_final_message": True},
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": ""},
                            {"type": "text", "text": "so"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
                            {"type": "text", "text": "and"},
                        ],
                    },
                ]
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "so",
                        "reasoning_content": "hm",
                        "tool_calls": [
                            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "r"},
                    {"role": "user", "content": "and"},
                ]
            },
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False},
        ),
    ],
    ids=str,
)
def test_message_becomes_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    made = chat_of_messages(FieldReader(), {"messages": [USER], "max_tokens": 5, **body})
    assert {name: made[name] for name in chat} == chat


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
    ids=str,
)
def test_response_that_cannot_be_told_in_a_chat_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_of_response(FieldReader(), body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ],
    ids=str,
)
def test_message_that_cannot_be_told_in_a_chat_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_of_messages(FieldReader(), {"messages": [USER], "max_tokens": 5, **body})
    assert caught.value.param == param


def test_unknown_fields_of_both_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = FieldReader()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            chat_of_response(reader, {"input": "hi", "odd": 1, "store": True})
            chat_of_messages(reader, {"messages": [USER], "max_tokens": 5, "odder": 1, "metadata": {}})
    assert [record.getMessage() for record in caplog.records] == [
        "unknown request field ignored name='odd'",
        "unknown request field ignored name='odder'",
    ]


def test_vocabulary_of_the_demo_model_has_the_tags_that_these_tests_name() -> None:
    assert MODEL.tokenizer.token_id("</think>") == 635
