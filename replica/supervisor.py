"""The process of one `replica serve`: starts its replicas, serves the clock that they share, stops them on signals.

A group goes on without a replica that is lost, and so does this process: the replica is not started again as long as
the group lives, because a group takes no new members. A group that fails as a whole, and was ready once, is started
again, after 1 s, then 2, up to 30. One that ends before, or that refuses its settings, would only do so again: the
command ends with its exit code. A replica alone is a group without a clock.

Of a group over several machines, a machine that has lost all of its replicas can only serve its clock: its command
ends, with exit code 1, unless it does, or may have to take over because another machine is being lost as well.

Nothing here computes or blocks: whatever keeps this process busy keeps every step waiting.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from replica.checkpoint import Checkpoint
from replica.config import ReplicaConfig
from replica.errors import ConfigError, first_error
from replica.group_config import group_config
from replica.model_config import ModelConfig
from replica.process_tree import (
    EPOCH,
    GROUP_FAILED,
    READY,
    STOP_BYTE,
    describe_status,
    ignoring_signals,
    new_event_loop,
)
from replica.rank_init import survivor_check

if TYPE_CHECKING:
    from replica.group_master import GroupMaster

logger = logging.getLogger(__name__)

ENGINE_COMMAND: Final = (sys.executable, "-m", "replica.engine")
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0  # a group that was ready for longer begins again with the first
STOP_S: Final = 15.0  # an engine that has drained, or was told to stop at once, is killed after so long
END_S: Final = 10.0  # after a group has failed, its engines have so long to tell their clients


class EngineProcess:
    """One life of one replica's engine. What it and this process say to each other: see engine.py."""

    def __init__(self, config: ReplicaConfig, command: Sequence[str], now_s: Callable[[], float]) -> None:
        self.ready_s: float | None = None
        self.status: int | None = None  # once it has ended
        self.speaks_for_group = True  # by its status: it was neither lost by a group that goes on nor killed from here
        self.is_group_failed = False  # it has said so
        self.epoch = 0  # that its group was in when it last said so
        self.dp_rank = config.dp_rank
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
        """Ends it at once, because its group has ended."""
        if self._process is not None and self._process.returncode is None:
            self.speaks_for_group = False
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
                while line := await reader.readline():
                    self._take(line)
            self.status = await self._process.wait()
        finally:
            self._writer.close()
            self._writer = None

    def _take(self, line: bytes) -> None:
        word, *values = line.split()
        if word == READY:
            self.ready_s = self._now_s()
        elif word == GROUP_FAILED:
            self.is_group_failed = True
        elif word == EPOCH:
            self.epoch = int(values[0])

    def _kill_late(self) -> None:
        if self._process is not None and self._process.returncode is None:
            logger.error("replica does not end, killing it pid=%d", self._process.pid)
            self._process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How one life of a group went, as far as its replicas here can tell."""

    ready_s: float | None  # when all were ready; None if they never were
    status: int  # exit status of the first engine that failed, or 0
    is_group_over: bool  # the others have ended, too


class Supervisor:
    """The replicas of one command, one life after the other."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        shared: dict[str, str] | None = None,
        why_not: Callable[[tuple[int, ...]], str] = lambda members: "",
        command: Sequence[str] = ENGINE_COMMAND,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared` is what all members of the group must have in common (group_config.py); None for one alone.
        `why_not` says why some of them could not go on without the others."""
        self._config = config
        self._shared = shared
        self._why_not = why_not
        self._command = command
        self._now_s = now_s
        self._engines: list[EngineProcess] = []
        self._num_stops = 0
        self._stopping = asyncio.Event()
        self._is_over = asyncio.Event()  # the group has ended: no engine may go on

    def stop(self) -> None:
        """Once the replicas drain, twice they stop at once. They are killed if they do not end in time."""
        self._num_stops += 1
        self._stopping.set()
        for engine in self._engines:
            engine.stop()

    async def run(self) -> int:
        """Keeps the replicas running until they are stopped or not worth restarting. Returns the exit code.

        Raises ConfigError if the clock's port, or its store, cannot be had.
        """
        if self._shared is None:
            return await self._run_lives([self._config], None)
        from replica.group_master import GroupMaster  # only here: a replica alone must not need a coordinator

        config = _with_secret(self._config)
        master = GroupMaster(
            config,
            self._shared,
            why_not=self._why_not,
            told_epoch=self._told_epoch,
            has_members=self._has_members,
            on_failed=self._is_over.set,
        )
        try:
            config = await master.start()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(master.run())
                code = await self._run_lives(_member_configs(config), master)
                serving.cancel()
            return code
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            await master.close()

    async def _run_lives(self, configs: list[ReplicaConfig], master: GroupMaster | None) -> int:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            life = await self._live(configs, master)
            if self._stopping.is_set():
                return self._stopped_code(life)
            reason = (master.failure if master is not None else "") or describe_status(life.status)
            if master is not None and master.is_left_behind:
                return _left_behind()
            if life.ready_s is None or life.status in (0, 2):
                if life.status not in (0, 2):
                    logger.error("replica ended before it was ready reason=%r", reason)
                return life.status if life.status >= 0 else 1
            if not life.is_group_over:
                return _left_behind()
            if self._now_s() - life.ready_s > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("replica died, restarting delay_s=%g reason=%r", backoff_s, reason)
            await self._pause(backoff_s)
            if master is not None and master.is_left_behind:
                return _left_behind()
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        return 0

    def _told_epoch(self) -> int:
        """The last epoch of this life that a replica of this machine was told of, alive or not; 0 before the first."""
        return max((engine.epoch for engine in self._engines), default=0)

    def _has_members(self) -> bool:
        """Whether a replica of this machine lives that was told of an epoch: a group may go on with it."""
        return any(engine.epoch and engine.status is None for engine in self._engines)

    def _stopped_code(self, life: Life) -> int:
        harmless = {0}
        if life.ready_s is None:
            harmless |= {-signal.SIGINT, -signal.SIGTERM}  # in the instant before it ignored them
            if self._config.layout.dp > 1:
                harmless.add(1)  # replicas that are stopped while they start may miss each other on the way out
        return 0 if life.status in harmless else 1

    async def _live(self, configs: list[ReplicaConfig], master: GroupMaster | None) -> Life:
        """One life of all engines of this machine."""
        self._is_over.clear()
        engines = self._engines = [EngineProcess(config, self._command, self._now_s) for config in configs]
        for engine in engines:
            for _ in range(self._num_stops):
                engine.stop()
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(self._live_one(engine)) for engine in engines]
            ending = tasks.create_task(self._end_with_group(lives))
            await asyncio.wait(lives)
            were_lost = any(engine.status for engine in engines)  # else they have stopped with their group, as asked
            if were_lost and master is not None and self._config.layout.nnodes > 1:
                await self._serve_others(master)
            ending.cancel()
        self._engines = []
        ready_s = [engine.ready_s for engine in engines if engine.ready_s is not None]
        statuses = [engine.status or 0 for engine in engines if engine.speaks_for_group] or [1]
        return Life(
            ready_s=max(ready_s) if len(ready_s) == len(engines) else None,
            status=2 if 2 in statuses else next(filter(None, statuses), 0),
            is_group_over=self._is_over.is_set() or self._config.layout.nnodes == 1,
        )

    async def _live_one(self, engine: EngineProcess) -> None:
        """Runs an engine to its end, and sees what that means for the others."""
        await engine.live()
        if self._stopping.is_set():
            return
        if engine.is_group_failed or any(other.ready_s is None for other in self._engines):
            self._is_over.set()
        elif not self._is_over.is_set() and any(other.status is None for other in self._engines):
            engine.speaks_for_group = False
            logger.error(
                "replica lost, it is not started again as long as its group goes on dp_rank=%d reason=%r",
                engine.dp_rank,
                describe_status(engine.status or 0),
            )

    async def _end_with_group(self, lives: Sequence[asyncio.Task[None]]) -> None:
        """When the group is over, ends the engines that do not end by themselves, such as one that is frozen."""
        await self._is_over.wait()
        were_ready = all(engine.ready_s is not None for engine in self._engines)
        # Ready ones have clients to tell. Before that one that has ended says enough: the others may wait for it.
        until = asyncio.ALL_COMPLETED if were_ready else asyncio.FIRST_COMPLETED
        await asyncio.wait(lives, timeout=END_S, return_when=until)
        if not self._stopping.is_set():
            for engine in self._engines:
                engine.kill()

    async def _serve_others(self, master: GroupMaster) -> None:
        """Waits until other machines need this one's clock no more, the group has ended, or this command is to."""
        async with asyncio.TaskGroup() as tasks:
            waits: list[Coroutine[Any, Any, object]] = [
                self._is_over.wait(),
                self._stopping.wait(),
                master.not_needed(),
            ]
            ends = [tasks.create_task(wait) for wait in waits]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()

    async def _pause(self, delay_s: float) -> None:
        """Waits, unless asked to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()


def _left_behind() -> int:
    logger.error("all replicas of this machine are lost, and their group does without it; this one ends")
    return 1


def _with_secret(config: ReplicaConfig) -> ReplicaConfig:
    """The settings with a name and a secret for the group, unless they have both."""
    if config.layout.nnodes > 1:
        name = f"{config.master_addr}:{config.master_port}"
    else:
        name = f"{socket.gethostname()}:{config.master_port or secrets.token_hex(4)}"
    return replace(config, group=config.group or name, group_secret=config.group_secret or secrets.token_hex(32))


def _member_configs(config: ReplicaConfig) -> list[ReplicaConfig]:
    """The settings of each replica of this machine."""
    return [
        replace(config, dp_rank=dp_rank, port=config.port and config.port + position)
        for position, dp_rank in enumerate(config.local_dp_ranks)
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
    supervisor = _make_supervisor(config)
    return await supervisor.run()


def _make_supervisor(config: ReplicaConfig) -> Supervisor:
    """Raises ConfigError for a model, layout or memory with which nothing can be served."""
    if config.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--executor ray needs the package ray, which is not installed: pip install ray, on every machine"
        )
    model = ModelConfig.load(config.model)
    config.layout.check(model)
    if config.layout.dp == 1:
        return Supervisor(config)
    shared = group_config(config, model, Checkpoint.open(config.model))
    return Supervisor(config, shared=shared, why_not=survivor_check(config, model))
