"""Every field that does not change logits, with the value it must produce (those that do: test_sampling_fields.py).

What is expected is computed beside: tokens by transformers' greedy search, texts by its tokenizer, prompts by its
`apply_chat_template`, and the rest by plain Python on those.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from aiohttp import ClientSession
from transformers import AutoTokenizer

from tests.commands import DEMO_MODEL
from tests.e2e.test_parity_with_transformers import load_reference
from tests.model_replica import ModelReplica, model_replica

END_IDS: Final = (631, 633)
MESSAGES: Final = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL: Final = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NUM_AFTER_END: Final = 12
UNKNOWN: Final = {"user": "u", "metadata": {"a": "b"}, "store": True, "no_such_field": [1], "priority": 3}


@dataclass(frozen=True)
class Reference:
    """What transformers says of the question: its prompt, and the greedy answer, which goes on after its end."""

    tokenizer: Any
    prompt: list[int]
    output: list[int]

    @classmethod
    @torch.inference_mode()
    def load(cls) -> Reference:
        tokenizer, model = AutoTokenizer.from_pretrained(DEMO_MODEL), load_reference(DEMO_MODEL, torch.float32)
        prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        output: list[int] = []
        after_end = 0
        while after_end < NUM_AFTER_END:
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
            output.append(int(logits.argmax()))
            after_end += bool(after_end) or output[-1] in END_IDS
        return cls(tokenizer, prompt, output)

    @property
    def answer(self) -> list[int]:
        """The output up to its end, the token that ends it included."""
        return self.output[: next(i for i, token_id in enumerate(self.output) if token_id in END_IDS) + 1]

    def text(self, token_ids: list[int], *, special: bool = False) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=not special)
        return text

    def tokens_until(self, stop: str, *, least: int = 0) -> int:
        """How many tokens there are when the stop string is complete, which it must be with the `least`th or later."""
        earlier = len(self.text(self.answer[: max(0, least - 1)]))
        for count in range(max(1, least), len(self.answer)):
            if self.text(self.answer[:count]).find(stop, max(0, earlier - len(stop) + 1)) >= 0:
                return count
        raise AssertionError(f"{stop!r} is not in the answer")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load()


async def ask(session: ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json={"temperature": 0, **body}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


def completions(ref: Reference) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Fields beside the prompt's tokens, and what the choice and the usage have in them."""
    answer, whole = ref.answer, ref.text(ref.answer[:-1])
    twice = "2"  # it is in the answer more than once
    first, later = ref.tokens_until(twice), ref.tokens_until(twice, least=ref.tokens_until(twice) + 1)
    stop = whole[20:26]
    at = ref.tokens_until(stop)
    assert whole.count(twice) > 1 and later > first and whole.index(stop) == 20
    stopped = {"text": whole[:20], "finish_reason": "stop", "stop_reason": stop, "completion_tokens": at}
    plain = {"text": whole, "finish_reason": "stop", "stop_reason": None, "completion_tokens": len(answer)}
    token_id = answer[6]
    before = answer.index(token_id)
    further = {"ignore_eos": True, "max_tokens": len(ref.output)}
    return [
        ({}, plain),
        (UNKNOWN, plain),
        ({"n": 1, "best_of": 1, "suffix": "", "stream": False, "seed": 3, "top_p": 0.5, "top_k": 7}, plain),
        ({"max_tokens": 5}, {"text": ref.text(answer[:5]), "finish_reason": "length", "completion_tokens": 5}),
        ({"max_tokens": 9, "max_completion_tokens": 4}, {"text": ref.text(answer[:4]), "completion_tokens": 4}),
        ({"stop": stop}, stopped),
        ({"stop": ["never said", stop]}, stopped),
        ({"stop": [stop], "include_stop_str_in_output": True}, {**stopped, "text": whole[:26]}),
        ({"stop": "never said"}, plain),
        ({"stop": twice}, {"text": whole[: whole.index(twice)], "completion_tokens": first}),
        ({"stop": twice, "min_tokens": first + 1}, {"stop_reason": twice, "completion_tokens": later}),
        (
            {"stop_token_ids": [token_id]},
            {"text": ref.text(answer[:before]), "finish_reason": "stop", "stop_reason": token_id},
        ),
        (further, {"text": ref.text(ref.output), "finish_reason": "length", "stop_reason": None}),
        ({**further, "skip_special_tokens": False}, {"text": ref.text(ref.output, special=True)}),
        ({"return_token_ids": True}, {"token_ids": answer, "prompt_token_ids": ref.prompt}),
        ({"echo": True}, {"text": ref.text(ref.prompt) + whole}),
        (
            {"prompt": ref.text(ref.prompt, special=True), "echo": True},
            {"text": ref.text(ref.prompt, special=True) + whole},
        ),
    ]


