"""Real clients against a replica whose step loop is a script: the openai package, sync and async, and requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import openai
import pytest
import requests

from replica.request import FinishReason
from tests.protocol.fake_loop import FakeLoop, replica

MESSAGES: Final[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
ANSWER: Final = "yes \N{ROCKET}"
MODEL: Final = "tiny-moe"


def sync_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)


async def test_sync_openai_client_asks_whole_and_streamed() -> None:
    def ask() -> None:
        with sync_client(url) as client:
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            message: Any = answer.choices[0].message
            assert (message.content, message.reasoning_content) == (ANSWER, "hm")
            assert answer.usage is not None and answer.usage.total_tokens > answer.usage.completion_tokens > 0
            with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as chunks:
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
            completion = client.completions.create(model=MODEL, prompt="one", max_tokens=5, temperature=0)
            assert completion.choices[0].text and completion.choices[0].finish_reason == "length"
            assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL

    async with replica(FakeLoop()) as url:
        await asyncio.to_thread(ask)


async def test_async_openai_client_asks_many_at_once() -> None:
    async with (
        replica(FakeLoop()) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):

        async def whole() -> str | None:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            return answer.choices[0].message.content

        async def streamed() -> str:
            chunks = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            text, usage = "", None
            async for chunk in chunks:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage
            assert usage is not None and usage.completion_tokens > 0
            return text

        answers = await asyncio.gather(*(ask() for ask in [whole, streamed] * 8))
    assert answers == [ANSWER] * 16


async def test_openai_client_raises_its_own_errors() -> None:
    def ask() -> None:
        with sync_client(url) as client:
            with pytest.raises(openai.BadRequestError) as bad:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as unknown:
                client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
            assert unknown.value.code == "model_not_found"
            loop.is_full = True
            with pytest.raises(openai.InternalServerError, match="the queue is full"):
                client.chat.completions.create(model=MODEL, messages=MESSAGES)

    loop = FakeLoop()
    async with replica(loop) as url:
        await asyncio.to_thread(ask)


async def test_openai_client_notices_a_stream_that_fails() -> None:
    def ask() -> None:
        with (
            sync_client(url) as client,
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as chunks,
            pytest.raises(openai.APIError, match="the worker died"),
        ):
            list(chunks)

    loop = FakeLoop("abcdefgh")
    async with replica(loop, steps=False) as url:
        asking = asyncio.create_task(asyncio.to_thread(ask))
        await loop.until(lambda: bool(loop.running))
        loop.step()
        await asyncio.sleep(0.05)
        loop.end(loop.running[0], FinishReason.ERROR, "the worker died")
        await asking


async def test_openai_client_that_closes_a_stream_frees_its_sequence() -> None:
    def ask() -> None:
        with sync_client(url) as client:
            chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            next(iter(chunks))
            chunks.close()

    loop = FakeLoop("abcdefgh")
    loop.step_s = 0.01
    async with replica(loop) as url:
        await asyncio.to_thread(ask)
        await loop.until(lambda: not loop.running)
    assert loop.num_aborted == 1


async def test_requests_reads_a_stream_line_by_line() -> None:
    def ask() -> str:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        with requests.post(url + "/v1/chat/completions", json=body, stream=True, timeout=20) as response:
            lines = [line for line in response.iter_lines(decode_unicode=True) if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    # U+2028 and U+0085 end a line for str.splitlines, which such clients use.
    async with replica(FakeLoop("a\u2028b\x85c\N{ROCKET}<|im_end|>")) as url:
        assert await asyncio.to_thread(ask) == "a\u2028b\x85c\N{ROCKET}"
