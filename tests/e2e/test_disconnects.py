"""Clients that hang up at any moment leave nothing behind: no sequence, no block, no handler, no socket."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Final
from urllib.parse import urlsplit

import pytest
import requests

from tests.commands import wait_until
from tests.e2e.cluster import ANSWER, MODEL_NAME, QUESTION, Cluster, num_answered

NUM_CLIENTS: Final = 200
SEED: Final = 7
LONGEST_STAY_S: Final = 4.0
# Both servers keep idle connections for some seconds; after that the count of open sockets is what it was.
SOCKETS_TIMEOUT_S: Final = 40.0


def request_bytes(*, stream: bool) -> bytes:
    """A request whose answer takes far longer than any client stays."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Count from 1 to 99."}],
        "max_completion_tokens": 3000,
        "ignore_eos": True,
        "stream": stream,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def hang_up(url: str, *, stay_s: float, stream: bool, sent_share: float, is_rude: bool) -> str:
    """One client, gone after `stay_s`. `sent_share` below 1 means in the middle of its own request.

    Returns how far it had come. A rude one resets its connection, the others close it.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    request = request_bytes(stream=stream)
    writer.write(request[: int(len(request) * sent_share)])
    received = 0
    try:
        async with asyncio.timeout(stay_s):
            while data := await reader.read(4096):
                received += len(data)
            raise AssertionError(f"the proxy ended an answer after {received} bytes")
    except TimeoutError:
        pass  # this client's moment has come
    finally:
        if is_rude:
            writer.transport.abort()
        writer.close()
    if sent_share < 1:
        return "sending"
    return "reading" if received else "waiting"


@pytest.mark.timeout(240)
async def test_200_clients_that_hang_up_leave_nothing_behind(cluster: Cluster) -> None:
    wait_until(lambda: not cluster.busy(), "an idle cluster before the test")
    answered_before = num_answered(cluster.url)
    rng = random.Random(SEED)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                hang_up(
                    cluster.url,
                    stay_s=rng.uniform(0.0, LONGEST_STAY_S),
                    stream=rng.random() < 0.6,
                    sent_share=rng.choice([1, 1, 1, 1, rng.random()]),
                    is_rude=rng.random() < 0.5,
                )
            )
            for _ in range(NUM_CLIENTS)
        ]
    moments = Counter(task.result() for task in running)
    print(f"\nhung up while {dict(moments)}")
    assert set(moments) == {"sending", "waiting", "reading"}

    idle_s = await asyncio.to_thread(wait_until, lambda: not cluster.busy(), "counters back at zero")
    print(f"nothing running, waiting or held {idle_s:.2f} s after the last one")
    # Every request whose head arrived was brought to an end, so no handler is left with one.
    num_whole = NUM_CLIENTS - moments["sending"]
    assert num_answered(cluster.url) - answered_before >= num_whole
    await asyncio.to_thread(
        wait_until,
        lambda: cluster.open_files() <= cluster.idle_files,
        f"at most {cluster.idle_files} open files and sockets, as before the first request",
        SOCKETS_TIMEOUT_S,
    )

    response = await asyncio.to_thread(
        requests.post,
        f"{cluster.url}/v1/chat/completions",
        json={"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}]},
        timeout=30,
    )
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
