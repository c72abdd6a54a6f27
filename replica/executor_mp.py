"""Starts this machine's workers, one process per rank, and runs steps on them.

Ranks that share weights with others also need to know where those are: each worker gives a blob, `exchange` turns the
blobs of this replica's ranks into those of the whole group, and each worker gets them all.

Each worker has a socketpair for frames (frames.py) and the read end of a lifeline pipe, whose write end only this
process holds: its EOF tells the worker that the engine is gone, however it went. In the other direction a worker's
death is seen at once, during a step by the EOF of its socket and otherwise by `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NoReturn, TypeVar

from replica.errors import CheckpointError, WorkerFailed
from replica.frames import (
    HEADER,
    Blob,
    Blobs,
    Failed,
    Frame,
    FrameError,
    Init,
    Progress,
    Ready,
    Shutdown,
    StepDone,
    StepInput,
    StepOutput,
    body_length,
    decode,
    encode,
)
from replica.process_tree import describe_status, ignoring_signals

logger = logging.getLogger(__name__)

WORKER_COMMAND: Final = (sys.executable, "-m", "replica.worker")
# oneDNN and torch's bridge to it keep what they made for every shape of a matmul, 1024 each by default, which is
# gigabytes once prompts of so many lengths were seen. The shapes of decoding are few.
PRIMITIVE_CACHES: Final = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
SHUTDOWN_S: Final = 3.0  # a worker that was asked to exit is killed after so long
EXIT_STATUS_S: Final = 1.0  # between a worker's EOF and its exit status

F = TypeVar("F", Blob, Ready)
Exchange = Callable[[tuple[bytes, ...]], Awaitable[tuple[bytes, ...]]]


async def own_blobs(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The exchange of a replica that is a whole group."""
    return blobs


@dataclass(frozen=True, slots=True)
class _Rank:
    """One worker and the engine's end of its connection."""

    rank: int  # in its replica
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lifeline: int  # write end

    async def send(self, frame: bytes) -> None:
        if self.writer.is_closing():  # uvloop raises a RuntimeError for a write to what its peer has reset
            raise await self.failure()
        try:
            self.writer.write(frame)
            await self.writer.drain()
        except ConnectionError as err:
            raise await self.failure() from err

    async def receive(self) -> Frame:
        """The worker's next frame. Raises WorkerFailed, or CheckpointError if it refuses the checkpoint."""
        try:
            header = await self.reader.readexactly(HEADER.size)
            frame = decode(await self.reader.readexactly(body_length(header)))
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
        return _ended(self.rank, status)


