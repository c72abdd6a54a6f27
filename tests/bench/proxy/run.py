"""Run the same loads through several proxies, side by side, and print one table.

Each round starts every chosen proxy in turn in front of the same mock workers, checks
that its answers equal the workers' own, and runs all scenarios.  `direct` is the
mock worker without a proxy: the ceiling.  Rounds are interleaved, so that a noisy
neighbour hits all proxies alike; the table shows the best CPU cost and the median rates.

    run.py                               every router that is installed, one round
    run.py --routers nginx,smg-rr --scenarios short,sse128 --rounds 3
    run.py --routers nginx --custom 'ours=python -m ours.proxy --port {port} --workers {workers_comma}'

See `routers.py` for the placeholders of a command and `load.py` for the scenarios.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import load
import routers
from table import table

HERE = pathlib.Path(__file__).resolve().parent
HOST = "127.0.0.1"


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def call(port: int, method: str, path: str, body: str | bytes = "", timeout: float = 5.0):
    """(status, body) of one request, or (0, error text)."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


class Process:
    """A child in a session of its own, so that all that it starts is accounted and ended."""

    def __init__(self, argv: list[str], log: pathlib.Path, env: dict[str, str], cpus: str = ""):
        if cpus:
            argv = ["taskset", "-c", cpus, *argv]
        with open(log, "ab") as file:
            self.child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=os.environ | env
            )
        self.log = log
        self.session = self.child.pid

    def stop(self) -> None:
        """End the session: politely, then not."""
        for sig, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            try:
                os.killpg(self.session, sig)
                self.child.wait(wait)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGKILL)


class Workers:
    """The mock workers of a whole run."""

    def __init__(self, args, scratch: pathlib.Path):
        self.ports = [free_port() for _ in range(args.workers)]
        self.urls = [f"http://{HOST}:{port}" for port in self.ports]
        argv = [sys.executable, str(HERE / "mock_worker.py"), "--host", HOST, "--ports", ",".join(map(str, self.ports))]
        self.process = Process(argv, scratch / "workers.log", {}, args.load_cpus)
        deadline = time.monotonic() + 10
        while call(self.ports[-1], "GET", "/health")[0] != 200:
            if time.monotonic() > deadline:
                sys.exit("the mock workers did not start: " + str(self.process.log))
            time.sleep(0.05)

    def configure(self, **values) -> None:
        """Set knobs of every worker."""
        for port in self.ports:
            status, body = call(port, "POST", "/mock/config", json.dumps(values))
            if status != 200:
                sys.exit(f"mock worker: {body!r}")


