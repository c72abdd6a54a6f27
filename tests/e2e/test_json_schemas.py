"""Answers inside a grammar: valid for sixty schemas, and what masking transformers' logits by brute force gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jsonschema
import pytest
import torch
from aiohttp import ClientSession
from torch import Tensor

from replica.api.grammar import LIMITS, Vocabulary, json_rules, new_matcher
from tests.commands import DEMO_MODEL
from tests.e2e.api_schemas import SCHEMAS
from tests.e2e.finite_schemas import NotFinite, all_texts
from tests.e2e.test_parity_with_transformers import NEAR_TIE, load_reference
from tests.model_replica import ModelReplica, model_replica

END_IDS: Final = (631, 633)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(DEMO_MODEL, torch.float32)


CHAT: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    **{"max_tokens": 400, "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}},
}


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def ask(replica: ModelReplica, session: ClientSession, **fields: Any) -> Any:
    async with session.post(replica.url + "/v1/chat/completions", json={**CHAT, **fields}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.timeout(240)
async def test_answers_are_valid_for_sixty_schemas() -> None:
    assert len(SCHEMAS) == 60

    async def check(name: str, schema: Any, temperature: float) -> None:
        answer = await ask(
            replica, session, response_format=json_format(schema), temperature=temperature, seed=5, max_tokens=400
        )
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop", (name, choice["message"]["content"][-80:])
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)

    async with model_replica() as replica, ClientSession() as session, asyncio.TaskGroup() as clients:
        for (name, schema), temperature in itertools.product(SCHEMAS.items(), (0.0, 1.0)):
            clients.create_task(check(name, schema, temperature))


UNICODE: Final = {"type": "array", "items": {"enum": ["a", "\N{ROCKET}", "字"]}, "minItems": 1, "maxItems": 2}
SIMILAR: Final = {"enum": ["forty", "forty-two", "fourteen", "42", 42, None]}


def finite_schemas() -> dict[str, set[bytes]]:
    """Of the sixty and two more: those whose values can all be written down, and how they are written."""
    found: dict[str, set[bytes]] = {}
    for name, schema in ALL.items():
        with contextlib.suppress(NotFinite):
            found[name] = all_texts(schema)
    return found


ALL: Final[dict[str, Any]] = {**SCHEMAS, "unicode": UNICODE, "similar": SIMILAR}
FINITE: Final = finite_schemas()


@dataclass(frozen=True)
class Greedy:
    """An answer inside a grammar, with the logits that transformers has at each of its tokens."""

    output: list[int]
    rows: Tensor  # [T, V]
    text: str

    @classmethod
    @torch.inference_mode()
    def of(cls, reference: Any, answer: Any) -> Greedy:
        """Of a greedy answer with its token ids."""
        prompt, (choice,) = answer["prompt_token_ids"], answer["choices"]
        rows = reference(torch.tensor([prompt + choice["token_ids"]])).logits[0][len(prompt) - 1 : -1]
        return cls(choice["token_ids"], rows, choice["message"]["content"])

    def check(self, index: int, may_stand: Callable[[int], bool], forced: list[int]) -> None:
        """Each token may stand where it does, and none that is likelier may.

        But where there is no choice, it may be the first of `forced`: what the tokenizer makes of the text that must
        follow, which is how the model has learned to read it.
        """
        row, token_id = self.rows[index], self.output[index]
        assert may_stand(token_id), (index, token_id)
        likelier = (row > row[token_id] + NEAR_TIE).nonzero().flatten().tolist()
        wrongly = [i for i in likelier if may_stand(i)]
        assert not wrongly or token_id in forced[:1], (index, token_id, wrongly, forced)


async def greedy_answers(replica: ModelReplica, session: ClientSession, schemas: dict[str, Any]) -> dict[str, Any]:
    asked = (ask(replica, session, response_format=json_format(schema), temperature=0) for schema in schemas.values())
    return dict(zip(schemas, await asyncio.gather(*asked), strict=True))


def must_follow(said: bytes, texts: set[bytes]) -> bytes:
    """How every text goes on that begins so."""
    rest = [text[len(said) :] for text in texts if text.startswith(said)]
    pairs = zip(min(rest), max(rest), strict=False)
    return bytes(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def test_greedy_answers_are_those_of_trying_every_token_against_every_value(reference: Any) -> None:
    """The grammar library has no part in what is expected here."""
    assert len(FINITE) >= 12
    async with model_replica() as replica, ClientSession() as session:
        tokenizer = replica.model.tokenizer
        bytes_of = [tokenizer.token_text(token_id)[1] for token_id in range(replica.model.vocab_size)]
        answers = await greedy_answers(replica, session, {name: ALL[name] for name in FINITE})
        for name, texts in FINITE.items():
            greedy = Greedy.of(reference, answers[name])
            beginnings = {text[:length] for text in texts for length in range(len(text) + 1)}
            said = b""

            def may_stand(token_id: int) -> bool:
                if token_id in END_IDS:
                    return said in texts  # noqa: B023
                return bool(bytes_of[token_id]) and said + bytes_of[token_id] in beginnings  # noqa: B023

            for index, token_id in enumerate(greedy.output):
                must = must_follow(said, texts).decode(errors="ignore")
                greedy.check(index, may_stand, tokenizer.encode(must, add_special_tokens=False))
                said += b"" if token_id in END_IDS else bytes_of[token_id]
            assert said in texts and greedy.text == said.decode(), name


async def test_greedy_answers_are_those_of_trying_each_token_alone_for_sixty_schemas(reference: Any) -> None:
    """What may follow is asked of the grammar library one token at a time, not as a mask of all of them."""
    async with model_replica() as replica, ClientSession() as session:
        tokenizer = Vocabulary.of(replica.model).tokenizer()
        answers = await greedy_answers(replica, session, SCHEMAS)
        for name, schema in SCHEMAS.items():
            greedy = Greedy.of(reference, answers[name])
            matcher = new_matcher(tokenizer, "start: value\n" + json_rules("value", schema), LIMITS)
            for index, token_id in enumerate(greedy.output):

                def may_stand(token_id: int) -> bool:
                    if token_id in END_IDS:
                        return bool(matcher.is_accepting())  # noqa: B023
                    return bool(matcher.validate_tokens([token_id]) == 1)  # noqa: B023

                greedy.check(index, may_stand, matcher.compute_ff_tokens())
                assert matcher.consume_token(token_id)
            assert matcher.is_stopped()


TOOLS: Final = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMAS["place"]}},
    {"type": "function", "function": {"name": "pay", "parameters": SCHEMAS["tree"]}},
    {"type": "function", "function": {"name": "anything"}},
]


@pytest.mark.parametrize("thinks", [True, False])
async def test_tool_that_must_be_called_is_called_with_valid_arguments(thinks: bool) -> None:
    fields = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": thinks}, "max_tokens": 300}
    async with model_replica() as replica, ClientSession() as session:
        for tool in TOOLS[:2]:
            name = tool["function"]["name"]
            choice = {"type": "function", "function": {"name": name}}
            answer = await ask(replica, session, **fields, tool_choice=choice, parallel_tool_calls=False)
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == name and answer["choices"][0]["finish_reason"] == "tool_calls"
            jsonschema.validate(json.loads(call["function"]["arguments"]), tool["function"]["parameters"])
        answer = await ask(replica, session, **fields, tool_choice="required", temperature=1, seed=3, n=4)
        for one in answer["choices"]:
            assert one["message"]["tool_calls"] and one["finish_reason"] in ("tool_calls", "length")


async def test_format_holds_after_the_reasoning_and_beside_tools() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    thinking = {"chat_template_kwargs": {}, "response_format": json_format(schema)}
    async with model_replica() as replica, ClientSession() as session:
        answer = await ask(replica, session, **thinking, temperature=0)
        message = answer["choices"][0]["message"]
        jsonschema.validate(json.loads(message["content"]), schema)
        assert "2 + 0" in message["reasoning_content"]
        beside = await ask(replica, session, **thinking, tools=TOOLS[2:], temperature=0)
        message = beside["choices"][0]["message"]
        assert message.get("tool_calls") or jsonschema.validate(json.loads(message["content"]), schema) is None
        any_object = await ask(replica, session, response_format={"type": "json_object"}, temperature=0, min_tokens=3)
        content = any_object["choices"][0]["message"]["content"]
        assert content.startswith("{") and any_object["choices"][0]["finish_reason"] in ("stop", "length")
