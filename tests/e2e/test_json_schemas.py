"""Answers inside a grammar: valid for sixty schemas, and what masking transformers' logits by brute force gives."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any, Final

import jsonschema
import pytest
import torch
from aiohttp import ClientSession

from replica.api.tokenizer import Tokenizer
from tests.commands import DEMO_MODEL
from tests.e2e.api_schemas import SCHEMAS
from tests.e2e.test_parity_with_transformers import NEAR_TIE, load_reference
from tests.model_replica import ModelReplica, model_replica

END_IDS: Final = (631, 633)
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


FINITE: Final[dict[str, tuple[Any, list[Any]]]] = {
    "enum": (
        {"enum": ["forty", "forty-two", "fourteen", "42", 42, None]},
        ["forty", "forty-two", "fourteen", "42", 42, None],
    ),
    "object": (
        {
            "type": "object",
            "properties": {"n": {"enum": [4, 42, 421]}, "ok": {"type": "boolean"}},
            "required": ["n", "ok"],
            "additionalProperties": False,
        },
        [{"n": n, "ok": ok} for n in (4, 42, 421) for ok in (True, False)],
    ),
    "array": (
        {"type": "array", "items": {"enum": ["a", "\N{ROCKET}"]}, "minItems": 1, "maxItems": 2},
        [[*some] for length in (1, 2) for some in itertools.product(["a", "\N{ROCKET}"], repeat=length)],
    ),
}


@pytest.mark.parametrize("name", FINITE)
async def test_greedy_answer_is_the_one_of_brute_force(name: str) -> None:
    schema, values = FINITE[name]
    reference = load_reference(DEMO_MODEL, torch.float32)
    texts = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    async with model_replica() as replica, ClientSession() as session:
        answer = await ask(replica, session, response_format=json_format(schema), temperature=0)
        tokenizer = replica.model.tokenizer
        bytes_of = [replica.model.tokenizer.token_text(token_id)[1] for token_id in range(replica.model.vocab_size)]
    prompt, output = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt + output])).logits[0][len(prompt) - 1 : -1]
    said = b""
    for row, token_id in zip(rows, output, strict=True):
        rest = [t for t in texts if t.startswith(said)]
        if said not in texts and len({t[len(said)] for t in rest}) == 1:
            # Where there is no choice, the tokens are those that the tokenizer makes of the text.
            allowed = [i for i in (next_token(tokenizer, t, said) for t in rest) if i is not None]
        else:
            allowed = [i for i, raw in enumerate(bytes_of) if raw and any(t.startswith(said + raw) for t in rest)]
            allowed += END_IDS if said in texts else ()
        best = max(allowed, key=lambda i: float(row[i]))
        assert token_id == best or float(row[best] - row[token_id]) < NEAR_TIE
        said += bytes_of[token_id] if token_id not in END_IDS else b""
    assert said in texts and json.loads(said) in values
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(output)


def next_token(tokenizer: Tokenizer, text: bytes, said: bytes) -> int | None:
    """The token of a text that begins where `said` ends, if one does."""
    done = b""
    for token_id in tokenizer.encode(text.decode(), add_special_tokens=False):
        if done == said:
            return token_id
        done += tokenizer.token_text(token_id)[1]
    return None


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
