"""The engine's end of its connection with one rank: the frames (frames.py), and the process that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from replica.errors import CheckpointError, CollectiveFailed, WorkerFailed
from replica.frames import (
    HEADER,
    Aborted,
    Blob,
    Connected,
    Failed,
    Frame,
    FrameError,
    Progress,
    Ready,
    StepDone,
    StepOutput,
    body_length,
    decode,
)

END_REASON_S: Final = 1.0  # between a worker's EOF and what is known of its end

F = TypeVar("F", Blob, Connected)


class RankProcess(Protocol):
    """A rank's process, wherever it runs. As a string, what to look for there."""

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None as long as that is not known."""

    async def wait(self) -> str:
        """Waits until it has ended, and says how."""

    def release(self) -> None:
        """Makes the worker look at the board (rank_board.py), whatever it is doing."""

    def kill(self) -> None:
        """Ends it at once, whatever it is doing."""

    def close(self) -> None:
        """Drops what this process holds of it, when it has ended."""


@dataclass(slots=True)
class RankLink:
    """One rank, and the frames to and from it."""

    rank: int  # in its replica
    process: RankProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body_bytes: int | None = None  # of the frame whose header was read

    def write(self, frame: bytes) -> None:
        """Begins to send a frame, which is sent as a whole whatever follows; `sent` must."""
        if not self.writer.is_closing():  # uvloop raises a RuntimeError for a write to what its peer has reset
            self.writer.write(frame)

    async def sent(self) -> None:
        """Waits until the socket has taken what was written, or nearly. Raises WorkerFailed."""
        if self.writer.is_closing():
            raise await self.failure()
        try:
            await self.writer.drain()
        except OSError as err:
            raise await self.failure() from err

    async def receive(self) -> Frame:
        """The worker's next frame; no part of it is lost when this is cancelled.

        Raises WorkerFailed, or CheckpointError if it refuses the checkpoint.
        """
        try:
            if self.body_bytes is None:
                self.body_bytes = body_length(await self.reader.readexactly(HEADER.size))
            frame = decode(await self.reader.readexactly(self.body_bytes))
            self.body_bytes = None
        except FrameError as err:
            raise WorkerFailed(f"the worker of rank {self.rank} sent what is no frame: {err}") from err
        except (asyncio.IncompleteReadError, OSError) as err:
            raise await self.failure() from err
        if isinstance(frame, Failed):
            if frame.is_config:
                raise CheckpointError(frame.error)
            raise WorkerFailed(f"the worker of rank {self.rank} failed: {frame.error}")
        return frame

    async def loaded(self, on_progress: Callable[[Progress], None]) -> Ready:
        """Waits until its weights are loaded."""
        while isinstance(frame := await self.receive(), Progress):
            on_progress(frame)
        if not isinstance(frame, Ready):
            raise WorkerFailed(f"the worker of rank {self.rank} sent {type(frame).__name__}, not Ready")
        return frame

    async def stepped(self, step: int) -> StepOutput | StepDone:
        """What comes of a step. Raises CollectiveFailed if the ranks did not finish it together."""
        frame = await self.receive()
        if isinstance(frame, Aborted):
            raise CollectiveFailed(f"rank {self.rank} did not finish step {step} with its peers: {frame.error}")
        expected = StepDone if self.rank else StepOutput
        if not isinstance(frame, expected) or frame.step != step:
            raise WorkerFailed(f"the worker of rank {self.rank} answered step {step} with {type(frame).__name__}")
        return frame

    async def regrouped(self, kind: type[F], epoch: int) -> F:
        """Waits for an answer of this epoch; those to what was cut off before it are of no interest."""
        while True:
            frame = await self.receive()
            if isinstance(frame, kind) and frame.epoch == epoch:
                return frame
            if isinstance(frame, Aborted) and (frame.epoch, frame.step) == (epoch, -1):
                raise CollectiveFailed(f"rank {self.rank} does not reach its peers: {frame.error}")

    async def failure(self) -> WorkerFailed:
        """Why the connection has ended."""
        try:
            async with asyncio.timeout(END_REASON_S):
                return self.ended(await self.process.wait())
        except TimeoutError:
            return WorkerFailed(f"the worker of rank {self.rank} closed its connection")

    def ended(self, how: str) -> WorkerFailed:
        """The error for a process that has ended."""
        return WorkerFailed(f"the worker of rank {self.rank} ended: {how}")
