"""What a proxy does when something goes wrong: one table, a row a case, a column a proxy.

Every case starts a fresh proxy in front of two fresh mock workers, so that no circuit
breaker carries over.  The cases read the workers' own counters: a retry, a duplicated
request or a stream that goes on for a client that left shows there, whatever the proxy
says.

    behaviour.py --routers nginx,sglang-rr,smg-rr,vllm-rr
    behaviour.py --routers '' --custom 'ours=python -m ours.proxy --port {port} --workers {workers_comma}'
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter

import procstat
import routers
import run

CHAT = "/v1/chat/completions"


class Bed:
    """Two mock workers, each a process of its own, and one proxy."""

    def __init__(self, router: routers.Router | None, args, scratch: pathlib.Path):
        self.args, self.scratch = args, scratch
        self.ports = [run.free_port(), run.free_port()]
        self.urls = [f"http://{run.HOST}:{port}" for port in self.ports]
        self.processes: list[run.Process] = []
        self.proxy: run.Proxy | None = None
        try:
            for port in self.ports:
                self.start_worker(port)
            self.proxy = run.Proxy(router, self, args, scratch)
            time.sleep(1.0)  # both workers must be registered and found healthy
            self.base = self.stats()
        except BaseException:
            self.stop()
            raise
        self.port = self.proxy.port

    def start_worker(self, port: int) -> None:
        argv = [sys.executable, str(run.HERE / "mock_worker.py"), "--host", run.HOST, "--ports", str(port)]
        process = run.Process(argv, self.scratch / f"worker-{port}.log", {})
        self.processes.append(process)
        deadline = time.monotonic() + 10
        while run.call(port, "GET", "/health")[0] != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("a mock worker did not start")
            time.sleep(0.02)

    def configure(self, index: int | None = None, **values) -> None:
        """Set knobs of one worker, or of both."""
        for i, port in enumerate(self.ports):
            if index is None or i == index:
                run.call(port, "POST", "/mock/config", json.dumps(values))

    def stats(self) -> list[dict]:
        """The counters of both workers; `{}` for a dead one."""
        out = []
        for port in self.ports:
            status, body = run.call(port, "GET", "/mock/stats")
            out.append(json.loads(body) if status == 200 else {})
        return out

    def delta(self, name: str) -> list[int]:
        """What one counter grew by since the start, for both workers (a dead one: 0)."""
        return [now[name] - then[name] if now else 0 for now, then in zip(self.stats(), self.base, strict=True)]

    def stop(self) -> None:
        if self.proxy:
            self.proxy.stop()
        for process in self.processes:
            process.stop()


def body(stream: bool = False, tokens: int = 16, **extra) -> str:
    """A chat request."""
    return json.dumps(
        {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": stream}
        | extra
    )


def post(bed: Bed, text: str, timeout: float = 20.0) -> tuple[int, bytes, float]:
    """(status or 0, body, seconds) of one request through the proxy."""
    began = time.monotonic()
    status, answer = run.call(bed.port, "POST", CHAT, text, timeout)
    return status, answer, time.monotonic() - began


def raw_request(bed: Bed, text: str, headers: str = "") -> socket.socket:
    """A socket on which one request was sent."""
    sock = socket.create_connection((run.HOST, bed.port), timeout=10)
    data = text.encode()
    sock.sendall(
        (
            f"POST {CHAT} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"{headers}Content-Length: {len(data)}\r\n\r\n"
        ).encode()
        + data
    )
    return sock


def read_stream(bed: Bed, text: str) -> tuple[int, int, str, str]:
    """(status, events, how the stream ended, its last line)."""
    connection = http.client.HTTPConnection(run.HOST, bed.port, timeout=15)
    try:
        connection.request("POST", CHAT, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = b""
        try:
            while part := answer.read1(65536):
                data += part
            end = "clean end"
        except (http.client.HTTPException, OSError) as error:
            end = f"cut ({type(error).__name__})"
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1][:160] if lines else ""
        return answer.status, data.count(b"data: "), end, last
    except (http.client.HTTPException, OSError) as error:
        return 0, 0, f"no answer ({type(error).__name__})", ""
    finally:
        connection.close()


def tally(bed: Bed, count: int, **kw) -> str:
    """The statuses of `count` requests, the slowest one, the attempts at each worker."""
    statuses, slowest = Counter(), 0.0
    for _ in range(count):
        status, _, seconds = post(bed, body(**kw))
        statuses[status] += 1
        slowest = max(slowest, seconds)
    return f"{dict(statuses)}, slowest {slowest * 1e3:.0f} ms, upstream attempts {bed.delta('requests')}"


def one_worker_500(bed: Bed) -> str:
    """One of two workers answers 500 to all: 10 requests"""
    bed.configure(0, fault="http500")
    return tally(bed, 10)


def both_workers_500(bed: Bed) -> str:
    """Both workers answer 500: 1 request"""
    bed.configure(fault="http500")
    return tally(bed, 1)


def both_workers_429(bed: Bed) -> str:
    """Both workers answer 429: 1 request"""
    bed.configure(fault="http429")
    return tally(bed, 1)


def closes_without_answer(bed: Bed) -> str:
    """One worker takes requests and closes without an answer: 10 requests"""
    bed.configure(0, fault="close")
    return tally(bed, 10)


def worker_killed(bed: Bed) -> str:
    """One worker is killed (connection refused): 20 requests"""
    bed.processes[0].stop()
    return tally(bed, 20)


def all_workers_killed(bed: Bed) -> str:
    """Both workers are killed: 1 request"""
    for process in bed.processes:
        process.stop()
    status, answer, seconds = post(bed, body())
    return f"{status} after {seconds * 1e3:.0f} ms: {answer[:110].decode(errors='replace')}"


def dies_mid_stream(bed: Bed) -> str:
    """Workers close the connection after 8 of 32 chunks"""
    bed.configure(fault="die", fault_after=8)
    status, events, end, last = read_stream(bed, body(stream=True, tokens=32))
    return f"{status}, {events} events, {end}, attempts {sum(bed.delta('requests'))}, last line `{last[:90]}`"


def client_leaves_mid_stream(bed: Bed) -> str:
    """The client closes in the middle of a stream: when does the worker notice?"""
    bed.configure(itl_ms=20)
    sock = raw_request(bed, body(stream=True, tokens=2000))
    seen = b""
    while seen.count(b"data: ") < 5:
        seen += sock.recv(65536)
    sock.close()
    return abort_time(bed, time.monotonic())


def client_leaves_in_prefill(bed: Bed) -> str:
    """The client closes a streaming request before its first byte (5 s prefill)"""
    bed.configure(ttft_ms=5000, itl_ms=20)
    sock = raw_request(bed, body(stream=True, tokens=200))
    time.sleep(0.3)
    sock.close()
    return abort_time(bed, time.monotonic())


def client_leaves_whole(bed: Bed) -> str:
    """The client closes a non-streaming request (5 s of work)"""
    bed.configure(ttft_ms=5000)
    sock = raw_request(bed, body())
    time.sleep(0.3)
    sock.close()
    return abort_time(bed, time.monotonic())


def abort_time(bed: Bed, closed: float) -> str:
    """How long after `closed` a worker saw its connection close."""
    while time.monotonic() < closed + 3.5:
        if sum(bed.delta("aborted")):
            at = max(stats.get("last_abort_at", 0) for stats in bed.stats())
            return f"aborted after {max(0.0, at - closed) * 1e3:.0f} ms"
        time.sleep(0.02)
    return "NOT aborted within 3.5 s"


def slow_client(bed: Bed) -> str:
    """A client that does not read a 400 000-chunk stream (84 MB): what is buffered in 4 s?"""
    before = procstat.rss_bytes(bed.proxy.process.session) if bed.proxy.process else 0
    sock = raw_request(bed, body(stream=True, tokens=400_000))
    time.sleep(4)
    after = procstat.rss_bytes(bed.proxy.process.session) if bed.proxy.process else 0
    chunks = sum(bed.delta("chunks"))
    sock.close()
    return f"{chunks} chunks taken ({chunks * 0.22 / 1e3:.1f} MB), proxy RSS +{(after - before) / 1e6:.0f} MB"


def headers_up(bed: Bed) -> str:
    """Which request headers reach the worker"""
    sock = raw_request(
        bed,
        body(),
        "Authorization: Bearer client\r\nX-Custom: 1\r\n"
        "X-Request-Id: rid-1\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-"
        "b7ad6b7169203331-01\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n",
    )
    sock.recv(65536)
    sock.close()
    head = max((stats.get("last_head", "") for stats in bed.stats()), key=len)
    names = [line.split(":")[0].lower() for line in head.split("\r\n")[1:]]
    return " ".join(sorted(names))


def bad_requests(bed: Bed) -> str:
    """Statuses: broken JSON / no messages / unknown model / unknown path / GET on POST"""

    def code(method, path, text):
        return run.call(bed.port, method, path, text)[0]

    out = [
        code("POST", CHAT, "{"),
        code("POST", CHAT, '{"model": "mock"}'),
        code("POST", CHAT, body().replace("mock", "nope")),
        code("POST", "/v1/nothing", "{}"),
        code("GET", CHAT, ""),
    ]
    return f"{' / '.join(map(str, out))}, upstream attempts {sum(bed.delta('requests'))}"


CASES = (
    one_worker_500,
    both_workers_500,
    both_workers_429,
    closes_without_answer,
    worker_killed,
    all_workers_killed,
    dies_mid_stream,
    client_leaves_mid_stream,
    client_leaves_in_prefill,
    client_leaves_whole,
    slow_client,
    headers_up,
    bad_requests,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default="nginx,sglang-rr,smg-rr,vllm-rr,lmdeploy")
    parser.add_argument("--custom", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--cases", default="", help="comma-separated names; default all")
    parser.add_argument("--nginx-workers", type=int, default=1)
    parser.add_argument("--start-timeout", type=float, default=60.0)
    parser.add_argument("--router-cpus", default="")
    args = parser.parse_args()
    chosen = {name: routers.ROUTERS.get(name) for name in args.routers.split(",") if name}
    chosen |= {r.name: r for r in map(routers.custom, args.custom)}
    wanted = [c for c in CASES if not args.cases or c.__name__ in args.cases.split(",")]
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="proxybench-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: dict[str, dict[str, str]] = {case.__name__: {} for case in wanted}
    try:
        for name, router in chosen.items():
            for case in wanted:
                try:
                    bed = Bed(router, args, scratch)
                except (OSError, RuntimeError) as error:
                    rows[case.__name__][name] = f"no start: {str(error)[:80]}"
                    continue
                try:
                    rows[case.__name__][name] = case(bed)
                except (OSError, RuntimeError, http.client.HTTPException) as error:
                    rows[case.__name__][name] = f"failed: {error!r}"
                finally:
                    bed.stop()
                print(f"{name:12} {case.__name__:26} {rows[case.__name__][name]}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for case in wanted:
        print(f"\n**{case.__doc__}**\n")
        for name, text in rows[case.__name__].items():
            print(f"- {name}: {text}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