class MpExecutor:
    """The ranks of one replica on this machine. `close` must be called, whatever happened before."""

    def __init__(self, *, num_ranks: int = 1, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.num_ranks = num_ranks
        self._command = command
        self._ranks: list[_Rank] = []
        self._counts: bytes | mmap.mmap = bytes(8 * num_ranks)  # shared with the workers: one 64-bit count a rank

    async def start(
        self,
        init: Init,
        *,
        timeout_s: float,
        on_progress: Callable[[Progress], None] = lambda _: None,
        exchange: Exchange = own_blobs,
    ) -> Ready:
        """Starts the workers, connects them with those of the whole group and waits until all are ready.

        `init` is that of the replica's first rank; the others' follow from it. `on_progress` gets the first rank's.
        Returns the first rank's answer, with the fewest blocks and the most bytes of any rank. Raises WorkerFailed when
        one dies or is not ready in time, CheckpointError when it refuses the checkpoint, and what `exchange` raises.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn_all(init)
                if init.layout.world > 1:
                    blobs = [(await _answer(worker, Blob, on_progress)).blob for worker in self._ranks]
                    frame = encode(Blobs(blobs=await exchange(tuple(blobs))))
                    for worker in self._ranks:
                        await worker.send(frame)
                answers = [await _answer(worker, Ready, on_progress) for worker in self._ranks]
        except TimeoutError as err:
            raise WorkerFailed(f"the workers were not ready after {timeout_s:g} s (--startup-timeout-s)") from err
        return replace(
            answers[0],
            num_blocks=min(answer.num_blocks for answer in answers),
            weight_bytes=max(answer.weight_bytes for answer in answers),
        )

    async def step(self, step_input: StepInput, on_sent: Callable[[], None] = lambda: None) -> StepOutput:
        """Runs one forward on all ranks and returns, when all have done it, what rank 0 sampled. Raises WorkerFailed.

        `on_sent` is called when all ranks have their frame: what is done then takes no time of the step.
        After a failure or a cancellation the connections are out of step: only `close` may follow.
        """
        frame = encode(step_input)
        for worker in self._ranks:
            await worker.send(frame)
        on_sent()
        # All at once: one that fails must be heard, although another one may be waiting for it in a collective.
        output, *others = await asyncio.gather(*(worker.receive() for worker in self._ranks))
        if not isinstance(output, StepOutput):
            raise WorkerFailed(f"the worker of rank 0 answered a step with {type(output).__name__}")
        for rank, other in enumerate(others, start=1):
            if not isinstance(other, StepDone) or other.step != output.step:
                raise WorkerFailed(f"the worker of rank {rank} answered step {output.step} with {other}")
        return output

    def collectives_entered(self) -> tuple[int, ...]:
        """For each rank, how many collectives it has entered so far. May be called from any thread."""
        return tuple(memoryview(self._counts).cast("q"))

    async def watch(self, rank: int) -> NoReturn:
        """Waits until the rank's process ends and raises WorkerFailed: parked or not, that is noticed at once."""
        raise _ended(rank, await self._ranks[rank].process.wait())

    async def failed(self) -> NoReturn:
        """As `watch`, of all ranks at once."""
        await asyncio.gather(*(self.watch(rank) for rank in range(self.num_ranks)))
        raise AssertionError("no watch returns")

    def kill(self) -> None:
        """Ends every worker at once, whatever it is doing."""
        for worker in self._ranks:
            if worker.process.returncode is None:
                worker.process.kill()

    async def close(self) -> None:
        """Asks every worker to exit, and kills those that do not within SHUTDOWN_S."""
        for worker in self._ranks:
            if not worker.writer.is_closing():  # it may be dead, which is what we are after
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

    async def _spawn_all(self, init: Init) -> None:
        with tempfile.TemporaryFile() as counts:
            counts.truncate(len(self._counts))
            self._counts = mmap.mmap(counts.fileno(), len(self._counts))
            for rank in range(self.num_ranks):
                self._ranks.append(await self._spawn(rank, counts.fileno()))
            for worker in self._ranks:
                await worker.send(encode(replace(_rank_init(init, worker.rank), count_fd=counts.fileno())))

    async def _spawn(self, rank: int, count_fd: int) -> _Rank:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *ignoring_signals(self._command),
                    str(theirs.fileno()),
                    str(lifeline_read),
                    stdin=DEVNULL,
                    env={**PRIMITIVE_CACHES, **os.environ},
                    pass_fds=(theirs.fileno(), lifeline_read, count_fd),
                )
            finally:
                os.close(lifeline_read)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return _Rank(rank, process, reader, writer, lifeline_write)


def _ended(rank: int, status: int) -> WorkerFailed:
    return WorkerFailed(f"the worker of rank {rank} ended: {describe_status(status)}", was_killed=status < 0)


def _rank_init(init: Init, local_rank: int) -> Init:
    """What one rank of the replica gets, whose devices are consecutive."""
    kind, _, index = init.device.partition(":")
    device = f"{kind}:{int(index) + local_rank}" if index else kind
    return replace(init, rank=init.rank + local_rank, device=device)


async def _answer(worker: _Rank, kind: type[F], on_progress: Callable[[Progress], None]) -> F:
    """The worker's next frame that is not Progress, which must be of this kind."""
    while isinstance(frame := await worker.receive(), Progress):
        if worker.rank == 0:
            on_progress(frame)
    if not isinstance(frame, kind):
        raise WorkerFailed(f"the worker of rank {worker.rank} sent {type(frame).__name__}, not {kind.__name__}")
    return frame
