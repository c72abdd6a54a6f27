"""A replica of the demo model with a stream beside whatever a test does to it, which must not notice any of that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import ClientSession, ClientTimeout

from tests.model_replica import ModelReplica, model_replica

PROBE: Final[dict[str, Any]] = {
    **{"prompt": "What is 1 + 2?", "max_tokens": 16, "ignore_eos": True, "temperature": 0, "stream": True},
    "stream_options": {"include_usage": True},
}
TIMEOUT: Final = ClientTimeout(60)
PAUSE_S: Final = 0.05  # between two streams: the replica should mostly do what the test asks


@dataclass
class Probe:
    """What the stream has seen so far."""

    said: str = ""  # what it says, always
    num_streams: int = 0
    longest_gap_s: float = 0.0  # without an event


@asynccontextmanager
async def probed_replica(**settings: Any) -> AsyncIterator[tuple[ModelReplica, Probe]]:
    """For settings see model_replica. At the end its counters must say that nothing is left, either."""
    async with model_replica(**settings) as served, ClientSession() as session:
        probe, done = Probe(), asyncio.Event()
        probe.said = await _ask(session, served.url, Probe())

        async def watch() -> None:
            while not done.is_set():
                said = await _ask(session, served.url, probe)
                assert said == probe.said, f"the stream beside said {said!r} instead of {probe.said!r}"
                probe.num_streams += 1
                await asyncio.sleep(PAUSE_S)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            try:
                yield served, probe
            finally:
                done.set()
        assert probe.num_streams
        await served.until(lambda: not served.loop.num_unfinished)
        async with session.get(served.url + "/metrics") as response:
            samples = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[:1] != "#"]
        left = {name: value for name, value in samples if name.startswith(COUNTERS) and float(value)}
        assert not left


COUNTERS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lockstep_queued_prefill_tokens")


async def _ask(session: ClientSession, url: str, probe: Probe) -> str:
    """All that one stream says, its usage included."""
    said: list[Any] = []
    last_s = time.monotonic()
    async with session.post(url + "/v1/completions", json=PROBE, timeout=TIMEOUT) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                said.append(line[6:].strip().decode())
                now_s = time.monotonic()
                probe.longest_gap_s, last_s = max(probe.longest_gap_s, now_s - last_s), now_s
    assert said[-1] == "[DONE]", said
    chunks = [json.loads(one) for one in said[:-1]]
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    usage = chunks[-1]["usage"]
    return "".join(texts) + f" ({usage['prompt_tokens']} and {usage['completion_tokens']} tokens)"
