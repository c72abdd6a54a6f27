"""The replica's HTTP side: OpenAI's shapes, errors, and sequences that end when their client leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from aiohttp import ClientSession

from replica.lifecycle import EngineState, Lifecycle
from replica.request import FinishReason, OutputStream, TokenOutput
from replica.tokenizer import ByteDetokenizer
from tests.protocol.fake_loop import CONFIG, MODEL, FakeLoop, replica

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
BODY: Final[dict[str, Any]] = {"model": "tiny-moe", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
PROMPT: Final[dict[str, Any]] = {"model": "tiny-moe", "prompt": "one two"}
ANSWER: Final = "yes \N{ROCKET}"


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with ClientSession() as opened:
        yield opened


async def post(session: ClientSession, url: str, body: Any, **further: Any) -> tuple[int, Any]:
    async with session.post(url, json=body, **further) as response:
        return response.status, await response.json()


async def stream(session: ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, each of which must be one HTTP chunk; [DONE] as it is."""
    events: list[Any] = []
    async with session.post(url, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        gathered = b""
        async for piece, is_chunk_end in response.content.iter_chunks():
            gathered += piece
            if is_chunk_end:
                assert gathered.startswith(b"data: ") and gathered.endswith(b"\n\n") and gathered.count(b"\n") == 2
                text = gathered[len(b"data: ") : -2].decode()
                events.append(text if text == "[DONE]" else json.loads(text))
                gathered = b""
        assert gathered == b""
    return events


async def test_chat_answer_has_openais_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        status, answer = await post(session, url + CHAT, BODY, headers={"X-Request-Id": "abc"})
    assert status == 200
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": "tiny-moe",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "reasoning_content": "hm", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(loop.submitted[0].prompt_ids),
            "completion_tokens": len(loop.script),
            "total_tokens": len(loop.submitted[0].prompt_ids) + len(loop.script),
        },
    }


async def test_chat_stream_has_openais_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        events = await stream(session, url + CHAT, {**BODY, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in events[:-1]}) == len({chunk["created"] for chunk in events[:-1]}) == 1
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert "".join(choice["delta"].get("content", "") for choice in middle) == ANSWER
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in middle) == "hm"
    assert all(choice["finish_reason"] is None and choice["delta"] for choice in middle)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(loop.script)


async def test_stream_without_usage_mentions_none(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        events = await stream(session, url + CHAT, BODY)
    assert all("usage" not in event for event in events[:-1]) and events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_completion_has_openais_shape_and_keeps_its_reasoning_tags(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        status, answer = await post(session, url + COMPLETIONS, PROMPT)
        events = await stream(session, url + COMPLETIONS, PROMPT)
    text = "<think>\nhm\n</think>\n\nyes \N{ROCKET}"
    assert status == 200 and answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}]
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


