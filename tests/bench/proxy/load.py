"""A closed-loop HTTP/1.1 load generator for LLM proxies.

`N` keep-alive connections each send one prepared request, read the answer, and send
the next.  Answers are scanned, not parsed: the generator must stay far cheaper than the
proxy it measures.  What it reports for one window of time:

* requests/s, latency p50/p99, errors by kind, short streams (fewer events than sent)
* for streams: events/s, time to first event, the gap between events, and, from the
  stamps of `mock_worker.py`, the one-way latency of single events through the proxy, the
  time to first event without what the worker itself took, and what of it the router took:
  from the request's writing to its arrival in the worker's kernel, and from the first
  event's writing to its arrival in ours
* CPU seconds and memory of the proxy's session (`--session`), so that *CPU seconds
  per 1000 requests* and *per 1 million events* can be computed: the numbers that hold
  on a noisy machine
* its own CPU, the machine's total CPU and stolen CPU, to judge how noisy the run was

Usage: `load.py --url http://127.0.0.1:8000 --scenario short [--session PID]`
prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import re
import socket
import time
import urllib.parse
from array import array

import procstat
from arrivals import TimedProtocol

EVENT = b"data: "
STAMP = b'"content":"@'
FIRST_STAMPS = re.compile(rb'"content":"#([0-9a-f]{16})(?:#([0-9a-f]{16})#([0-9a-f]{16}))?"')


@dataclasses.dataclass
class Scenario:
    """One kind of load; `events` is the number of SSE events that a whole stream has."""

    name: str
    connections: int
    stream: bool = False
    chunks: int = 0
    itl_ms: float = 0.0
    ttft_ms: float = 0.0
    prompt_bytes: int = 200
    unique_prompts: bool = False
    stamps: bool = False
    path: str = "/v1/chat/completions"
    model: str = "mock"

    @property
    def events(self) -> int:
        """Content chunks, the final chunk and `[DONE]`."""
        return self.chunks + 2 if self.stream else 0

    def body(self, salt: str = "") -> bytes:
        """The request document."""
        words = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor "
        prompt = (salt + words * (self.prompt_bytes // len(words) + 1))[: self.prompt_bytes]
        value: dict = {"model": self.model}
        if self.path == "/v1/chat/completions":
            value["messages"] = [{"role": "user", "content": prompt}]
        elif self.path == "/v1/completions":
            value["prompt"] = prompt
        else:
            value["text"] = prompt
        value["max_tokens"] = max(1, self.chunks)
        value["stream"] = self.stream
        return json.dumps(value, separators=(",", ":")).encode()


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("single", connections=1),
        Scenario("short", connections=32),
        Scenario("sse128", connections=32, stream=True, chunks=128),
        Scenario("sse10ms", connections=256, stream=True, chunks=200, itl_ms=10, stamps=True),
        Scenario("big256k", connections=8, prompt_bytes=256 * 1024),
    )
}


class Window:
    """The counters and samples of the measured window."""

    def __init__(self):
        self.open = False
        self.requests = 0
        self.events = 0
        self.reads = 0  # reads that had an event: events/reads shows what a proxy joins
        self.errors: collections.Counter[str] = collections.Counter()
        self.latency = array("d")
        self.first = array("d")
        self.added = array("d")
        self.way_there = array("d")
        self.way_back = array("d")
        self.router = array("d")  # both ways of one request
        self.gap = array("d")
        self.relay = array("d")


class Client(TimedProtocol):
    """One keep-alive connection of the closed loop."""

    def __init__(self, run: Run, request: bytes):
        self.run, self.request = run, request
        self.scenario, self.window = run.scenario, run.window
        self.reset()

    def reset(self) -> None:
        self.head_done = False
        self.pending = b""  # the start of a head or of a chunk that is not whole yet
        self.tail = b""  # the end of the payload before: a pattern may straddle two
        self.left = -1  # body bytes still to come, -1 = chunked, -2 = until close
        self.status = 0
        self.events = 0
        self.sent_at = self.last_at = 0.0
        self.sent_ns = 0  # of CLOCK_REALTIME, as the kernel's stamps are
        self.waiting = False
        self.counted = False

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.request) > 1 << 16:  # let a big request leave in one write
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.send()

    def send(self) -> None:
        """Send the next request, unless the run is over."""
        if self.run.stopping:
            self.transport.close()
            return
        self.reset()
        self.waiting = True
        self.wants_stamps = self.scenario.stamps
        self.counted = self.window.open
        self.sent_ns = time.time_ns()
        self.sent_at = self.last_at = time.perf_counter()
        self.transport.write(self.request)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        if self.waiting and not self.run.stopping:
            if self.head_done and self.left == -2 and not exc:
                self.done()
            else:
                self.fail("cut" if self.head_done else "closed")
        if not self.run.stopping:
            self.run.loop.call_later(0.01, self.run.connect, self.request)

    def fail(self, kind: str) -> None:
        if self.window.open:
            self.window.errors[kind] += 1
        self.waiting = False

    def data_received(self, data):
        now = time.perf_counter()
        if not self.head_done:
            data = self.pending + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.pending = data
                return
            self.parse_head(data[:end].lower())
            data = data[end + 4 :]
            self.head_done, self.pending = True, b""
        payload, ended = data, False
        if self.left == -1:
            payload, ended = self.dechunk(data)
        elif self.left >= 0:
            self.left -= len(data)
            ended = self.left <= 0
        if payload and self.scenario.stream and self.status == 200:
            self.count(payload, now)
        if ended:
            self.done(now)

    def dechunk(self, data: bytes) -> tuple[bytes, bool]:
        """(payload of the chunks that are whole by now, whether the last chunk came)."""
        if self.pending:
            data, self.pending = self.pending + data, b""
        parts, at, total = [], 0, len(data)
        while at < total:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            size = int(data[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if total < end + 2:
                break
            if size == 0:
                return b"".join(parts), True
            parts.append(data[line + 2 : end])
            at = end + 2
        self.pending = data[at:]
        return (parts[0] if len(parts) == 1 else b"".join(parts)), False

    def parse_head(self, head: bytes) -> None:
        self.status = int(head[9:12])
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            stop = head.find(b"\r\n", at + 2)
            self.left = int(head[at + 17 : stop if stop > 0 else None])
        elif b"chunked" in head:
            self.left = -1
        else:
            self.left = -2

    def count(self, data: bytes, now: float) -> None:
        """Count the SSE events of one read and sample their times."""
        window = self.window
        events = (self.tail + data).count(EVENT)
        self.tail = data[1 - len(EVENT) :]
        if not events:
            return
        if window.open:
            window.events += events
            window.reads += 1
            if self.events == 0:
                if self.counted:
                    self.sample_first(data, now - self.sent_at)
            elif self.scenario.itl_ms:
                window.gap.append(now - self.last_at)
            if self.scenario.stamps:
                at = data.find(STAMP)
                while at >= 0:
                    stamp = data[at + len(STAMP) : at + len(STAMP) + 16]
                    if len(stamp) == 16:
                        window.relay.append(now - int(stamp, 16) / 1e9)
                    at = data.find(STAMP, at + 30)
        self.events += events
        self.last_at = now
        self.wants_stamps = False  # only the first event's arrival is asked for

    def sample_first(self, data: bytes, took: float) -> None:
        """Sample the time to the first event."""
        window = self.window
        window.first.append(took)
        stamps = FIRST_STAMPS.search(data)
        if stamps is None:
            return
        window.added.append(took - int(stamps[1], 16) / 1e9)
        if stamps[2] is not None:
            there, back = int(stamps[2], 16) - self.sent_ns, self.received_ns - int(stamps[3], 16)
            window.way_there.append(there / 1e9)
            window.way_back.append(back / 1e9)
            window.router.append((there + back) / 1e9)

    def done(self, now: float | None = None) -> None:
        """The answer is whole: account for it and go on."""
        window = self.window
        self.waiting = False
        if window.open:
            if self.status != 200:
                window.errors[f"http{self.status}"] += 1
            elif self.events != self.scenario.events:
                window.errors["short" if self.events < self.scenario.events else "long"] += 1
            else:
                window.requests += 1
                if self.counted:
                    window.latency.append((now or time.perf_counter()) - self.sent_at)
        if self.left != -2:
            self.send()


class Run:
    """One run of one scenario against one address."""

    def __init__(self, scenario: Scenario, url: str):
        parts = urllib.parse.urlsplit(url)
        self.scenario, self.host, self.port = scenario, parts.hostname, parts.port
        self.window = Window()
        self.stopping = False
        self.loop = asyncio.get_running_loop()

    def requests(self) -> list[bytes]:
        """One prepared request per connection."""
        out = []
        for i in range(self.scenario.connections):
            body = self.scenario.body(f"[{i}] " if self.scenario.unique_prompts else "")
            out.append(
                (
                    f"POST {self.scenario.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
                    "Content-Type: application/json\r\nAccept: */*\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                ).encode()
                + body
            )
        return out

    def connect(self, request: bytes) -> None:
        """Open one connection in the background and start its loop."""

        async def attempt():
            while not self.stopping:
                try:
                    await self.loop.create_connection(lambda: Client(self, request), self.host, self.port)
                    return
                except OSError:
                    if self.window.open:
                        self.window.errors["connect"] += 1
                    await asyncio.sleep(0.05)

        task = self.loop.create_task(attempt())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def go(self, warmup: float, duration: float, session: int, workers: int = 0) -> dict:
        """Warm up, measure one window, stop; the report."""
        self.tasks: set[asyncio.Task] = set()
        requests = self.requests()
        for i, request in enumerate(requests):
            # Spread the starts over the first half of the warm-up.
            self.loop.call_later(warmup / 2 * i / len(requests), self.connect, request)
        await asyncio.sleep(warmup)
        before, began = self.snapshot(session, workers), time.perf_counter()
        self.window.open = True
        await asyncio.sleep(duration)
        self.window.open = False
        after, ended = self.snapshot(session, workers), time.perf_counter()
        self.stopping = True
        return self.report(before, after, ended - began)

    @staticmethod
    def snapshot(session: int, workers: int) -> dict:
        busy, steal = procstat.machine_seconds()
        out = {
            "own": time.process_time(),
            "busy": busy,
            "steal": steal,
            "workers": procstat.cpu_seconds(workers) if workers else 0.0,
        }
        if session:
            out |= {
                "cpu": procstat.cpu_seconds(session),
                "rss": procstat.rss_bytes(session),
                "threads": procstat.threads(session),
            }
        return out

    def report(self, before: dict, after: dict, wall: float) -> dict:
        window = self.window
        out = {
            "scenario": self.scenario.name,
            "wall_s": round(wall, 3),
            "requests": window.requests,
            "req_s": window.requests / wall,
            "errors": dict(window.errors),
            "events": window.events,
            "events_s": window.events / wall,
            "latency_ms": quantiles(window.latency),
            "first_ms": quantiles(window.first),
            "added_ms": quantiles(window.added),
            "way_there_ms": quantiles(window.way_there),
            "way_back_ms": quantiles(window.way_back),
            "router_ms": quantiles(window.router),
            "gap_ms": quantiles(window.gap),
            "relay_ms": quantiles(window.relay),
            "events_per_read": window.events / window.reads if window.reads else None,
            "load_cpu": (after["own"] - before["own"]) / wall,
            "workers_cpu": (after["workers"] - before["workers"]) / wall,
            "machine_cpu": (after["busy"] - before["busy"]) / wall,
            "steal_cpu": (after["steal"] - before["steal"]) / wall,
        }
        if "cpu" in after:
            cpu = after["cpu"] - before["cpu"]
            out |= {
                "proxy_cpu": cpu / wall,
                "rss_mb": after["rss"] / 1e6,
                "threads": after["threads"],
                "cpu_s_per_1k_req": cpu / window.requests * 1e3 if window.requests else None,
                "cpu_s_per_1m_events": cpu / window.events * 1e6 if window.events else None,
            }
        # What others used meanwhile: the noise of this run, in cores.
        out["other_cpu"] = max(
            0.0, out["machine_cpu"] - out["load_cpu"] - out["workers_cpu"] - out.get("proxy_cpu", 0.0)
        )
        return out


def quantiles(samples: array) -> dict | None:
    """p50, p99, maximum and mean of samples in seconds, in milliseconds."""
    if not samples:
        return None
    ordered = sorted(samples)
    pick = lambda q: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3)  # noqa: E731
    return {
        "p50": pick(0.5),
        "p99": pick(0.99),
        "max": pick(1.0),
        "mean": round(sum(ordered) / len(ordered) * 1e3, 3),
        "n": len(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--scenario", default="short", choices=sorted(SCENARIOS))
    parser.add_argument("--connections", type=int, help="override the scenario's number")
    parser.add_argument("--chunks", type=int, help="override the scenario's stream length")
    parser.add_argument("--path", help="override the endpoint")
    parser.add_argument("--model", help="override the model name")
    parser.add_argument("--unique-prompts", action="store_true", help="let every connection have a prompt of its own")
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--duration", type=float, default=4.0)
    parser.add_argument(
        "--session", type=int, default=0, help="session id of the proxy's processes, to account their CPU"
    )
    parser.add_argument(
        "--worker-session", type=int, default=0, help="session id of the mock workers, to tell their CPU from noise"
    )
    args = parser.parse_args()
    given = {
        name: value for name in ("connections", "chunks", "path", "model") if (value := getattr(args, name)) is not None
    }
    scenario = dataclasses.replace(SCENARIOS[args.scenario], **given, unique_prompts=args.unique_prompts)

    async def go():
        return await Run(scenario, args.url).go(args.warmup, args.duration, args.session, args.worker_session)

    try:
        import uvloop
    except ImportError:
        runner = asyncio.run
    else:
        runner = uvloop.run
    print(json.dumps(runner(go())))


if __name__ == "__main__":
    main()
