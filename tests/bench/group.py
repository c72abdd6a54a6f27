"""What lockstep costs a running group: the wait for releases, a parked group's CPU, and the wake from it.

    python -m tests.bench.group [--parked-s 20] [--wakes 20]

Starts `replica serve` with the demo model as dp 2 x tp 4, all on this machine. Prints a table and, as the last line,
JSON. The wake is measured by the replica itself: from a request's arrival to the release of its first step, while the
same engine encodes a prompt of 100,000 tokens, and again without. A copy of the model claims a context just so long
that such a prompt is encoded before it is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from tests.commands import DEMO_MODEL, Command, Commands

MODEL: Final = "tiny-moe"
LONG_PROMPT: Final = "7 + 5 = ? " * 25_000  # at least 100,000 tokens, which is checked
LONG_TOKENS: Final = 100_000
CONTEXT: Final = 32_768  # tokens; a prompt that cannot fit is refused unencoded, so this is over its characters / 16
LOAD_S: Final = 10.0
LOAD_STREAMS: Final = 16
WAIT_BAR, PARKED_BAR, WAKE_BAR_S = 0.02, 0.01, 0.005


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric's samples."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, max_tokens: int) -> int:
    """One completion; its status."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def wait_share(session: aiohttp.ClientSession, urls: list[str]) -> float:
    """Under load on both replicas: time that steps waited for their release, over that of their forwards."""
    names = ("lockstep_barrier_wait_seconds_total", "lockstep_forward_seconds_total")
    before = [sum([await metric(session, url, name) for url in urls]) for name in names]
    until_s = time.monotonic() + LOAD_S

    async def load(url: str) -> None:
        while time.monotonic() < until_s:
            assert await complete(session, url, "What is 57 + 68?", 64) == 200

    await asyncio.gather(*(load(url) for url in urls for _ in range(LOAD_STREAMS // len(urls))))
    after = [sum([await metric(session, url, name) for url in urls]) for name in names]
    wait_s, forward_s = (b - a for a, b in zip(before, after, strict=True))
    return wait_s / forward_s


def long_context_model(folder: Path) -> Path:
    """The demo model, claiming a context of CONTEXT tokens."""
    model = shutil.copytree(DEMO_MODEL, folder / MODEL)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return model


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """User and system time of each process so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    times = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        times[pid] = (int(fields[11]) + int(fields[12])) / ticks
    return times


async def parked_shares(group: Command, parked_s: float) -> list[float]:
    """Share of a core that each of the group's processes takes while nobody asks anything."""
    before = cpu_seconds(group.pids())
    await asyncio.sleep(parked_s)
    after = cpu_seconds(list(before))
    return sorted((after[pid] - before[pid]) / parked_s for pid in before)


async def wakes(session: aiohttp.ClientSession, url: str, count: int, *, while_encoding: bool) -> list[float]:
    """Seconds from arrival to the first step, of requests to a parked group."""
    name = "vllm:request_queue_time_seconds_sum"
    found: list[float] = []
    for _ in range(count):
        long = asyncio.create_task(complete(session, url, LONG_PROMPT, 1)) if while_encoding else None
        await asyncio.sleep(0.05)  # its body is read and the encoding has begun
        before = await metric(session, url, name)
        assert await complete(session, url, "Hello", 1) == 200
        is_encoding = long is not None and not long.done()
        if is_encoding == while_encoding:
            found.append(await metric(session, url, name) - before)
        if long is not None:
            assert await long == 400, "a prompt over the context is refused, after it was encoded"
    assert len(found) >= count // 2, f"only {len(found)} of {count} wakes fell into an encoding"
    return found


async def measure(group: Command, parked_s: float, num_wakes: int) -> dict[str, float]:
    """All figures."""
    urls = group.urls
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        body = {"model": MODEL, "prompt": LONG_PROMPT}
        async with session.post(f"{urls[0]}/tokenize", json=body) as answer:
            told = await answer.json()
        num_tokens = told.get("count", 0)
        assert num_tokens >= LONG_TOKENS, f"the long prompt has {num_tokens} tokens: {told}"
        share = await wait_share(session, urls)
        await asyncio.sleep(1.0)
        parked = await parked_shares(group, parked_s)
        calm = await wakes(session, urls[0], num_wakes, while_encoding=False)
        busy = await wakes(session, urls[0], num_wakes, while_encoding=True)
    return {
        "wait_share": round(share, 5),
        "parked_share_max": round(parked[-1], 5),
        "parked_share_sum": round(sum(parked), 5),
        "wake_p50_ms": round(statistics.median(calm) * 1e3, 2),
        "wake_max_ms": round(max(calm) * 1e3, 2),
        "wake_encoding_p50_ms": round(statistics.median(busy) * 1e3, 2),
        "wake_encoding_max_ms": round(max(busy) * 1e3, 2),
        "wakes_encoding": len(busy),
    }


def main() -> int:
    """Prints the table, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parked-s", type=float, default=20.0)
    parser.add_argument("--wakes", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Commands(Path(folder)) as commands:
        model = long_context_model(Path(folder))
        group = commands.group("--port", "0", "--max-body-mb", "8", dp=2, tp=4, model=model)
        figures = asyncio.run(measure(group, args.parked_s, args.wakes))
    bars = {
        "wait_share": WAIT_BAR,
        "parked_share_max": PARKED_BAR,
        "wake_encoding_p50_ms": WAKE_BAR_S * 1e3,
        "wake_encoding_max_ms": WAKE_BAR_S * 1e3,
    }
    for name, value in figures.items():
        print(f"{name:<24}{value:>10}" + (f"   bar {bars[name]:g}" if name in bars else ""))
    print(json.dumps({"figures": figures, "bars": bars}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
