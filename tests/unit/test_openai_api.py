"""Requests become prompts, or a 400 that names what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from replica.api.openai_api import (
    chat_prompt,
    check_model,
    completion_prompts,
)
from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.errors import BadRequest, ConfigError, ContextTooLong, UnknownModel
from replica.model_config import ModelConfig
from tests.commands import DEMO_MODEL
from tests.unit.openai_requests import MESSAGES, MODEL, TOOL, chat, completion


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
