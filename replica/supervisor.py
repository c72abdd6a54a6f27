"""The process of one `replica serve`: starts this node's replica, passes signals on, restarts it when it dies.

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
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replica.config import ReplicaConfig
from replica.process_tree import describe_status

logger = logging.getLogger(__name__)

ENGINE_COMMAND: Final = (sys.executable, "-m", "replica.engine")
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0  # an engine that was ready for longer begins again with the first
STOP_S: Final = 15.0  # an engine that has drained, or was told to stop at once, is killed after so long


class ReplicaProcess:
    """One replica: its engine's process, one life after the other."""

    def __init__(self, config: ReplicaConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self._process: Process | None = None
        self._num_stops = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """SIGTERM to the engine: once it drains, twice it stops at once. It is killed if it does not end in time."""
        self._num_stops += 1
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                self._process.send_signal(signal.SIGTERM)
            limit_s = STOP_S + (self._config.drain_timeout_s if self._num_stops == 1 else 0)
            asyncio.get_running_loop().call_later(limit_s, self._kill, self._process)

    async def run(self) -> int:
        """Keeps the engine running until it is stopped or not worth restarting. Returns the exit code."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            ready_s, status = await self._live()
            if self._stopping.is_set():
                # SIGTERM may also have met an engine too young to handle it.
                return 0 if status in (0, -signal.SIGTERM) else 1
            if ready_s is None or status in (0, 2):
                if status not in (0, 2):
                    logger.error("replica ended before it was ready status=%r", describe_status(status))
                return max(status, 0) or int(status != 0)
            if time.monotonic() - ready_s > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("replica died, restarting status=%r delay_s=%g", describe_status(status), backoff_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        return 0

    async def _live(self) -> tuple[float | None, int]:
        """One life of the engine: when it was ready (monotonic; None if never), and its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, str(theirs.fileno()), stdin=DEVNULL, pass_fds=[theirs.fileno()]
            )
        # Our end stays open as long as this process lives: its EOF is what ends an engine without a supervisor.
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(self._config.to_json().encode() + b"\n")
            is_ready = bool(await reader.read(1))  # EOF if it ended instead
            ready_s = time.monotonic() if is_ready else None
            return ready_s, await self._process.wait()
        except ConnectionError:
            return None, await self._process.wait()  # it ended before it had read its settings
        finally:
            writer.close()

    @staticmethod
    def _kill(process: Process) -> None:
        if process.returncode is None:
            logger.error("replica does not end, killing it pid=%d", process.pid)
            process.kill()


def supervise(config: ReplicaConfig) -> int:
    """Runs until SIGINT or SIGTERM, or until the replica cannot be kept running. Returns the exit code."""
    return asyncio.run(_supervise(config))


async def _supervise(config: ReplicaConfig) -> int:
    replica = ReplicaProcess(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, replica.stop)
    return await replica.run()
