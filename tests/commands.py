"""Real `proxy serve` and `replica serve` processes for tests: start, wait until ready, stop, and see what is left.

Every process that a command starts inherits a mark in its environment, so it is found whoever its parent is by now.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

ROOT: Final = Path(__file__).parents[1]
DEMO_MODEL: Final = ROOT / "deploy" / "models" / "tiny-moe"
BIN: Final = Path(sys.executable).parent
MARK: Final = "LOCKSTEP_TEST_COMMAND"
READY: Final = re.compile(r"\bready\b.*\burl=(\S+)")
READY_TIMEOUT_S: Final = 90.0  # a replica on a busy machine with two cores
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.02


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = STOP_TIMEOUT_S) -> float:
    """Seconds until the condition held. Fails the test, saying what did not happen, after `timeout_s`."""
    started_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started_s


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Command:
    """One started command. Its output, and that of all its processes, is in `log_file`."""

    def __init__(self, argv: list[str], log_file: Path, *, stdin: int = subprocess.DEVNULL) -> None:
        self.argv, self.log_file = argv, log_file
        self.mark = uuid.uuid4().hex
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a Ctrl-C at pytest is not for it
            )

    def log(self) -> str:
        """All that it has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self, count: int = 1) -> str:
        """The URL of its first ready line, once there are `count` of them. Fails the test, with the log, when it ends
        first or takes too long."""
        wait_until(
            lambda: len(READY.findall(self.log())) >= count or self.process.poll() is not None,
            self._story(),
            READY_TIMEOUT_S,
        )
        return self.url

    @property
    def url(self) -> str:
        """The URL of its ready line."""
        found = READY.search(self.log())
        assert found, f"{self._story()} is not ready:\n{self.log()}"
        return found[1]

    @property
    def urls(self) -> list[str]:
        """Those of all its ready lines; a replica that came back at the same address counts once."""
        return list(dict.fromkeys(READY.findall(self.log())))

    def pids(self) -> list[int]:
        """Every living process of the command, the first one included. Zombies do not count."""
        mark = f"{MARK}={self.mark}".encode()
        return [pid for pid in _all_pids() if mark in _environment(pid)]

    def pids_of(self, program: str) -> list[int]:
        """The living processes that run a command (`replica`) or a module (`replica.engine`)."""
        return [pid for pid in self.pids() if program in (Path(word).name for word in _command_line(pid))]

    def num_open_files(self) -> dict[int, int]:
        """Process id -> its open files and sockets."""
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids()}

    def stop(self) -> int:
        """Asks it to stop (SIGTERM). Its exit code, once all of its processes are gone and its port is free."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=STOP_TIMEOUT_S)
        self.assert_gone()
        return code

    def kill(self, pid: int | None = None) -> None:
        """Kills one process of it (SIGKILL), the first one unless another is named."""
        os.kill(pid or self.process.pid, signal.SIGKILL)
        if pid in (None, self.process.pid):
            self.process.wait(timeout=STOP_TIMEOUT_S)

    def assert_gone(self) -> None:
        """Fails the test when a process or a listening socket of the command outlives it."""
        wait_until(lambda: not self.pids(), f"the end of processes {self.pids()} of {self._story()}")
        listening = [url for url in self.urls if is_listening(url)]
        assert not listening, f"{self._story()} still listens at {listening}"

    def close(self) -> None:
        """Ends whatever is left, by force, so that a failed test does not disturb the next one."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself just now
        self.process.wait(timeout=STOP_TIMEOUT_S)

    def _story(self) -> str:
        return " ".join(Path(word).name if word.startswith("/") else word for word in self.argv)


class Commands:
    """The commands of one test or of one run. At its end all are stopped, and it is an error if anything is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Command] = []

    def start(self, *argv: str, stdin: int = subprocess.DEVNULL) -> Command:
        """Starts a command without waiting for it."""
        log_file = self.folder / f"{len(self.started)}-{Path(argv[0]).name}.log"
        command = Command(list(argv), log_file, stdin=stdin)
        self.started.append(command)
        return command

    def proxy(self, *options: str, port: int = 0) -> Command:
        """A ready proxy."""
        command = self.start(str(BIN / "proxy"), "serve", "--port", str(port), *options)
        command.wait_ready()
        return command

    def replicas(self, proxy_url: str, *options: str, count: int = 1) -> list[Command]:
        """Ready replicas of the demo model. They start side by side."""
        argv = (str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0", "--num-threads", "1")
        started = [self.start(*argv, "--proxy-url", proxy_url, *options) for _ in range(count)]
        for replica in started:
            replica.wait_ready()
        return started

    def group(self, *options: str, dp: int = 2, tp: int = 4, model: Path = DEMO_MODEL) -> Command:
        """The ready replicas of one group, in one command."""
        degrees = ("--dp", str(dp), "--tp", str(tp))
        argv = (str(BIN / "replica"), "serve", str(model), "--num-threads", "1", *degrees)
        replicas = self.start(*argv, *options)
        replicas.wait_ready(dp)
        return replicas

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Replicas before the proxy that they know: the order in which an operator stops them.
            for command in reversed(self.started):
                if command.process.poll() is None:
                    code = command.stop()
                    assert code == 0, f"{command.argv} ended with {code}:\n{command.log()}"
                command.assert_gone()
        finally:
            for command in self.started:
                command.close()


def is_listening(url: str) -> bool:
    """Whether something accepts connections at a URL's address."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=2.0):
            return True
    except OSError:
        return False


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """A process's first environment; empty for one that has ended, a zombie, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command_line(pid: int) -> list[str]:
    """A process's words; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []
