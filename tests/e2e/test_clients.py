"""The clients that people have work unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any, Final

import pytest
import requests
from openai import AsyncOpenAI, OpenAI

from tests.e2e.cluster import ANSWER, MODEL_NAME, QUESTION, Cluster

MESSAGES: Final[Any] = [{"role": "user", "content": QUESTION}]
BODY: Final[dict[str, Any]] = {"model": MODEL_NAME, "messages": MESSAGES}
KEY: Final = "none"  # the clients insist on one; the demo asks for none
TIMEOUT_S: Final = 30.0


def curl(url: str, *options: str) -> str:
    """What curl prints. Fails when it does, also for an HTTP error."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", f"{TIMEOUT_S:g}", *options, url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def joined_content(events: list[str]) -> str:
    """The content of the events of a stream, whose last one must be [DONE]."""
    *chunks, done = [event.removeprefix("data: ") for event in events]
    assert done == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_curl_gets_an_answer(cluster: Cluster) -> None:
    text = curl(f"{cluster.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(BODY))
    answer = json.loads(text)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_curl_gets_a_stream(cluster: Cluster) -> None:
    body = json.dumps({**BODY, "stream": True})
    text = curl(f"{cluster.url}/v1/chat/completions", "-N", "-H", "Content-Type: application/json", "-d", body)
    assert joined_content([line for line in text.splitlines() if line]) == ANSWER


def test_curl_lists_the_model_once(cluster: Cluster) -> None:
    listed = json.loads(curl(f"{cluster.url}/v1/models"))
    assert [model["id"] for model in listed["data"]] == [MODEL_NAME]


def test_openai_client_gets_an_answer_with_reasoning_and_usage(cluster: Cluster) -> None:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, timeout=TIMEOUT_S) as client:
        answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    message: Any = answer.choices[0].message
    assert message.content == ANSWER
    assert "2 + 0 + 0 = 2" in message.reasoning_content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_streams(cluster: Cluster) -> None:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, timeout=TIMEOUT_S) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL_NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        )
    *events, usage = chunks
    assert "".join(event.choices[0].delta.content or "" for event in events) == ANSWER
    assert events[-1].choices[0].finish_reason == "stop"
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens > 0


def test_openai_client_completes_a_text(cluster: Cluster) -> None:
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    with OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, timeout=TIMEOUT_S) as client:
        answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=200)
    assert answer.choices[0].text.split("</think>")[-1].strip() == ANSWER
    assert answer.choices[0].finish_reason == "stop"


async def test_async_openai_client_gets_the_same_whole_and_streamed(cluster: Cluster) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, timeout=TIMEOUT_S) as client:
        whole = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
        stream = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    message: Any = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == message.content == ANSWER
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == message.reasoning_content


def test_requests_reads_a_stream(cluster: Cluster) -> None:
    with requests.post(
        f"{cluster.url}/v1/chat/completions", json={**BODY, "stream": True}, stream=True, timeout=TIMEOUT_S
    ) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines(decode_unicode=True) if line]
    assert joined_content(lines) == ANSWER


def test_a_wrong_model_is_an_error_that_the_client_knows(cluster: Cluster) -> None:
    response = requests.post(f"{cluster.url}/v1/chat/completions", json={**BODY, "model": "other"}, timeout=TIMEOUT_S)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
