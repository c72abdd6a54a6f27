"""Ten minutes of load on a real proxy and a real replica: no process grows, no file and no task is left (`make flat`).

The load is that of traffic.py, by clients that come and go, with heads in between that are no HTTP. FLAT_S shortens it;
it needs some minutes, until caches and allocators are full, before the memory says anything.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.commands import Commands, wait_until
from tests.e2e.cluster import Cluster, metric, num_idle_files, num_live
from tests.http_requests import MALFORMED
from tests.soak.growth import rss_mib, slope
from tests.soak.traffic import Client, draw_ask

LOAD_S: Final = float(os.environ.get("FLAT_S", "600"))
WARM_UP_S: Final = LOAD_S / 2  # a worker's memory grows by steps, with the largest batch that it has seen
NUM_CLIENTS: Final = 8
PAUSE_S: Final = 0.8  # of a client between two requests, in the mean: some ten requests a second
SAMPLE_S: Final = 5.0
MAX_TOKENS: Final = 96
MAX_SLOPE_MIB: Final = 1.0  # a minute
KV_CACHE_GB: Final = "0.03125"  # so little that all of it is soon in use
SOCKETS_TIMEOUT_S: Final = 60.0  # both servers keep idle connections for some seconds
Sizes = defaultdict[tuple[int, str], list[tuple[float, float]]]  # process id and name -> of (minute, MiB)
TASKS: Final = ("lockstep_proxy_tasks", "lockstep_tasks")


@pytest.mark.timeout(LOAD_S + 300)
async def test_ten_minutes_of_load_leave_the_memory_files_and_tasks_of_every_process_as_they_were(
    tmp_path: Path,
) -> None:
    with Commands(tmp_path) as commands:
        proxy = commands.proxy()
        replicas = commands.replicas(proxy.url, "--dtype", "float32", "--kv-cache-gb", KV_CACHE_GB)
        wait_until(lambda: num_live(proxy.url) == 1, "the replica at the proxy")
        cluster = Cluster(proxy, replicas, idle_files=num_idle_files(proxy, *replicas))
        idle_tasks = tasks(cluster)
        statuses: Counter[int | None] = Counter()
        sizes: Sizes = defaultdict(list)
        until_s = time.monotonic() + LOAD_S
        async with asyncio.TaskGroup() as running:
            for number in range(NUM_CLIENTS):
                running.create_task(ask_on(proxy.url, number, until_s, statuses))
            running.create_task(weigh(cluster, until_s, sizes))
        slopes = slopes_of(sizes)
        print(f"\n{LOAD_S:g} s, {sum(statuses.values())} requests, statuses {dict(statuses)}")
        for (pid, name), grown_mib in slopes.items():
            told = ", ".join(f"{mib:.1f}" for _, mib in sizes[pid, name][::12])
            print(f"{name}: slope {grown_mib:.3f} MiB a minute, MiB after each minute: {told}")
        await asyncio.to_thread(wait_until, lambda: not cluster.busy(), "counters back at zero")
        await asyncio.to_thread(
            wait_until,
            lambda: cluster.open_files() <= cluster.idle_files and tasks(cluster) <= idle_tasks,
            f"at most {cluster.idle_files} open files and {idle_tasks} tasks, as before the first request",
            SOCKETS_TIMEOUT_S,
        )
        print(f"{cluster.idle_files} open files and {idle_tasks} tasks before, {cluster.open_files()} and ", end="")
        print(f"{tasks(cluster)} after")
    assert statuses[200] > statuses.total() / 2 and not [status for status in statuses if status and status >= 500]
    assert len(slopes) >= 4, "proxy, supervisor, engine, worker"
    assert max(slopes.values()) < MAX_SLOPE_MIB


def tasks(cluster: Cluster) -> int:
    """Those of the proxy's event loop and of the engine's together."""
    return sum(int(metric(url, name)) for url, name in zip((cluster.url, *cluster.replica_urls), TASKS, strict=True))


async def ask_on(url: str, number: int, until_s: float, statuses: Counter[int | None]) -> None:
    """One user: a request, a pause, another request. Each tenth is no HTTP at all."""
    draw = random.Random(number)
    client = Client(url)
    while time.monotonic() < until_s:
        if draw.random() < 0.1:
            await say(url, draw.choice(sorted(MALFORMED.values())))
        else:
            statuses[await client.ask(draw_ask(draw, max_tokens=MAX_TOKENS))] += 1
        await asyncio.sleep(draw.expovariate(1 / PAUSE_S))
    await client.close()


async def say(url: str, head: bytes) -> None:
    """Sends something, and leaves when the server has said what it thinks of it."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head + b"\r\n\r\n")
    try:
        async with asyncio.timeout(1.0):
            await reader.read(100)
    except (TimeoutError, ConnectionError):
        pass  # it waits for more, or is gone without a word
    finally:
        writer.transport.abort()


async def weigh(cluster: Cluster, until_s: float, sizes: Sizes) -> None:
    """Notes the memory of every process, from the end of the warm-up on."""
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        await asyncio.sleep(SAMPLE_S)
        now_s = time.monotonic() - began_s
        for pid in [pid for command in (cluster.proxy, *cluster.replicas) for pid in command.pids()]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now: a grammar's checker may
                if now_s >= WARM_UP_S:
                    sizes[pid, name_of(pid)].append((now_s / 60, rss_mib(pid)))


def slopes_of(sizes: Sizes) -> dict[tuple[int, str], float]:
    """MiB a minute of each process that was there all the time."""
    most = max(map(len, sizes.values()))
    return {process: slope(points) for process, points in sizes.items() if len(points) == most}


def name_of(pid: int) -> str:
    """What runs there: the first words of its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return " ".join(Path(word).name for word in words[1:4])
