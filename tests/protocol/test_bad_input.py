"""Bad input gets a clear 4xx, and a stream beside it goes on as if it were not there."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from typing import Any, Final

import pytest
from aiohttp import ClientSession

from replica.api.grammar import LIMITS, GrammarCompiler, Vocabulary, json_rules, new_matcher
from replica.api.grammar_check import complaint
from replica.api.grammar_checkers import GrammarCheckers
from replica.errors import GrammarRefused, Unavailable
from tests.probed_replica import probed_replica
from tests.protocol.bad_requests import (
    BAD_BODIES,
    BAD_CHATS,
    BAD_OTHERS,
    HARD_SCHEMAS,
    TOOL,
    USER,
    json_schema,
)
from tests.protocol.fake_loop import MODEL
from tests.protocol.http_probe import BODY, CHAT, COMPLETIONS, post, raw_client, raw_request, stream

WITH_BODIES: Final = (
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
)
ENDLESS: Final = {
    "without text": "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = j %}{% endfor %}{% endfor %}",
    "with text": "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "by calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


def error_of(answer: Any) -> dict[str, Any]:
    """The error in an answer of either form, OpenAI's or Anthropic's."""
    error: dict[str, Any] = answer["error"]
    assert error["type"] == "invalid_request_error"
    return error


async def test_every_bad_chat_is_a_400_that_names_value_and_limit() -> None:
    async with probed_replica() as (served, _), ClientSession() as session:
        for fields, message in BAD_CHATS:
            for streamed in (False, True):
                body = {"messages": [USER], "max_tokens": 3, **fields, "stream": streamed}
                status, answer = await post(session, served.url + CHAT, body)
                assert (status, error_of(answer)["message"]) == (400, message)
                assert error_of(answer).keys() == {"message", "type", "param", "code"}


async def test_every_other_bad_request_is_a_400_that_names_value_and_limit() -> None:
    async with probed_replica() as (served, _), ClientSession() as session:
        for path, fields, message in BAD_OTHERS:
            status, answer = await post(session, served.url + path, fields)
            assert (path, status, error_of(answer)["message"]) == (path, 400, message)


async def test_every_bad_body_is_refused_by_every_api() -> None:
    async with probed_replica(max_body_mb=1.0) as (served, _), ClientSession() as session:
        for raw, status, message in BAD_BODIES:
            for path in WITH_BODIES:
                async with session.post(served.url + path, data=io.BytesIO(raw)) as response:
                    said = json.loads(await response.text())["error"]["message"]
                    assert (path, response.status) == (path, status) and said.startswith(message), said


async def test_unknown_model_is_a_404_of_every_api() -> None:
    fields = {"prompt": {"prompt": "x"}, "tokens": {"tokens": [1]}, "input": {"input": "x"}}
    chat = {"messages": [USER], "max_tokens": 3}
    needs = {COMPLETIONS: "prompt", "/v1/responses": "input", "/tokenize": "prompt", "/detokenize": "tokens"}
    async with probed_replica() as (served, _), ClientSession() as session:
        for path in WITH_BODIES:
            body = fields[needs[path]] if path in needs else chat
            status, answer = await post(session, served.url + path, {"model": "gpt-4o", **body})
            said = answer["error"]["message"]
            assert (path, status, said) == (path, 404, "the model 'gpt-4o' is not served here; 'tiny-moe' is")


async def test_hard_schemas_cost_their_own_request_alone() -> None:
    """Answers that are cut off, or errors: in any case the request's own end, and soon."""
    async with probed_replica() as (served, probe), ClientSession() as session:
        for value, failure in HARD_SCHEMAS:
            body = {**BODY, **json_schema(value), "max_tokens": 12, "chat_template_kwargs": {"enable_thinking": False}}
            started_s = time.monotonic()
            status, answer = await post(session, served.url + CHAT, body)
            assert time.monotonic() - started_s < 20, value
            if not failure:
                assert status == 200 and answer["choices"][0]["finish_reason"] in ("length", "stop"), answer
                continue
            assert status == 400 and error_of(answer)["code"] == "grammar_failed"
            assert error_of(answer)["message"].startswith(failure)
            *begun, last = await stream(session, served.url + CHAT, body)
            assert begun and last["error"] == error_of(answer)
        assert probe.longest_gap_s < 3


async def test_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(MODEL)
    quick = "start: value\n" + json_rules("value", {"type": "integer"})
    slow = "start: value\n" + json_rules("value", {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})
    try:
        await compiler.compile(quick, param="p")  # the checking process runs now
        monkeypatch.setattr("replica.api.grammar_checkers.CHECK_DEADLINE_S", 0.05)
        with pytest.raises(GrammarRefused, match=r"^the schema cannot be used: compiling it takes more than 0\.05 s$"):
            await compiler.compile(slow, param="p")
        monkeypatch.setattr("replica.api.grammar_checkers.CHECK_DEADLINE_S", 20.0)
        with pytest.raises(GrammarRefused, match="takes more than"):  # it is remembered, and costs nothing now
            await compiler.compile(slow, param="p")
        await compiler.compile(quick.replace("integer", "string"), param="p")
    finally:
        await compiler.close()


async def test_a_refusal_that_quotes_a_long_schema_is_cut_short_and_ends_no_process() -> None:
    compiler = GrammarCompiler(MODEL)
    try:
        for schema in ({"type": "z" * 100_000}, {"type": "string", "pattern": "(" * 100_000}):
            with pytest.raises(GrammarRefused) as refused:
                await compiler.compile("start: value\n" + json_rules("value", schema), param="p")
            assert len(str(refused.value)) < 400
        assert len(compiler._checkers._all) == 1
    finally:
        await compiler.close()