async def test_prompts_of_one_request_are_its_choices(session: ClientSession) -> None:
    loop = FakeLoop()
    body = {"prompt": ["one", [16, 17], "three"], "max_tokens": 9}
    async with replica(loop) as url:
        _, answer = await post(session, url + COMPLETIONS, body)
        events = await stream(session, url + COMPLETIONS, body)
    whole = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(whole)) == 1
    assert answer["usage"]["completion_tokens"] == 27
    assert answer["usage"]["prompt_tokens"] == sum(len(sequence.prompt_ids) for sequence in loop.submitted[:3])
    texts = ["", "", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == whole
    assert [sequence.choice for sequence in loop.submitted] == [0, 1, 2, 0, 1, 2]


async def test_token_ids_are_returned_on_request_and_cover_the_answer(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        _, chat = await post(session, url + CHAT, {**BODY, "return_token_ids": True})
        chat_events = await stream(session, url + CHAT, {**BODY, "return_token_ids": True})
        _, completion = await post(session, url + COMPLETIONS, {**PROMPT, "return_token_ids": True})
        events = await stream(session, url + COMPLETIONS, {**PROMPT, "return_token_ids": True})
    chat_ids, prompt_ids = loop.submitted[0].prompt_ids, loop.submitted[2].prompt_ids
    assert chat["prompt_token_ids"] == chat_ids and chat["choices"][0]["token_ids"] == loop.script
    assert chat_events[0]["prompt_token_ids"] == chat_ids
    assert completion["choices"][0]["prompt_token_ids"] == prompt_ids
    assert completion["choices"][0]["token_ids"] == loop.script
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt_ids
    for streamed in (chat_events, events):
        ids = [event["choices"][0].get("token_ids", []) for event in streamed[:-1]]
        assert [token_id for some in ids for token_id in some] == loop.script


async def test_length_ends_an_answer_with_what_was_held_back(session: ClientSession) -> None:
    loop = FakeLoop("\N{ROCKET}")
    async with replica(loop) as url:
        _, whole = await post(session, url + CHAT, {**BODY, "max_completion_tokens": 2, "max_tokens": 3})
        events = await stream(session, url + CHAT, {**BODY, "max_tokens": 2})
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"] == "\N{REPLACEMENT CHARACTER}"
    assert whole["usage"]["completion_tokens"] == 2
    deltas = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == "\N{REPLACEMENT CHARACTER}"
    assert deltas[-1]["finish_reason"] == "length"


async def test_token_that_stops_an_answer_is_counted_but_is_no_text(session: ClientSession) -> None:
    loop = FakeLoop("abc")
    body = {**PROMPT, "stop_token_ids": [loop.script[-1]], "return_token_ids": True}
    async with replica(loop) as url:
        _, answer = await post(session, url + COMPLETIONS, body)
    expected = MODEL.tokenizer.decode(loop.script[:-1])
    assert (answer["choices"][0]["text"], answer["choices"][0]["token_ids"]) == (expected, loop.script)


async def test_special_tokens_are_text_on_request(session: ClientSession) -> None:
    body = {**PROMPT, "ignore_eos": True, "max_tokens": 3}
    async with replica(FakeLoop("a<|im_end|>b")) as url:
        _, skipped = await post(session, url + COMPLETIONS, body)
        _, shown = await post(session, url + COMPLETIONS, {**body, "skip_special_tokens": False})
    assert skipped["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|im_end|>b"


async def test_request_id_is_kept_or_made_and_decides_the_seed(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        for given in ("same", "same", "other", "not an id", "x" * 200):
            async with session.post(url + CHAT, json=BODY, headers={"X-Request-Id": given}) as response:
                shown = response.headers["X-Request-Id"]
                assert (shown == given) is (given in ("same", "other"))
                assert (await response.json())["id"] == f"chatcmpl-{shown}"
        async with session.post(url + CHAT, json={**BODY, "stream": True}, headers={"X-Request-Id": "s"}) as response:
            assert response.headers["X-Request-Id"] == "s"
            await response.read()
        async with session.get(url + "/nowhere", headers={"X-Request-Id": "e"}) as response:
            assert response.headers["X-Request-Id"] == "e"
    seeds = [sequence.params.seed for sequence in loop.submitted]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 5


async def test_models_lists_the_served_model(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        async with session.get(url + "/v1/models") as response:
            listed = await response.json()
        async with session.get(url + "/v1/models/tiny-moe") as response:
            one = await response.json()
        async with session.get(url + "/v1/models/org/other") as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
    assert listed["object"] == "list" and listed["data"] == [one]
    assert one["id"] == "tiny-moe" and one["object"] == "model" and one["max_model_len"] == 4096


async def test_health_is_good_only_while_requests_are_served(session: ClientSession) -> None:
    loop, lifecycle = FakeLoop(), Lifecycle()

    async def health() -> tuple[int, str]:
        async with session.get(url + "/health") as response:
            body = await response.json()
            assert response.status == 200 or body["reason"]
            return response.status, body["status"]

    async with replica(loop, lifecycle=lifecycle) as url:
        assert await health() == (503, "loading")
        lifecycle.state = EngineState.READY
        assert await health() == (200, "ready")
        loop.is_stalled = True
        assert await health() == (503, "stalled")
        loop.is_stalled = False
        lifecycle.state, lifecycle.reason = EngineState.FAILED, "the worker died"
        assert await health() == (503, "failed")


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.DRAINING, EngineState.FAILED])
async def test_replica_that_is_not_ready_asks_to_come_again(session: ClientSession, state: EngineState) -> None:
    loop = FakeLoop()
    async with replica(loop, lifecycle=Lifecycle(state=state)) as url:
        for path, body in ((CHAT, BODY), (COMPLETIONS, {**PROMPT, "stream": True})):
            async with session.post(url + path, json=body) as response:
                error = (await response.json())["error"]
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                assert str(state) in error["message"] and error["type"] == "service_unavailable"
    assert not loop.submitted


async def test_full_queue_is_a_503(session: ClientSession) -> None:
    loop = FakeLoop()
    loop.is_full = True
    async with replica(loop) as url:
        status, body = await post(session, url + CHAT, {**BODY, "stream": True})
    assert (status, body["error"]["message"]) == (503, "the queue is full")


async def test_errors_have_openais_shape(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        assert await post(session, url + CHAT, {**BODY, "temperature": -1}) == (
            400,
            {
                "error": {
                    "message": "temperature is -1, must be a number from 0 to 2",
                    "type": "invalid_request_error",
                    "param": "temperature",
                    "code": None,
                }
            },
        )
        status, body = await post(session, url + CHAT, {**BODY, "model": "gpt-4o"})
        assert status == 404 and body["error"]["code"] == "model_not_found" and body["error"]["param"] == "model"
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 5000})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "5000 tokens, limit is 4095" in body["error"]["message"]
        async with session.post(url + CHAT, data=b"\xff\x00{") as response:
            assert response.status == 400 and "not valid JSON" in (await response.json())["error"]["message"]


async def test_unknown_routes_and_methods_have_openais_shape(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        async with session.get(url + "/v1/nowhere") as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "invalid_request_error"
        async with session.get(url + CHAT) as response:
            assert response.status == 405 and response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["message"]


async def test_prompt_beyond_the_cache_is_refused(session: ClientSession) -> None:
    loop = FakeLoop()
    loop.max_cached = 50
    async with replica(loop) as url:
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 60})
        assert status == 400 and "60 tokens, limit is 49: the KV cache" in body["error"]["message"]
        status, body = await post(session, url + COMPLETIONS, {"prompt": [5] * 40, "ignore_eos": True})
        assert status == 200 and body["usage"]["completion_tokens"] == 10


async def test_api_key_guards_openais_routes_alone(session: ClientSession) -> None:
    config = dataclasses.replace(CONFIG, api_key="s\N{LATIN SMALL LETTER E WITH ACUTE}cret")
    async with replica(FakeLoop(), config=config) as url:
        for header in (None, "Bearer wrong", "Basic secret", "Bearer", "\udcff"):
            headers: dict[str, str] = {} if header is None else {"Authorization": header}
            async with session.get(url + "/v1/models", headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        status, _ = await post(session, url + CHAT, BODY)
        assert status == 401
        headers = {"Authorization": f"Bearer {config.api_key}"}
        assert (await post(session, url + CHAT, BODY, headers=headers))[0] == 200
        for path in ("/health", "/metrics", "/version"):
            async with session.get(url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_body_over_the_limit_is_refused(session: ClientSession, is_declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 1024

    config = dataclasses.replace(CONFIG, max_body_mb=1 / 64)
    loop = FakeLoop()
    async with (
        replica(loop, config=config) as url,
        session.post(url + CHAT, data=b"x" * 40_960 if is_declared else pieces()) as response,
    ):
        message = (await response.json())["error"]["message"]
        assert response.status == 413 and "limit is 16384 (--max-body-mb)" in message


async def test_compressed_body_is_bounded_by_what_it_unpacks_to(session: ClientSession) -> None:
    config = dataclasses.replace(CONFIG, max_body_mb=1 / 64)
    headers = {"Content-Encoding": "gzip"}
    async with replica(FakeLoop(), config=config) as url:
        bomb = gzip.compress(b" " * 10_000_000)
        async with session.post(url + CHAT, data=bomb, headers=headers) as response:
            assert response.status == 413
        good = gzip.compress(json.dumps(BODY).encode())
        async with session.post(url + CHAT, data=good, headers=headers) as response:
            assert response.status == 200
        async with session.post(url + CHAT, data=b"no gzip at all", headers=headers) as response:
            assert response.status == 400 and "cannot be read" in (await response.json())["error"]["message"]


@asynccontextmanager
async def raw_client(url: str, request: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has sent these bytes; it ends abruptly."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def tasks_end(before: set[asyncio.Task[Any]]) -> None:
    """Waits until only these tasks are left."""
    async with asyncio.timeout(5):
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


def raw_request(body: dict[str, Any], *, path: str = CHAT, missing: int = 0) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    return head + text[: len(text) - missing]


async def test_half_a_body_and_silence_ends_with_408() -> None:
    config = dataclasses.replace(CONFIG, client_timeout_s=0.1)
    async with (
        replica(FakeLoop(), config=config) as url,
        raw_client(url, raw_request(BODY, missing=10)) as (reader, _),
    ):
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)


async def test_client_that_leaves_in_its_body_leaves_nothing_behind() -> None:
    loop = FakeLoop()
    async with replica(loop, steps=False) as url:
        before = asyncio.all_tasks()
        async with raw_client(url, raw_request(BODY, missing=10)):
            await asyncio.sleep(0.05)
            assert asyncio.all_tasks() - before
        await tasks_end(before)
    assert not loop.submitted


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
async def test_client_that_leaves_frees_its_sequence(is_stream: bool, num_steps: int) -> None:
    loop = FakeLoop("abcdefgh")
    async with replica(loop, steps=False) as url:
        before = asyncio.all_tasks()
        async with raw_client(url, raw_request({**BODY, "stream": is_stream})):
            await loop.until(lambda: len(loop.running) == 1)
            for _ in range(num_steps):
                loop.step()
                await asyncio.sleep(0.01)
        await loop.until(lambda: not loop.running)
        assert loop.num_aborted == 1 and loop.num_steps == num_steps  # at once, without another step
        await tasks_end(before)


async def test_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    loop = FakeLoop("abcdefgh")
    loop.step_s = 0.002
    draw = random.Random(5)
    async with replica(loop) as url:
        before = asyncio.all_tasks()

        async def visit(is_stream: bool, stay_s: float) -> None:
            async with raw_client(url, raw_request({**BODY, "stream": is_stream})):
                await asyncio.sleep(stay_s)

        await asyncio.gather(*(visit(draw.random() < 0.5, draw.uniform(0, 0.2)) for _ in range(100)))
        await loop.until(lambda: not loop.running)
        await tasks_end(before)
        assert 0 < loop.num_aborted == len(loop.submitted) <= 100


async def test_all_choices_are_freed_when_their_client_leaves() -> None:
    loop = FakeLoop("abcdefgh")
    body = {"prompt": ["a", "b", "c"], "stream": True}
    async with replica(loop, steps=False) as url:
        async with raw_client(url, raw_request(body, path=COMPLETIONS)):
            await loop.until(lambda: len(loop.running) == 3)
            loop.step()
            await asyncio.sleep(0.01)
        await loop.until(lambda: not loop.running)
        assert loop.num_aborted == 3


async def test_slow_reader_holds_tokens_not_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop("abcdefgh ")
    taken: list[int] = []
    original = OutputStream.take

    def take(stream: OutputStream) -> TokenOutput | None:
        output = original(stream)
        taken.append(len(output.token_ids) if output is not None else 0)
        return output

    monkeypatch.setattr(OutputStream, "take", take)
    monkeypatch.setattr("replica.openai_api.output_tokens", lambda *args, **kwargs: 60_000)
    async with (
        replica(loop, steps=False) as url,
        raw_client(url, raw_request({**BODY, "stream": True})) as (reader, _),
    ):
        await loop.until(lambda: len(loop.running) == 1)
        sequence = loop.running[0]
        while loop.running:
            loop.step()
            await asyncio.sleep(0)
        assert len(taken) < 50_000  # the handler waits for the reader, though tokens come
        received = b""
        async with asyncio.timeout(60):
            while b"[DONE]" not in received[-100:]:
                received += await reader.read(2**20)
        text = received.decode()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert content == MODEL.tokenizer.decode(sequence.output_ids)
        assert max(taken) > 1000


async def test_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, client_timeout_s=0.2)
    loop = FakeLoop("abcdefgh ")
    monkeypatch.setattr("replica.openai_api.output_tokens", lambda *args, **kwargs: 10**9)
    async with replica(loop, config=config) as url, raw_client(url, raw_request({**BODY, "stream": True})):
        await loop.until(lambda: loop.num_aborted == 1)


async def test_step_that_fails_before_the_first_token_is_a_500(session: ClientSession) -> None:
    for is_stream in (True, False):
        loop = FakeLoop()
        async with replica(loop, steps=False) as url:
            asking = asyncio.create_task(post(session, url + CHAT, {**BODY, "stream": is_stream}))
            await loop.until(lambda: bool(loop.running))  # noqa: B023
            loop.end(loop.running[0], FinishReason.ERROR, "the worker died")
            status, body = await asking
            assert (status, body["error"]["message"], body["error"]["type"]) == (500, "the worker died", "server_error")


async def test_step_that_fails_in_mid_stream_ends_it_with_an_error_and_without_done(session: ClientSession) -> None:
    loop = FakeLoop("abcdefgh")
    async with replica(loop, steps=False) as url:
        asking = asyncio.create_task(stream(session, url + CHAT, BODY))
        await loop.until(lambda: bool(loop.running))
        loop.step()
        await asyncio.sleep(0.05)
        loop.end(loop.running[0], FinishReason.ERROR, "the worker died")
        events = await asking
    assert events[-1] == {"error": {"message": "the worker died", "type": "server_error", "param": None, "code": None}}
    assert events[-2]["choices"][0]["delta"]["content"]


async def test_stream_that_failed_closes_its_connection() -> None:
    loop = FakeLoop("abcdefgh")
    async with (
        replica(loop, steps=False) as url,
        raw_client(url, raw_request({**BODY, "stream": True})) as (reader, _),
    ):
        await loop.until(lambda: bool(loop.running))
        loop.step()
        await asyncio.sleep(0.05)
        loop.end(loop.running[0], FinishReason.ERROR, "the worker died")
        received = await asyncio.wait_for(reader.read(), 5)  # to the end of the connection
    assert b'"the worker died"' in received and b"[DONE]" not in received


async def test_request_that_the_replica_aborts_is_a_503(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop, steps=False) as url:
        asking = asyncio.create_task(post(session, url + CHAT, BODY))
        await loop.until(lambda: bool(loop.running))
        loop.abort(loop.running)
        assert (await asking)[0] == 503


async def test_text_that_cannot_be_decoded_ends_its_own_request_only(
    session: ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = ByteDetokenizer.push

    def push(self: ByteDetokenizer, token_ids: Any) -> str:
        if failing:
            raise OverflowError("no such token")
        return original(self, token_ids)

    monkeypatch.setattr(ByteDetokenizer, "push", push)
    loop = FakeLoop()
    failing = False
    async with replica(loop, steps=False) as url:
        undisturbed = asyncio.create_task(stream(session, url + CHAT, BODY))
        await loop.until(lambda: len(loop.running) == 1)
        loop.step()
        await asyncio.sleep(0.05)
        failing = True
        with caplog.at_level(logging.CRITICAL):
            broken = asyncio.create_task(post(session, url + CHAT, BODY))
            await loop.until(lambda: len(loop.running) == 2)
            loop.running[1].stream.put(TokenOutput((5,)))
            status, body = await broken
        assert (status, body["error"]["message"]) == (500, "internal error")
        failing = False
        await loop.until(lambda: len(loop.running) == 1)
        while loop.running:
            loop.step()
        assert (await undisturbed)[-1] == "[DONE]"


async def test_metrics_follow_requests(session: ClientSession) -> None:
    loop = FakeLoop()

    async def samples() -> dict[str, float]:
        async with session.get(url + "/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    labels = 'engine="0",model_name="tiny-moe"'
    async with replica(loop) as url:
        await post(session, url + CHAT, BODY)
        await stream(session, url + CHAT, BODY)
        await post(session, url + CHAT, {**BODY, "max_tokens": 1})
        await post(session, url + CHAT, {**BODY, "n": 3})
        await session.get(url + "/nowhere/" + "x" * 50)
        found = await samples()
        prompt_tokens = len(loop.submitted[0].prompt_ids)
    assert found[f"vllm:prompt_tokens_total{{{labels}}}"] == 3 * prompt_tokens
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 2 * len(loop.script) + 1
    stop = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny-moe"}'
    assert found[stop] == 2 and found[stop.replace("stop", "length")] == 1
    assert found[f"vllm:num_requests_running{{{labels}}}"] == 0
    assert found[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 3
    assert found[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 3
    assert found[f"vllm:request_time_per_output_token_seconds_count{{{labels}}}"] == 2
    assert found[f"lockstep_steps_total{{{labels}}}"] == loop.num_steps
    http = 'lockstep_http_requests_total{engine="0",model_name="tiny-moe",path="%s",status="%d"}'
    assert found[http % (CHAT, 200)] == 3 and found[http % (CHAT, 400)] == 1 and found[http % ("", 404)] == 1


async def test_version_is_told(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url, session.get(url + "/version") as response:
        assert (await response.json())["version"]
