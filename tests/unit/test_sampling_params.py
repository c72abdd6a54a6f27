"""What a request asks of the sampler becomes sampling parameters, within what the model and the prompt allow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from replica.api.generation_config import GenerationDefaults
from replica.api.openai_api import (
    check_num_choices,
    derived_seed,
    output_tokens,
)
from replica.errors import BadRequest, ContextTooLong
from tests.unit.openai_requests import MODEL, chat, completion, params


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
