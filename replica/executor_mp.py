"""Starts a replica's workers on this machine, one process per rank.

Each worker has a socketpair for frames (frames.py), the read end of a lifeline pipe, whose write end only this process
holds, and the file of the board (rank_board.py). A byte in the lifeline ends the collective that the worker is in, if
the board says that its epoch is over; its EOF tells the worker that the engine is gone, however it went. In the other
direction a worker's death is seen at once, during a step by the EOF of its socket and otherwise by its exit status.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from replica.frames import Init, encode
from replica.process_tree import describe_status, ignoring_signals
from replica.rank_board import RankBoard, board_file
from replica.rank_link import RankLink
from replica.worker_environment import WORKER_ENVIRONMENT

WORKER_COMMAND: Final = (sys.executable, "-m", "replica.worker")


class LocalProcess:
    """A worker that is this process's child. See RankProcess."""

    def __init__(self, process: Process, lifeline: int) -> None:
        self.pid = process.pid
        self._process = process
        self._lifeline = lifeline  # write end

    def __str__(self) -> str:
        return f"pid={self.pid}"

    @property
    def end(self) -> str | None:
        """See RankProcess."""
        status = self._process.returncode
        return None if status is None else describe_status(status)

    async def wait(self) -> str:
        """See RankProcess."""
        return describe_status(await self._process.wait())

    def release(self) -> None:
        """See RankProcess."""
        with suppress(BrokenPipeError):  # it is dead, which is seen elsewhere
            os.write(self._lifeline, b"r")

    def kill(self) -> None:
        """See RankProcess."""
        if self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        """See RankProcess."""
        os.close(self._lifeline)


class LocalRanks:
    """The ranks of one replica on this machine. See RankHost."""

    def __init__(self, num_ranks: int = 1, *, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.num_ranks = num_ranks
        self._command = command
        self._board_file = board_file(num_ranks)
        self.board = RankBoard(num_ranks, self._board_file.fileno())

    async def start(self, init: Init) -> AsyncIterator[RankLink]:
        """See RankHost."""
        for rank in range(self.num_ranks):
            link = await self._spawn(rank)
            link.write(encode(_rank_init(init, rank)))
            yield link

    async def close(self) -> None:
        """See RankHost."""
        self._board_file.close()

    async def _spawn(self, rank: int) -> RankLink:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        fds = (theirs.fileno(), lifeline_read, self._board_file.fileno())
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *ignoring_signals(self._command),
                    *map(str, fds),
                    stdin=DEVNULL,
                    env={**WORKER_ENVIRONMENT, **os.environ},
                    pass_fds=fds,
                )
            finally:
                os.close(lifeline_read)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return RankLink(rank, LocalProcess(process, lifeline_write), reader, writer)


def _rank_init(init: Init, local_rank: int) -> Init:
    """What one rank of the replica gets, whose devices are consecutive."""
    kind, _, index = init.device.partition(":")
    device = f"{kind}:{int(index) + local_rank}" if index else kind
    return replace(init, rank=init.rank + local_rank, device=device)