class Proxy:
    """One started proxy (or, for `direct`, none)."""

    def __init__(self, router: routers.Router | None, workers: Workers, args, scratch: pathlib.Path):
        self.name = router.name if router else "direct"
        self.process = None
        if router is None:
            self.port = workers.ports[0]
            return
        self.port = free_port()
        folder = scratch / f"{router.name}-{self.port}"
        folder.mkdir()
        values = {
            "host": HOST,
            "port": str(self.port),
            "metrics": str(free_port()),
            "workers": " ".join(workers.urls),
            "workers_comma": ",".join(workers.urls),
            "dir": str(folder),
            "venvs": str(routers.VENVS),
            "here": str(HERE),
            "python": sys.executable,
            "nginx_workers": str(args.nginx_workers),
            "nginx_upstreams": " ".join(f"server {HOST}:{port};" for port in workers.ports),
        }
        for name, text in router.files.items():
            (folder / name).write_text(router.expand(text, values))
        self.argv = router.argv(values)
        self.process = Process(self.argv, folder / "log", router.env, args.router_cpus)
        self.wait(router, workers, args.start_timeout)

    def wait(self, router: routers.Router, workers: Workers, timeout: float) -> None:
        """Until the proxy answers an inference request with 200; register the workers."""
        deadline = time.monotonic() + timeout
        registered = router.register is None
        body = load.SCENARIOS["short"].body()
        while True:
            if not registered:
                method, path, template = router.register
                answers = [call(self.port, method, path, template.replace("{worker}", url))[0] for url in workers.urls]
                registered = all(status == 200 for status in answers)
            status, answer = call(self.port, "POST", "/v1/chat/completions", body)
            if registered and status == 200:
                # Every worker must be known: routers register them one by one.
                time.sleep(0.5)
                return
            if self.process.child.poll() is not None or time.monotonic() > deadline:
                tail = self.process.log.read_text(errors="replace")[-1500:]
                self.stop()
                raise RuntimeError(f"{self.name} did not start ({status} {answer[:200]!r})\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the proxy."""
        if self.process:
            self.process.stop()


def check(proxy: Proxy, workers: Workers) -> str:
    """What differs between an answer through the proxy and the worker's own, or `""`."""
    whole = load.SCENARIOS["short"].body()
    stream = dataclasses.replace(load.SCENARIOS["sse128"], chunks=5).body()
    notes = []
    for name, body in (("json", whole), ("sse", stream)):
        wanted = call(workers.ports[0], "POST", "/v1/chat/completions", body)
        got = call(proxy.port, "POST", "/v1/chat/completions", body)
        if got[0] != 200:
            notes.append(f"{name}: status {got[0]}")
        elif name == "json" and json.loads(got[1]) != json.loads(wanted[1]):
            notes.append("json: other content")
        elif name == "json" and got[1] != wanted[1]:
            notes.append("json: re-serialised")
        elif name == "sse" and len(got[1]) != len(wanted[1]):  # the stamps differ
            notes.append(f"sse: {len(got[1])} bytes for {len(wanted[1])}")
    return ", ".join(notes)


def measure(proxy: Proxy, workers: Workers, scenario: load.Scenario, args) -> dict:
    """One window of one scenario, by `load.py` in a process of its own."""
    argv = [
        sys.executable,
        str(HERE / "load.py"),
        "--url",
        f"http://{HOST}:{proxy.port}",
        "--scenario",
        scenario.name,
        "--warmup",
        str(args.warmup),
        "--duration",
        str(args.duration),
        "--worker-session",
        str(workers.process.session),
    ]
    if args.unique_prompts:
        argv.append("--unique-prompts")
    if proxy.process:
        argv += ["--session", str(proxy.process.session)]
    if args.load_cpus:
        argv = ["taskset", "-c", args.load_cpus, *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=args.warmup + args.duration + 60)
    if done.returncode:
        raise RuntimeError(f"load.py failed: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--routers", default="", help="comma-separated names; default: direct and all that is installed"
    )
    parser.add_argument("--custom", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--scenarios", default=",".join(load.SCENARIOS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds")
    parser.add_argument("--duration", type=float, default=3.0, help="seconds")
    parser.add_argument("--workers", type=int, default=2, help="mock workers (ports)")
    parser.add_argument("--nginx-workers", type=int, default=1)
    parser.add_argument("--start-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--router-cpus", default="", help="CPU list to pin the proxy to")
    parser.add_argument("--load-cpus", default="", help="CPU list for workers and load")
    parser.add_argument("--unique-prompts", action="store_true")
    args = parser.parse_args()
    unknown = [name for name in args.scenarios.split(",") if name not in load.SCENARIOS]
    if unknown:
        parser.error(f"no scenario {unknown[0]}; known: {' '.join(load.SCENARIOS)}")
    return args


def choose_routers(args: argparse.Namespace) -> dict[str, routers.Router | None]:
    """Name -> router; None is no router at all."""
    installed = [name for name, router in routers.ROUTERS.items() if router.is_installed()]
    names = args.routers.split(",") if args.routers else ["direct", *installed]
    chosen: dict[str, routers.Router | None] = {}
    for name in filter(None, names):
        if name != "direct" and name not in routers.ROUTERS:
            sys.exit(f"no router {name!r}; known: direct {' '.join(routers.ROUTERS)}")
        chosen[name] = routers.ROUTERS.get(name)
    return chosen | {router.name: router for router in map(routers.custom, args.custom)}


class Results:
    """What all rounds measured: scenario -> router -> one report per round."""

    def __init__(self, scenarios: list[load.Scenario], names: list[str]) -> None:
        self.scenarios = scenarios
        self.rounds: dict[str, dict[str, list[dict]]] = {s.name: {name: [] for name in names} for s in scenarios}
        self.notes: dict[str, str] = {}  # router -> what is odd about its answers, or why it did not start

    def run(self, number: int, name: str, router: routers.Router | None, workers: Workers, args, scratch) -> None:
        """One router's part of one round."""
        if self.notes.get(name, "").startswith("FAILED"):
            return
        try:
            proxy = Proxy(router, workers, args, scratch)
        except (OSError, RuntimeError) as error:
            self.notes[name] = f"FAILED: {error}"
            print(f"{name}: {error}", file=sys.stderr)
            return
        try:
            self.notes[name] = check(proxy, workers)
            for scenario in self.scenarios:
                workers.configure(itl_ms=scenario.itl_ms, ttft_ms=scenario.ttft_ms, stamps=scenario.stamps)
                result = measure(proxy, workers, scenario, args)
                self.rounds[scenario.name][name].append(result)
                print(progress(number, name, scenario.name, result), file=sys.stderr, flush=True)
        finally:
            proxy.stop()

    def report(self) -> None:
        """The tables, and as the last line everything as JSON."""
        for scenario in self.scenarios:
            pace = f", {scenario.chunks} chunks, {scenario.itl_ms:g} ms apart" if scenario.stream else ""
            print(f"\n### {scenario.name} (c={scenario.connections}{pace}, {scenario.prompt_bytes} B prompt)\n")
            print(table(scenario, self.rounds[scenario.name]))
        different = {name: note for name, note in self.notes.items() if note}
        if different:
            print("\nAnswers that differ from the worker's own:")
            for name, note in different.items():
                print(f"- {name}: {note.splitlines()[0]}")
        print(json.dumps({"rounds": self.rounds, "notes": different}))


def progress(number: int, name: str, scenario: str, result: dict) -> str:
    return (
        f"round {number + 1} {name:16} {scenario:8} {result['req_s']:9.1f} req/s {result['events_s']:10.0f} ev/s "
        f"cores: proxy {result.get('proxy_cpu', 0):.2f} load {result['load_cpu']:.2f} "
        f"workers {result['workers_cpu']:.2f} others {result['other_cpu']:.2f} {result['errors'] or ''}"
    )


def main() -> None:
    args = parse_args()
    chosen = choose_routers(args)
    results = Results([load.SCENARIOS[name] for name in args.scenarios.split(",")], list(chosen))
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="proxybench-"))
    workers = Workers(args, scratch)
    try:
        for number in range(args.rounds):
            for name, router in chosen.items():
                results.run(number, name, router, workers, args, scratch)
    finally:
        workers.process.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    results.report()


if __name__ == "__main__":
    main()
