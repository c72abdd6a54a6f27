"""The process of one `replica serve`: starts this node's replica, stops it on signals, restarts it when it dies.

An engine that was ready once is started again, after 1 s, then 2, up to 30. One that ends before, or that refuses its
settings, would only do so again: the command ends with its exit code.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from replica.config import ReplicaConfig
from replica.process_tree import describe_status

logger = logging.getLogger(__name__)

ENGINE_COMMAND: Final = (sys.executable, "-m", "replica.engine")
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0  # an engine that was ready for longer begins again with the first
STOP_BYTE: Final = b"s"
STOP_S: Final = 15.0  # an engine that has drained, or was told to stop at once, is killed after so long


class ReplicaProcess:
    """One replica: its engine's process, one life after the other. The bytes between them: see engine.py."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._command = command
        self._now_s = now_s
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._num_stops = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Once the engine drains, twice it stops at once. It is killed if it does not end in time."""
        self._num_stops += 1
        self._stopping.set()
        if self._writer is not None:
            self._writer.write(STOP_BYTE)
        limit_s = STOP_S + (self._config.drain_timeout_s if self._num_stops == 1 else 0)
        asyncio.get_running_loop().call_later(limit_s, self._kill)

    async def run(self) -> int:
        """Keeps the engine running until it is stopped or not worth restarting. Returns the exit code."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            ready_s, status = await self._live()
            if self._stopping.is_set():
                return 0 if status == 0 else 1
            if ready_s is None or status in (0, 2):
                if status not in (0, 2):
                    logger.error("replica ended before it was ready status=%r", describe_status(status))
                return status if status >= 0 else 1
            if self._now_s() - ready_s > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("replica died, restarting status=%r delay_s=%g", describe_status(status), backoff_s)
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        return 0

    async def _live(self) -> tuple[float | None, int]:
        """One life of the engine: when it was ready (None if never), and its exit status."""
        ours, theirs = socket.socketpair()
        # Our end stays open as long as this process lives: its EOF is what ends an engine without a supervisor.
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(self._config.to_json().encode() + b"\n" + STOP_BYTE * self._num_stops)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, str(theirs.fileno()), stdin=DEVNULL, pass_fds=[theirs.fileno()]
                )
            try:
                is_ready = bool(await reader.read(1))
            except ConnectionError:
                is_ready = False  # it ended before it had read all that was written
            ready_s = self._now_s() if is_ready else None
            return ready_s, await self._process.wait()
        finally:
            self._writer.close()
            self._writer = None

    async def _pause(self, delay_s: float) -> None:
        """Waits, unless asked to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            logger.error("replica does not end, killing it pid=%d", self._process.pid)
            self._process.kill()


def supervise(config: ReplicaConfig) -> int:
    """Runs until SIGINT or SIGTERM, or until the replica cannot be kept running. Returns the exit code."""
    return asyncio.run(_supervise(config))


async def _supervise(config: ReplicaConfig) -> int:
    replica = ReplicaProcess(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, replica.stop)
    return await replica.run()
