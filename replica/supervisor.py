"""The process of one `replica serve`: starts its replicas, serves the clock that they share, stops them on signals.

The replicas of a group live and die together: when one ends, the others cannot step. A group that was ready once is
started again, after 1 s, then 2, up to 30. One that ends before, or that refuses its settings, would only do so again:
the command ends with its exit code. A replica alone is a group without a clock.

Nothing here computes or blocks: whatever keeps this process busy keeps every step waiting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from replica.checkpoint import Checkpoint
from replica.config import ReplicaConfig
from replica.group_config import group_config
from replica.model_config import ModelConfig
from replica.process_tree import describe_status, ignoring_signals, new_event_loop

logger = logging.getLogger(__name__)

ENGINE_COMMAND: Final = (sys.executable, "-m", "replica.engine")
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0  # a group that was ready for longer begins again with the first
STOP_BYTE: Final = b"s"
STOP_S: Final = 15.0  # an engine that has drained, or was told to stop at once, is killed after so long
END_S: Final = 10.0  # after the first engine of a ready group has ended, the others have so long to tell their clients


class EngineProcess:
    """One life of one replica's engine. The bytes between it and this process: see engine.py."""

    def __init__(self, config: ReplicaConfig, command: Sequence[str], now_s: Callable[[], float]) -> None:
        self.ready_s: float | None = None
        self.status: int | None = None  # once it has ended
        self.was_killed = False  # because another one had ended
        self._config = config
        self._command = command
        self._now_s = now_s
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._num_stops = 0

    def stop(self) -> None:
        """Once the engine drains, twice it stops at once. It is killed if it does not end in time."""
        self._num_stops += 1
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(STOP_BYTE)
        limit_s = STOP_S + (self._config.drain_timeout_s if self._num_stops == 1 else 0)
        asyncio.get_running_loop().call_later(limit_s, self._kill_late)

    def kill(self) -> None:
        """Ends it at once, because another one of its group has ended."""
        if self._process is not None and self._process.returncode is None:
            self.was_killed = True
            self._process.kill()

    async def live(self) -> None:
        """Runs the engine to its end."""
        ours, theirs = socket.socketpair()
        # Our end stays open as long as this process lives: its EOF is what ends an engine without a supervisor.
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(self._config.to_json().encode() + b"\n" + STOP_BYTE * self._num_stops)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *ignoring_signals(self._command), str(theirs.fileno()), stdin=DEVNULL, pass_fds=[theirs.fileno()]
                )
            with suppress(ConnectionError):  # it ended before it had read all that was written
                if await reader.read(1):
                    self.ready_s = self._now_s()
            self.status = await self._process.wait()
        finally:
            self._writer.close()
            self._writer = None

    def _kill_late(self) -> None:
        if self._process is not None and self._process.returncode is None:
            logger.error("replica does not end, killing it pid=%d", self._process.pid)
            self._process.kill()


@dataclass(frozen=True, slots=True)
class Life:
    """How one life of a group went."""

    ready_s: float | None  # when all were ready; None if they never were
    status: int  # exit status of the first engine that failed, or 0
    reason: str  # why it ended, in words


class Supervisor:
    """The replicas of one command, one life after the other."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        shared: dict[str, str] | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared` is what all members of the group must have in common (group_config.py); None for one alone."""
        self._config = config
        self._shared = shared
        self._command = command
        self._now_s = now_s
        self._engines: list[EngineProcess] = []
        self._num_stops = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Once the replicas drain, twice they stop at once. They are killed if they do not end in time."""
        self._num_stops += 1
        self._stopping.set()
        for engine in self._engines:
            engine.stop()

    async def run(self) -> int:
        """Keeps the group running until it is stopped or not worth restarting. Returns the exit code.

        Raises ConfigError if the clock's port cannot be had.
        """
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            life = await self._live()
            if self._stopping.is_set():
                return self._stopped_code(life)
            if life.ready_s is None or life.status in (0, 2):
                if life.status not in (0, 2):
                    logger.error("replica ended before it was ready reason=%r", life.reason)
                return life.status if life.status >= 0 else 1
            if self._now_s() - life.ready_s > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("replica died, restarting delay_s=%g reason=%r", backoff_s, life.reason)
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        return 0

    def _stopped_code(self, life: Life) -> int:
        harmless = {0}
        if life.ready_s is None:
            harmless |= {-signal.SIGINT, -signal.SIGTERM}  # in the instant before it ignored them
            if self._config.layout.dp > 1:
                harmless.add(1)  # replicas that are stopped while they start may miss each other on the way out
        return 0 if life.status in harmless else 1

    async def _live(self) -> Life:
        """One life of all engines, and of the clock that they share."""
        if self._shared is None:
            return await self._live_engines([self._config])
        from replica.group_master import GroupMaster  # only here: a replica alone must not need a coordinator

        secret = self._config.group_secret or secrets.token_hex(32)
        group = self._config.group or f"{socket.gethostname()}:{self._config.master_port or secrets.token_hex(4)}"
        config = replace(self._config, group=group, group_secret=secret)
        master = GroupMaster(config, self._shared)
        try:
            port = await master.start()
            config = replace(config, master_port=port)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(master.run())
                life = await self._live_engines(_member_configs(config))
                serving.cancel()
            return replace(life, reason=master.failure or life.reason)
        finally:
            await master.close()

    async def _live_engines(self, configs: list[ReplicaConfig]) -> Life:
        engines = self._engines = [EngineProcess(config, self._command, self._now_s) for config in configs]
        for engine in engines:
            for _ in range(self._num_stops):
                engine.stop()
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(engine.live()) for engine in engines]
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            ready_s = _all_ready_s(engines)
            if not self._stopping.is_set():
                # One that is refused leaves the others waiting for it; a ready one has already told them.
                await asyncio.wait(lives, timeout=END_S if ready_s is not None else 0)
            if not self._stopping.is_set():
                for engine in engines:
                    engine.kill()
        self._engines = []
        statuses = [engine.status or 0 for engine in engines if not engine.was_killed]
        status = 2 if 2 in statuses else next(filter(None, statuses), 0)
        return Life(ready_s, status, describe_status(status))

    async def _pause(self, delay_s: float) -> None:
        """Waits, unless asked to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()


def _all_ready_s(engines: list[EngineProcess]) -> float | None:
    """When the last of them was ready; None if one never was."""
    times_s = [engine.ready_s for engine in engines if engine.ready_s is not None]
    return max(times_s) if len(times_s) == len(engines) else None


def _member_configs(config: ReplicaConfig) -> list[ReplicaConfig]:
    """Each replica's own settings."""
    return [
        replace(config, dp_rank=dp_rank, port=config.port and config.port + dp_rank)
        for dp_rank in range(config.layout.dp)
    ]


def supervise(config: ReplicaConfig) -> int:
    """Runs until SIGINT or SIGTERM, or until the replicas cannot be kept running. Returns the exit code.

    Raises ConfigError, before anything is started, for a model or layout that cannot be served.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_supervise(config))


async def _supervise(config: ReplicaConfig) -> int:
    def stop() -> None:
        supervisor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    # Nothing is awaited before there is a supervisor, so what comes meanwhile reaches it, too.
    supervisor = Supervisor(config, shared=_shared(config))
    return await supervisor.run()


def _shared(config: ReplicaConfig) -> dict[str, str] | None:
    """What the members of a group must have in common; None for a replica alone. Raises ConfigError."""
    model = ModelConfig.load(config.model)
    config.layout.check(model)
    return group_config(config, model, Checkpoint.open(config.model)) if config.layout.dp > 1 else None
