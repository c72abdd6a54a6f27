"""Bad input gets a clear 4xx, and a stream beside it goes on as if it were not there."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from aiohttp import ClientSession

from replica.api.chat import ChatTemplate
from replica.api.grammar import GrammarCompiler, json_rules
from replica.errors import GrammarRefused
from tests.fuzz import PROBE
from tests.model_replica import ModelReplica, model_replica
from tests.protocol.fake_loop import MODEL, FakeLoop, replica
from tests.protocol.http_probe import BODY, CHAT, COMPLETIONS, post, raw_client, raw_request

USER: Final = {"role": "user", "content": "hi"}
NAN: Final = float("nan")


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}}
    return made


TOOL: Final = {"type": "function", "function": {"name": "f"}}
NAMED: Final = {"type": "function", "function": {"name": "g"}}
# What is wrong, the fields that make it so, what the message says.
BAD_CHATS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("messages of a wrong type", {"messages": "hi"}, "messages is 'hi', must be a list"),
    ("no messages", {"messages": []}, "must be a list of at least one message"),
    (
        "unknown role",
        {"messages": [{"role": "wizard", "content": "hi"}]},
        "messages[0].role is 'wizard', must be one of",
    ),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be 'text'"),
    ("prompt over the context", {"messages": [{"role": "user", "content": "1" * 4200}]}, "tokens, limit is 4095"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens is 0, must be a whole number of at least 1"),
    ("max_tokens negative", {"max_completion_tokens": -5}, "max_completion_tokens is -5, must be"),
    ("n too large", {"n": 1000}, "n is 1000, must be a whole number from 1 to 128"),
    ("temperature NaN", {"temperature": NAN}, "temperature is nan, must be a number from 0 to 2"),
    ("temperature negative", {"temperature": -1}, "temperature is -1, must be a number from 0 to 2"),
    (
        "bias of an unknown token",
        {"logit_bias": {"99999": 1}},
        "logit_bias has the token id 99999, must be from 0 to 639",
    ),
    ("schema of a wrong type", schema({"type": "wizard"}), "the schema cannot be used"),
    ("schema with wrong properties", schema({"type": "object", "properties": 5}), "the schema cannot be used"),
    ("schema that refers to itself alone", schema({"$ref": "#"}), "the schema cannot be used"),
    ("schema that refers elsewhere", schema({"$ref": "http://localhost/x"}), "the schema cannot be used"),
    ("enormous schema", schema({"enum": ["x" * 100] * 3000}), "characters, limit is 262144"),
    ("deep schema", schema(nested(400)), "the schema cannot be used"),
    ("unsatisfiable schema", schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
    ("empty enum", schema({"enum": []}), "Unsatisfiable schema"),
    ("regex of another kind", schema({"type": "string", "pattern": "(?=a)b"}), "regex parse error"),
    (
        "tool without a name",
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name is None, must be a name",
    ),
    (
        "named tool that is not there",
        {"tools": [TOOL], "tool_choice": NAMED},
        "tool_choice names 'g', which is none of the tools",
    ),
    (
        "tool with a bad schema",
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wizard"}}}],
            "tool_choice": "required",
        },
        "the schema cannot be used",
    ),
    ("lone surrogate", {"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate (U+D800)"),
    (
        "lone surrogate in a tool",
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\udc00"}}]},
        "lone surrogate",
    ),
    ("lone surrogate in a schema", schema({"enum": ["\ud800"]}), "the schema cannot be used"),
    (
        "template that raises",
        {
            "messages": [
                {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
            ],
            "chat_template_kwargs": {"namespace": 5},
        },
        "the chat template refused the messages",
    ),
    ("10,000 stop strings", {"stop": ["x"] * 10_000}, "stop has 10000 strings, limit is 64"),
    ("suffix", {"suffix": "x"}, "suffix is not supported"),
]
BAD_BODIES: Final[list[tuple[str, bytes, int, str]]] = [
    ("not JSON", b"hello", 400, "not valid JSON"),
    ("nothing", b"", 400, "not valid JSON"),
    ("cut off", b'{"messages": [', 400, "not valid JSON"),
    ("not UTF-8", b'{"messages": "\xff\xfe"}', 400, "not valid JSON"),
    ("nested without end", b"[" * 200_000, 400, "not valid JSON"),
    ("a list", b"[1]", 400, "must be an object"),
    (
        "unknown model",
        b'{"model": "gpt-4o", "messages": [{"role": "user", "content": "x"}]}',
        404,
        "is not served here",
    ),
    ("too large", b" " * 2_000_000, 413, "limit is 1048576 (--max-body-mb)"),
]


@asynccontextmanager
async def probed_replica(**settings: Any) -> AsyncIterator[ModelReplica]:
    """A replica with a stream that runs all the time; what that says must always be the same."""

    async def probe() -> str:
        async with session.post(served.url + COMPLETIONS, json=PROBE) as response:
            return str((await response.json())["choices"][0]["text"])

    async def watch() -> None:
        while not done.is_set():
            assert await probe() == expected

    async with model_replica(**settings) as served, ClientSession() as session:
        expected, done = await probe(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            try:
                yield served
            finally:
                done.set()


async def test_every_bad_chat_is_refused_whole_and_streamed() -> None:
    async with probed_replica() as served, ClientSession() as session:
        for what, fields, message in BAD_CHATS:
            for stream in (False, True):
                body = {"messages": [USER], "max_tokens": 3, **fields, "stream": stream}
                status, answer = await post(session, served.url + CHAT, body)
                assert status == 400, (what, status, answer)
                assert message in answer["error"]["message"], (what, answer)
                assert answer["error"]["type"] == "invalid_request_error" and len(answer["error"]["message"]) < 700, (
                    what
                )


async def test_every_bad_body_is_refused_by_every_api() -> None:
    async with probed_replica(max_body_mb=1.0) as served, ClientSession() as session:
        for what, raw, expected, message in BAD_BODIES:
            for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"):
                if expected == 404 and path != CHAT:
                    continue
                async with session.post(served.url + path, data=io.BytesIO(raw)) as response:
                    text = await response.text()
                    assert response.status == expected, (what, path, text)
                    assert message in json.loads(text)["error"]["message"], (what, path, text)


async def test_prompt_over_the_context_is_told_both_lengths() -> None:
    async with probed_replica(max_model_len=64) as served, ClientSession() as session:
        _, answer = await post(session, served.url + COMPLETIONS, {"prompt": [16] * 70})
        assert "the prompt has 70 tokens, limit is 63: the context of 64 tokens" in answer["error"]["message"]


async def test_recursive_schema_and_exploding_regex_cost_their_own_request_alone() -> None:
    recursive = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    doubling: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {"d40": {"type": "integer"}}}
    for i in range(40):
        doubling["$defs"][f"d{i}"] = {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
    hard = [
        recursive,
        doubling,
        {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"},
        {"type": "string", "pattern": "^(.*a.{40}b|.*c.{50}d|.*e.{60}f)$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
        {"type": "string", "minLength": 10**6},
        {"anyOf": [{"type": "string", "pattern": f"^.*{i}.{{{i}}}$"} for i in range(200)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    ]
    async with probed_replica() as served, ClientSession() as session:
        for value in hard:
            started_s = time.monotonic()
            status, answer = await post(session, served.url + CHAT, {**BODY, **schema(value), "max_tokens": 12})
            took_s = time.monotonic() - started_s
            assert took_s < 20, value
            # Cut off after 12 tokens, refused, or ended by its own grammar: in any case it is this request's own end.
            assert status in (200, 400, 500), answer
            assert status != 500 or "follow the grammar" in answer["error"]["message"] or "next tokens" in str(answer)


async def test_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(MODEL)
    quick = "start: value\n" + json_rules("value", {"type": "integer"})
    slow = "start: value\n" + json_rules("value", {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})
    try:
        await compiler.compile(quick, param="p")  # the checking process runs now
        monkeypatch.setattr("replica.api.grammar.CHECK_DEADLINE_S", 0.05)
        with pytest.raises(GrammarRefused, match=r"compiling it takes more than 0\.05 s"):
            await compiler.compile(slow, param="p")
        monkeypatch.setattr("replica.api.grammar.CHECK_DEADLINE_S", 20.0)
        with pytest.raises(GrammarRefused, match="takes more than"):  # it is remembered, and costs nothing now
            await compiler.compile(slow, param="p")
        await compiler.compile(quick.replace("integer", "string"), param="p")
    finally:
        await compiler.close()


async def test_checking_process_that_dies_is_replaced() -> None:
    compiler = GrammarCompiler(MODEL)
    try:
        await compiler.compile("start: value\n" + json_rules("value", {"type": "integer"}), param="p")
        assert compiler._checker is not None
        compiler._checker.kill()
        await compiler._checker.wait()
        with pytest.raises(GrammarRefused, match="too much memory"):
            await compiler.compile("start: value\n" + json_rules("value", {"type": "string"}), param="p")
        await compiler.compile("start: value\n" + json_rules("value", {"type": "boolean"}), param="p")
    finally:
        await compiler.close()


async def test_template_that_raises_or_never_ends_is_the_requests_own_error(session: ClientSession) -> None:
    for source, message in (
        ("{{ raise_exception('no') }}", "the chat template refused the messages: TemplateError: no"),
        ("{{ messages[0].content.nothing.at_all }}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ):
        model = dataclasses.replace(MODEL, chat_template=ChatTemplate.compile({"default": source}, {}))
        async with replica(FakeLoop(), model=model) as url:
            status, answer = await post(session, url + CHAT, BODY)
            assert status == 400 and message in answer["error"]["message"]


async def test_half_a_body_and_silence_ends_in_a_408() -> None:
    async with probed_replica(client_timeout_s=1.0) as served:
        for missing in (1, 10):
            async with raw_client(served.url, raw_request(BODY, missing=missing)) as (reader, _):
                assert b"408" in await asyncio.wait_for(reader.readline(), 10)


async def test_client_may_hang_up_at_any_moment() -> None:
    request = raw_request(
        {**BODY, "stream": True, "max_tokens": 30, "n": 2, "tools": [TOOL], "tool_choice": "required"}
    )
    async with probed_replica() as served:
        for sent in range(0, len(request), 16):
            async with raw_client(served.url, request[:sent]):
                await asyncio.sleep(0.001)
        for received in (1, 100, 300, 600, 1200, 2400):
            async with raw_client(served.url, request) as (reader, _):
                got = 0
                while got < received and (piece := await reader.read(received - got)):
                    got += len(piece)
        await served.until(lambda: served.loop.num_unfinished <= 1)  # the probe's
