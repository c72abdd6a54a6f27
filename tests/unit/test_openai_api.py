"""OpenAI requests become prompts and sampling parameters, or a 400 that names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any, Final

import pytest

from replica.api.fields import FieldReader, Table, preview
from replica.api.generation_config import GenerationDefaults
from replica.api.openai_api import (
    ChatRequest,
    CompletionRequest,
    Options,
    chat_prompt,
    check_model,
    check_num_choices,
    completion_prompts,
    derived_seed,
    output_tokens,
    parse_completion,
    parse_json,
    read_chat,
    sampling_params,
)
from replica.api.request_fields import CHAT, COMPLETION
from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.errors import BadRequest, ConfigError, ContextTooLong, UnknownModel
from replica.model_config import ModelConfig
from replica.request import SamplingParams
from tests.commands import DEMO_MODEL

CONFIG: Final = ReplicaConfig(model=DEMO_MODEL)
MODEL: Final = ServedModel.load(CONFIG, ModelConfig.load(DEMO_MODEL))
MESSAGES: Final = [{"role": "user", "content": "What is 1 + 2?"}]
TOOL: Final = {"type": "function", "function": {"name": "get_weather"}}
NAN: Final = float("nan")
INFINITE: Final = float("inf")


def parse_chat(reader: FieldReader, body: bytes) -> ChatRequest:
    return read_chat(reader, parse_json(body), body_bytes=len(body))


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(FieldReader(), json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(FieldReader(), json.dumps({"prompt": "hi", **fields}).encode(), max_prompts=4)


def params(options: Options, *, model: ServedModel = MODEL, prompt_tokens: int = 10) -> SamplingParams:
    return sampling_params(options, model, request_id="r1", prompt_tokens=prompt_tokens, max_cached=100_000)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 1}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_p": 0}, "top_p", 1e-6),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 7}, "seed", 7),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": None}, "seed", derived_seed("r1")),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 6}, "max_tokens", 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", 6),
        ({"max_tokens": 7, "max_completion_tokens": 6}, "max_tokens", 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, "max_tokens", 5),
        ({"max_tokens": 8.0}, "max_tokens", 8),
        ({"max_tokens": 100_000}, "max_tokens", 4086),
        ({}, "max_tokens", 4086),
        ({"stop_token_ids": [5]}, "stop_token_ids", MODEL.end_token_ids | {5}),
        ({"stop_token_ids": [5], "ignore_eos": True}, "stop_token_ids", {5}),
        ({"ignore_eos": True}, "stop_token_ids", frozenset()),
        ({"stop_token_ids": [5, 640, 2**31 - 1], "ignore_eos": True}, "stop_token_ids", {5}),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"presence_penalty": -1}, "presence_penalty", -1.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({}, "repetition_penalty", 1.0),
        ({"logit_bias": {"5": 1, "639": -100}}, "logit_bias", ((5, 1.0), (639, -100.0))),
        ({}, "logprobs", None),
        ({}, "prompt_logprobs", None),
        ({}, "stop_token_ids", MODEL.end_token_ids),
    ],
    ids=str,
)
def test_field_becomes_a_sampling_parameter(fields: dict[str, Any], name: str, value: Any) -> None:
    for options in (chat(**fields).options, completion(**fields).options):
        assert getattr(params(options), name) == value


def test_defaults_come_from_the_checkpoint() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05)
    model = dataclasses.replace(MODEL, defaults=defaults)
    made = params(chat().options, model=model)
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0.6, 20, 0.95, 0.05)
    made = params(chat(temperature=0, top_k=0, top_p=1, min_p=0).options, model=model)
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0.0, 0, 1.0, 0.0)
    assert params(chat().options).temperature == 0.0  # the demo model does not sample


def test_request_without_a_seed_gets_one_from_its_id() -> None:
    assert derived_seed("a") == derived_seed("a") != derived_seed("b")
    assert 0 <= derived_seed("a") < 2**64


@pytest.mark.parametrize(
    ("asked", "prompt", "context", "cached", "expected"),
    [
        (None, 10, 100, 1000, 90),
        (20, 10, 100, 1000, 20),
        (95, 10, 100, 1000, 90),
        (95, 10, 100, 30, 30),
        (1, 99, 100, 1, 1),
    ],
)
def test_answer_is_bounded_by_what_is_left(
    asked: int | None, prompt: int, context: int, cached: int, expected: int
) -> None:
    options = chat(max_tokens=asked).options
    assert output_tokens(options, prompt_tokens=prompt, max_model_len=context, max_cached=cached) == expected


def test_prompt_that_leaves_no_room_names_both_lengths_and_the_flag() -> None:
    with pytest.raises(ContextTooLong, match=r"100 tokens, limit is 99.*context of 100 tokens \(--max-model-len\)"):
        output_tokens(chat().options, prompt_tokens=100, max_model_len=100, max_cached=1000)
    with pytest.raises(ContextTooLong, match=r"80 tokens, limit is 63.*KV cache \(--kv-cache-gb\)"):
        output_tokens(chat().options, prompt_tokens=80, max_model_len=100, max_cached=-16)


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


def test_logprobs_of_chats_and_completions_are_one_option() -> None:
    assert params(chat(logprobs=True).options).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=5).options).logprobs == 5
    assert params(chat(logprobs=False, top_logprobs=0).options).logprobs is None
    assert params(completion(logprobs=3).options).logprobs == 3
    echoed = params(completion(logprobs=2, echo=True).options)
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    with pytest.raises(BadRequest, match="top_logprobs is 5, must be 0 without logprobs"):
        chat(top_logprobs=5)


def test_stop_strings_are_one_or_many_and_empty_ones_are_none() -> None:
    assert chat(stop="a").options.stop == ("a",)
    assert chat(stop=["a", "", "b"]).options.stop == ("a", "b")
    assert chat(stop=[]).options.stop == chat(stop="").options.stop == chat().options.stop == ()


def test_minimum_must_fit_the_maximum() -> None:
    with pytest.raises(BadRequest, match="min_tokens is 6, limit is 5"):
        params(chat(min_tokens=6, max_tokens=5).options)
    with pytest.raises(BadRequest, match="stop_token_ids has all of them"):
        params(chat(min_tokens=1, stop_token_ids=list(range(640))).options)


def test_bias_of_an_unknown_token_is_refused() -> None:
    with pytest.raises(BadRequest, match="logit_bias has the token id 640, must be from 0 to 639"):
        params(chat(logit_bias={"640": 1}).options)


def test_choices_are_bounded_by_the_queue() -> None:
    check_num_choices(chat(n=2).options, 2, limit=4)
    with pytest.raises(BadRequest, match=r"n is 3 for each of 2 prompts, limit is 4 choices \(--max-waiting\)"):
        check_num_choices(chat(n=3).options, 2, limit=4)


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


async def chat_text(**fields: Any) -> str:
    prompt = await chat_prompt(chat(**fields).conversation, MODEL)
    return MODEL.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


async def test_chat_prompt_is_the_rendered_template() -> None:
    expected = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert await chat_text() == expected
    assert (
        await chat_text(messages=[{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}])
        == expected
    )


async def test_tools_are_rendered_unless_none_may_be_called() -> None:
    assert "get_weather" in await chat_text(tools=[TOOL])
    assert "get_weather" not in await chat_text(tools=[TOOL], tool_choice="none")


async def test_last_message_is_continued_and_the_prompt_may_stay_open() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    text = await chat_text(messages=begun, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nIt is ")
    assert (await chat_text(add_generation_prompt=False)).endswith("1 + 2?<|im_end|>\n")
    with pytest.raises(BadRequest, match="cannot both be true"):
        chat(messages=begun, continue_final_message=True, add_generation_prompt=True)


async def test_no_effort_means_no_thinking() -> None:
    assert (await chat_text(reasoning_effort="none")).endswith("<think>\n\n</think>\n\n")
    assert (await chat_text(reasoning_effort="high")).endswith("<|im_start|>assistant\n")


async def test_thinking_is_switched_by_template_variables() -> None:
    text = await chat_text(chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


async def test_developer_is_the_system_for_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    assert (await chat_text(messages=messages)).startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_prompt_that_opens_reasoning_says_so() -> None:
    assert MODEL.chat_template is not None
    opened = MODEL.chat_template.compile({"default": "assistant\n<think>\n"}, {})
    assert (await chat_prompt(chat().conversation, dataclasses.replace(MODEL, chat_template=opened))).opens_reasoning
    assert not (await chat_prompt(chat().conversation, MODEL)).opens_reasoning


async def test_checkpoint_without_a_template_refuses_chats() -> None:
    with pytest.raises(BadRequest, match="has no chat template; use /v1/completions"):
        await chat_prompt(chat().conversation, dataclasses.replace(MODEL, chat_template=None))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("12", [[16, 17]]),
        (["1", "2"], [[16], [17]]),
        ([16, 17], [[16, 17]]),
        ([[16], [17, 17]], [[16], [17, 17]]),
        (["1", [17]], [[16], [17]]),
    ],
    ids=str,
)
async def test_prompt_may_be_text_or_tokens_one_or_many(prompt: Any, expected: list[list[int]]) -> None:
    assert MODEL.tokenizer.decode([16, 17]) == "12"
    made = await completion_prompts(completion(prompt=prompt), MODEL)
    assert [one.token_ids for one in made] == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], "", 5, {}, [1, "a"], ["a", 1], [1.5], [True], [[1, "a"]], [640], [-1], [10**30]], ids=str
)
async def test_wrong_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        await completion_prompts(completion(prompt=prompt), MODEL)
    assert caught.value.param == "prompt"


async def test_too_many_prompts_are_refused_with_the_flag() -> None:
    with pytest.raises(BadRequest, match=r"prompt has 5 prompts, limit is 4 \(--max-waiting\)"):
        completion(prompt=["a"] * 5)


async def test_enormous_prompt_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr("replica.api.tokenizer.Tokenizer.encode", never)
    text = "a" * 1_000_000
    with pytest.raises(ContextTooLong, match=r"at least \d+ tokens \(1000000 characters or more\), limit is 4095"):
        await completion_prompts(completion(prompt=text), MODEL)
    with pytest.raises(ContextTooLong, match=r"at least \d+ tokens .*, limit is 4095"):
        await chat_prompt(chat(messages=[{"role": "user", "content": text}]).conversation, MODEL)


async def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(BadRequest, match="lone surrogate"):
        await completion_prompts(completion(prompt="\ud800"), MODEL)
    with pytest.raises(BadRequest, match="lone surrogate"):
        await chat_prompt(chat(messages=[{"role": "user", "content": "\ud800"}]).conversation, MODEL)


def test_unknown_model_is_not_found_and_no_model_is_this_one() -> None:
    check_model(None, MODEL)
    check_model("tiny-moe", MODEL)
    with pytest.raises(UnknownModel, match="'gpt-4o' is not served here; 'tiny-moe' is"):
        check_model("gpt-4o", MODEL)


def test_context_beyond_the_checkpoints_is_a_config_error() -> None:
    model_config = ModelConfig.load(DEMO_MODEL)
    with pytest.raises(ConfigError, match="--max-model-len is 5000, the checkpoint's limit is 4096"):
        ServedModel.load(ReplicaConfig(model=DEMO_MODEL, max_model_len=5000), model_config)
    assert ServedModel.load(ReplicaConfig(model=DEMO_MODEL, max_model_len=512), model_config).max_model_len == 512


def test_name_of_the_model_is_its_folders_unless_it_is_given() -> None:
    assert MODEL.name == "tiny-moe"
    named = ReplicaConfig(model=Path(DEMO_MODEL), served_model_name="demo")
    assert ServedModel.load(named, ModelConfig.load(DEMO_MODEL)).name == "demo"


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