async def test_fields_of_completions_whole_and_streamed(reference: Reference) -> None:
    async with model_replica() as replica, ClientSession() as session:
        url = replica.url + "/v1/completions"
        for fields, expected in completions(reference):
            body = {"prompt": reference.prompt, **fields}
            whole = await ask(session, url, body)
            (choice,) = whole["choices"]
            found = {**choice, **whole["usage"]}
            assert {name: found[name] for name in expected} == expected, fields
            assert whole["usage"]["prompt_tokens"] == len(reference.prompt)
            assert whole["usage"]["total_tokens"] == len(reference.prompt) + whole["usage"]["completion_tokens"]
            pieces = await stream(session, url, body)
            assert "".join(c["text"] for piece in pieces for c in piece["choices"]) == choice["text"], fields


async def test_one_prompt_and_several_and_several_choices_of_each(reference: Reference) -> None:
    prompt, whole = reference.prompt, reference.text(reference.answer[:-1])
    text = reference.text(prompt, special=True)
    async with model_replica() as replica, ClientSession() as session:
        url = replica.url + "/v1/completions"
        for given, count in ((text, 1), ([text, text], 2), (prompt, 1), ([prompt] * 3, 3), ([text, prompt], 2)):
            for n in (1, 2):
                answer = await ask(session, url, {"prompt": given, "n": n})
                assert [choice["index"] for choice in answer["choices"]] == list(range(count * n))
                assert {choice["text"] for choice in answer["choices"]} == {whole}
                assert answer["usage"]["prompt_tokens"] == count * len(prompt)
                assert answer["usage"]["completion_tokens"] == count * n * len(reference.answer)


async def stream(session: ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    async with session.post(url, json={"temperature": 0, **body, "stream": True}) as response:
        *events, done, last = (await response.text()).split("\n\n")
        assert (done, last) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_usage_in_a_stream_is_what_has_come_so_far(reference: Reference) -> None:
    prompt, num_answer = len(reference.prompt), len(reference.answer)
    body = {"prompt": reference.prompt, "return_token_ids": True}
    async with model_replica() as replica, ClientSession() as session:
        url = replica.url + "/v1/completions"
        none = await stream(session, url, body)
        assert all("usage" not in event for event in none)
        last = await stream(session, url, {**body, "stream_options": {"include_usage": True}})
        assert all(event["usage"] is None for event in last[:-1])
        every = {"include_usage": True, "continuous_usage_stats": True}
        continuous = await stream(session, url, {**body, "stream_options": every})
    for events in (last, continuous):
        assert events[-1]["choices"] == []
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, num_answer)
    num_tokens = 0
    for event in continuous[:-1]:
        num_tokens += len(event["choices"][0].get("token_ids", ()))
        assert event["usage"]["completion_tokens"] == num_tokens
        assert event["usage"]["total_tokens"] == prompt + num_tokens
    assert num_tokens == num_answer


async def test_chat_is_split_into_reasoning_and_content_and_its_tokens_are_counted(reference: Reference) -> None:
    match = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", reference.text(reference.answer[:-1]), re.DOTALL)
    assert match
    close = reference.tokenizer.convert_tokens_to_ids("</think>")
    async with model_replica() as replica, ClientSession() as session:
        answer = await ask(session, replica.url + "/v1/chat/completions", {"messages": MESSAGES, **UNKNOWN})
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["reasoning_content"], message["content"]) == (match[1], match[2])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": reference.answer.index(close)}
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"] == len(reference.prompt)