def test_grammar_whose_first_tokens_take_too_long_to_find_is_refused() -> None:
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(500)}, "type": "object"}
    tokenizer = Vocabulary.of(MODEL).tokenizer()

    def said(max_mask_s: float) -> str:
        matcher = new_matcher(tokenizer, "start: value\n" + json_rules("value", wide), LIMITS)
        return complaint(matcher, max_mask_s=max_mask_s)

    assert re.fullmatch(r"finding its first tokens takes \d\.\d\d s, limit is 0 s", said(0.0))
    assert said(60.0) == ""


async def test_checking_process_that_died_idle_is_replaced_and_costs_no_grammar() -> None:
    compiler = GrammarCompiler(MODEL)
    try:
        await compiler.compile("start: value\n" + json_rules("value", {"type": "integer"}), param="p")
        (checker,) = compiler._checkers._all
        checker.kill()
        await checker.wait()
        await compiler.compile("start: value\n" + json_rules("value", {"type": "string"}), param="p")
        assert checker not in compiler._checkers._all
    finally:
        await compiler.close()


async def test_grammars_are_tried_side_by_side_and_one_that_many_ask_for_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    compiler = GrammarCompiler(MODEL)
    slow = "start: value\n" + json_rules("value", {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})
    quick = "start: value\n" + json_rules("value", {"type": "integer"})
    try:
        await compiler.compile(quick.replace("integer", "string"), param="p")
        assert len(compiler._checkers._all) == 1
        async with asyncio.TaskGroup() as tasks:
            hard = tasks.create_task(compiler.compile(slow, param="p"))
            await asyncio.sleep(0)
            made = await asyncio.gather(*(compiler.compile(quick, param="p") for _ in range(9)))
            assert not hard.done(), "the others did not wait for it"
        assert len({id(grammar) for grammar in made}) <= 2  # of those that began before it was known
        assert len(compiler._checkers._all) == 3
    finally:
        await compiler.close()
    assert not compiler._checkers._all


async def test_grammars_that_wait_too_long_or_in_too_great_number_are_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    monkeypatch.setattr("replica.api.grammar_checkers.WAIT_DEADLINE_S", 0.05)
    checkers = GrammarCheckers(lambda: "")
    async with checkers.turn():
        with pytest.raises(Unavailable, match=r"^other grammars were compiled for 0\.05 s$"):
            await checkers.turn().__aenter__()
        monkeypatch.setattr("replica.api.grammar_checkers.MAX_WAITING", 0)
        with pytest.raises(Unavailable, match=r"^0 grammars wait to be compiled$"):
            await checkers.turn().__aenter__()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ messages[0].content.nothing.at_all }}", "UndefinedError: 'str object' has no attribute 'nothing'"),
        (
            "{{ messages.__class__.__mro__ }}",
            "SecurityError: access to attribute '__class__' of 'list' object is unsafe.",
        ),
    ],
    ids=["raises", "undefined", "unsafe"],
)
async def test_template_that_raises_is_the_requests_own_error(source: str, message: str) -> None:
    async with probed_replica(chat_template=source) as (served, _), ClientSession() as session:
        status, answer = await post(session, served.url + CHAT, BODY)
        expected = f"the chat template refused the messages: {message}"
        assert (status, error_of(answer)["message"], error_of(answer)["param"]) == (400, expected, "messages")


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
async def test_template_that_never_ends_is_refused_and_nobody_else_notices(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.api.chat.RENDER_DEADLINE_S", 2.0)
    async with probed_replica(chat_template=source) as (served, probe), ClientSession() as session:
        before = probe.num_streams
        answers = await asyncio.gather(*(post(session, served.url + CHAT, BODY) for _ in range(2)))
        for status, answer in answers:
            assert (status, error_of(answer)["message"]) == (400, "the chat template took more than 2 s")
        assert probe.num_streams > before and probe.longest_gap_s < 1.5  # of the 2 s that both are rendered


async def test_half_a_body_and_silence_ends_in_a_408() -> None:
    async with probed_replica(client_timeout_s=1.0) as (served, _):
        for missing in (1, 10):
            async with raw_client(served.url, raw_request(BODY, missing=missing)) as (reader, _):
                assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 408 Request Timeout\r\n"
                answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
                assert b'"nothing of the body came for 1 s (--client-timeout-s)"' in answer


async def test_client_may_hang_up_at_any_moment() -> None:
    fields = {**BODY, "max_tokens": 30, "n": 2, "tools": [TOOL], "tool_choice": "required"}
    request = raw_request({**fields, "stream": True})
    async with probed_replica() as (served, _):
        for sent in range(0, len(request), 4):
            async with raw_client(served.url, request[:sent]):
                await asyncio.sleep(0.001)
        for received in (1, 100, 300, 600, 1200, 2400):
            async with raw_client(served.url, request) as (reader, _):
                got = 0
                while got < received and (piece := await reader.read(received - got)):
                    got += len(piece)
        for stay_s in (0.0, 0.003, 0.01, 0.03, 0.1):  # of a whole answer nothing comes until its end
            async with raw_client(served.url, raw_request(fields)):
                await asyncio.sleep(stay_s)
        await served.until(lambda: served.loop.num_unfinished <= 1)  # the probe's
