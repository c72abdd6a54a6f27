"""Starts this machine's workers, one process per rank, and runs steps on them.

Each worker has a socketpair for frames (frames.py) and the read end of a lifeline pipe, whose write end only this
process holds: its EOF tells the worker that the engine is gone, however it went. In the other direction a worker's
death is seen at once, during a step by the EOF of its socket and otherwise by `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from replica.errors import CheckpointError, WorkerFailed
from replica.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Failed,
    Frame,
    FrameError,
    Init,
    Progress,
    Ready,
    Shutdown,
    StepInput,
    StepOutput,
    decode,
    encode,
)
from replica.process_tree import describe_status

logger = logging.getLogger(__name__)

WORKER_COMMAND: Final = (sys.executable, "-m", "replica.worker")
SHUTDOWN_S: Final = 3.0  # a worker that was asked to exit is killed after so long
EXIT_STATUS_S: Final = 1.0  # between a worker's EOF and its exit status


@dataclass(frozen=True, slots=True)
class _Rank:
    """One worker and the engine's end of its connection."""

    rank: int
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lifeline: int  # write end

    async def send(self, frame: bytes) -> None:
        try:
            self.writer.write(frame)
            await self.writer.drain()
        except ConnectionError as err:
            raise await self.failure() from err

    async def receive(self) -> Frame:
        """The worker's next frame. Raises WorkerFailed, or CheckpointError if it refuses the checkpoint."""
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame has {length} bytes, limit is {MAX_FRAME_BYTES}")
            frame = decode(await self.reader.readexactly(length))
        except FrameError as err:
            raise WorkerFailed(f"the worker of rank {self.rank} sent what is no frame: {err}") from err
        except (asyncio.IncompleteReadError, ConnectionError) as err:
            raise await self.failure() from err
        if isinstance(frame, Failed):
            if frame.is_config:
                raise CheckpointError(frame.error)
            raise WorkerFailed(f"the worker of rank {self.rank} failed: {frame.error}")
        return frame

    async def failure(self) -> WorkerFailed:
        """Why the connection has ended."""
        try:
            async with asyncio.timeout(EXIT_STATUS_S):
                status = await self.process.wait()
        except TimeoutError:
            return WorkerFailed(f"the worker of rank {self.rank} closed its connection")
        return WorkerFailed(f"the worker of rank {self.rank} ended: {describe_status(status)}")


class MpExecutor:
    """The ranks of one replica on this machine. `close` must be called, whatever happened before."""

    def __init__(self, *, num_ranks: int = 1, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.num_ranks = num_ranks
        self._command = command
        self._ranks: list[_Rank] = []

    async def start(
        self, init: Init, *, timeout_s: float, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Ready:
        """Starts the workers and waits until all are warm. Returns rank 0's answer.

        Raises WorkerFailed when one dies or is not ready in time, CheckpointError when it refuses the checkpoint.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for rank in range(self.num_ranks):
                    self._ranks.append(await self._spawn(rank))
                frame = encode(init)
                for worker in self._ranks:
                    await worker.send(frame)
                answers = [await _wait_ready(worker, on_progress) for worker in self._ranks]
        except TimeoutError as err:
            raise WorkerFailed(f"the workers were not ready after {timeout_s:g} s (--startup-timeout-s)") from err
        return answers[0]

    async def step(self, step_input: StepInput) -> StepOutput:
        """Runs one forward on all ranks and returns what rank 0 sampled. Raises WorkerFailed.

        After a failure or a cancellation the connections are out of step: only `close` may follow.
        """
        frame = encode(step_input)
        for worker in self._ranks:
            await worker.send(frame)
        outputs = [await worker.receive() for worker in self._ranks]
        output = outputs[0]
        if not isinstance(output, StepOutput):
            raise WorkerFailed(f"the worker of rank 0 answered a step with {type(output).__name__}")
        return output

    async def watch(self, rank: int) -> NoReturn:
        """Waits until the rank's process ends and raises WorkerFailed: parked or not, that is noticed at once."""
        status = await self._ranks[rank].process.wait()
        raise WorkerFailed(f"the worker of rank {rank} ended: {describe_status(status)}")

    async def close(self) -> None:
        """Asks every worker to exit, and kills those that do not within SHUTDOWN_S."""
        for worker in self._ranks:
            with suppress(ConnectionError):  # it may be dead, which is what we are after
                worker.writer.write(encode(Shutdown()))
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                for worker in self._ranks:
                    await worker.process.wait()
        for worker in self._ranks:
            if worker.process.returncode is None:
                logger.warning("worker does not exit, killing it rank=%d pid=%d", worker.rank, worker.process.pid)
                worker.process.kill()
                await worker.process.wait()
            worker.writer.close()
            os.close(worker.lifeline)
        self._ranks.clear()

    async def _spawn(self, rank: int) -> _Rank:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    str(lifeline_read),
                    stdin=DEVNULL,
                    pass_fds=(theirs.fileno(), lifeline_read),
                )
            finally:
                os.close(lifeline_read)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return _Rank(rank, process, reader, writer, lifeline_write)


async def _wait_ready(worker: _Rank, on_progress: Callable[[Progress], None]) -> Ready:
    while True:
        frame = await worker.receive()
        if isinstance(frame, Ready):
            return frame
        if not isinstance(frame, Progress):
            raise WorkerFailed(f"the worker of rank {worker.rank} answered Init with {type(frame).__name__}")
        if worker.rank == 0:
            on_progress(frame)