ASSISTANT: Final = {"role": "assistant", "content": "It is "}
SYSTEM: Final = {"role": "system", "content": "Be brief."}
PARTS: Final = [{"type": "text", "text": "What is"}, {"type": "text", "text": "12 + 30?"}]
CALLED: Final = [
    {"role": "user", "content": "Weather in Oslo?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
AS_OBJECTS: Final = [
    CALLED[0],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    CALLED[2],
]
# Fields of a chat, then the messages and options for apply_chat_template that make the same prompt.
PROMPTS: Final[list[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]]] = [
    ({}, MESSAGES, {}),
    ({"add_generation_prompt": True}, MESSAGES, {}),
    ({"add_generation_prompt": False}, MESSAGES, {"add_generation_prompt": False}),
    (
        {"messages": [*MESSAGES, ASSISTANT], "continue_final_message": True},
        [*MESSAGES, ASSISTANT],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}}, MESSAGES, {"enable_thinking": False}),
    ({"chat_template_kwargs": {"enable_thinking": True}}, MESSAGES, {"enable_thinking": True}),
    ({"reasoning_effort": "none"}, MESSAGES, {"enable_thinking": False}),
    ({"reasoning_effort": "high"}, MESSAGES, {}),
    ({"messages": [SYSTEM, *MESSAGES]}, [SYSTEM, *MESSAGES], {}),
    ({"messages": [{**SYSTEM, "role": "developer"}, *MESSAGES]}, [SYSTEM, *MESSAGES], {}),
    ({"messages": [{"role": "user", "content": PARTS}]}, [{"role": "user", "content": "What is\n12 + 30?"}], {}),
    ({"tools": [TOOL]}, MESSAGES, {"tools": [TOOL]}),
    ({"tools": [TOOL], "tool_choice": "auto"}, MESSAGES, {"tools": [TOOL]}),
    ({"tools": [TOOL], "tool_choice": "required"}, MESSAGES, {"tools": [TOOL]}),
    ({"tools": [TOOL], "tool_choice": "none"}, MESSAGES, {}),
    ({"tools": []}, MESSAGES, {}),
    ({"messages": CALLED}, AS_OBJECTS, {}),
]


async def test_prompt_of_a_chat_is_the_one_of_transformers(reference: Reference) -> None:
    async with model_replica() as replica, ClientSession() as session:
        for fields, messages, options in PROMPTS:
            expected = reference.tokenizer.apply_chat_template(
                messages, return_dict=False, **{"add_generation_prompt": True, **options}
            )
            body = {"messages": MESSAGES, **fields}
            asked = {**body, "max_tokens": 1, "return_token_ids": True}
            answer = await ask(session, replica.url + "/v1/chat/completions", asked)
            assert answer["prompt_token_ids"] == expected, fields
            counted = await ask(session, replica.url + "/tokenize", body)
            has_choice = "tool_choice" in fields or "reasoning_effort" in fields  # /tokenize has no such field
            assert has_choice or counted["tokens"] == expected, fields


TEXTS: Final = [
    "",
    " ",
    "What is 12 + 30?",
    "e\N{COMBINING ACUTE ACCENT} 漢字 \N{ROCKET}\n\n",
    "a<|im_end|>b <think>",
    "\x00\x7f",
]


async def check_tokens(session: ClientSession, replica: ModelReplica, tokenizer: Any, text: str) -> None:
    expected = tokenizer.encode(text)
    answer = await ask(session, replica.url + "/tokenize", {"prompt": text, "return_token_strs": True})
    assert (answer["tokens"], answer["count"]) == (expected, len(expected))
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] == [tokenizer.decode([token_id]) for token_id in expected]
    back = await ask(session, replica.url + "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": text} == {"prompt": tokenizer.decode(expected)}
    bare = await ask(session, replica.url + "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False) and "token_strs" not in bare


async def test_texts_become_the_tokens_of_transformers_and_come_back(reference: Reference) -> None:
    async with model_replica() as replica, ClientSession() as session:
        for text in TEXTS:
            await check_tokens(session, replica, reference.tokenizer, text)
