"""However a request ends, nothing of it stays and no other notices: clients that leave or stall, steps that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from typing import Any, Final

import pytest
from aiohttp import ClientSession

from replica.api.tokenizer import ByteDetokenizer
from replica.request import FinishReason, OutputStream, TokenOutput
from tests.protocol.fake_loop import CONFIG, MODEL, FakeLoop, replica
from tests.protocol.http_probe import BODY, CHAT, COMPLETIONS, post, raw_client, raw_request, stream, tasks_end


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
    monkeypatch.setattr("replica.api.openai_api.output_tokens", lambda *args, **kwargs: 60_000)
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
    monkeypatch.setattr("replica.api.openai_api.output_tokens", lambda *args, **kwargs: 10**9)
    async with replica(loop, config=config) as url, raw_client(url, raw_request({**BODY, "stream": True})):
        await loop.until(lambda: loop.num_aborted == 1)


LOST: Final = {"message": "the worker died", "type": "service_unavailable", "param": None, "code": "replica_lost"}
FAILED: Final = {"message": "too hard", "type": "invalid_request_error", "param": None, "code": "grammar_failed"}
# How a sequence ends without an answer, the status while there is still one to give, and the error.
ENDS: Final = [(FinishReason.LOST, "the worker died", 503, LOST), (FinishReason.ERROR, "too hard", 400, FAILED)]


@pytest.mark.parametrize(("reason", "why", "status", "error"), ENDS)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_answer_that_fails_before_its_first_token_has_a_status(
    session: ClientSession, is_stream: bool, reason: FinishReason, why: str, status: int, error: Any
) -> None:
    loop = FakeLoop()
    async with replica(loop, steps=False) as url:
        asking = asyncio.create_task(post(session, url + CHAT, {**BODY, "stream": is_stream}))
        await loop.until(lambda: bool(loop.running))
        loop.end(loop.running[0], reason, why)
        assert await asking == (status, {"error": error})


@pytest.mark.parametrize(("reason", "why", "status", "error"), ENDS)
async def test_stream_that_fails_ends_with_the_error_and_without_done(
    session: ClientSession, reason: FinishReason, why: str, status: int, error: Any
) -> None:
    loop = FakeLoop("abcdefgh")
    async with replica(loop, steps=False) as url:
        asking = asyncio.create_task(stream(session, url + CHAT, BODY))
        await loop.until(lambda: bool(loop.running))
        loop.step()
        await asyncio.sleep(0.05)
        loop.end(loop.running[0], reason, why)
        events = await asking
    assert events[-1] == {"error": error}
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
        loop.end(loop.running[0], FinishReason.LOST, "the worker died")
        received = await asyncio.wait_for(reader.read(), 5)  # to the end of the connection
    assert b'"the worker died"' in received and b"[DONE]" not in received


async def test_request_that_the_replica_aborts_is_a_503_and_was_begun(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop, steps=False) as url:
        asking = asyncio.ensure_future(session.post(url + CHAT, json=BODY))
        await loop.until(lambda: bool(loop.running))
        loop.abort(loop.running)
        async with await asking as response:
            assert response.status == 503 and "Retry-After" in response.headers
            assert "X-Not-Begun" not in response.headers


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
