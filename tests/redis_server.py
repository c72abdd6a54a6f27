"""A real redis-server of a test's own, that the test may kill, freeze, flush and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from coordinator.private_redis import find_server

START_S: Final = 10.0


class RedisServer:
    """One server on a port that stays the same over its lives. It keeps nothing on disk."""

    def __init__(self, folder: Path, *, password: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port or free_port()
        self.password = password
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is, with the password."""
        credentials = f":{self.password}@" if self.password else ""
        return f"redis://{credentials}{self.host}:{self.port}/0"

    def start(self) -> None:
        """Starts an empty server and waits until it answers."""
        options = [*("--port", str(self.port)), *("--bind", self.host), *("--save", ""), *("--appendonly", "no")]
        options += ["--requirepass", self.password] if self.password else []
        command = [find_server(), *options]
        self._process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)
        self.wait_until_it_answers()

    def wait_until_it_answers(self) -> None:
        """Raises TimeoutError when it does not."""
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"redis-server does not answer on port {self.port}")
            time.sleep(0.01)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: what came meanwhile is carried out."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: all data is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def call(self, *words: str) -> bytes:
        """What the server says to one command, as its protocol's bytes."""
        with socket.create_connection((self.host, self.port), timeout=2.0) as connection:
            connection.sendall((_encode("AUTH", self.password) if self.password else b"") + _encode(*words))
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        return answer.removeprefix(b"+OK\r\n") if self.password else answer

    def _answers(self) -> bool:
        with suppress(OSError):
            return self.call("PING") == b"+PONG\r\n"
        return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def redis_server(folder: Path, *, password: str = "", host: str = "127.0.0.1") -> Iterator[RedisServer]:
    """A running server, gone at the end."""
    server = RedisServer(folder, password=password, host=host)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _encode(*words: str) -> bytes:
    """A command as the protocol has it."""
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def free_port() -> int:
    """A loopback port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
