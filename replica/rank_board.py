"""What an engine and its workers tell each other without frames: 64-bit numbers in a file that all of them map.

A worker inside a collective reads no frames and sends none. Here it shows how many collectives it has entered and that
its process runs, and here the engine says which epoch it is to let go of. Each number has one writer.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

RANK_BEAT_S: Final = 0.2  # between a rank's signs of life to its engine; the clock's beats are coordinator's
SILENCE_S: Final = 1.0  # a rank that has not beaten for so long is frozen, or has died
_PER_RANK: Final = 2  # collectives entered; monotonic time of the last beat in ns, 0 before the first


class RankBoard:
    """The numbers of one replica: `[epoch]`, then two of each rank. Its methods may be called from any thread."""

    def __init__(self, num_ranks: int, fd: int = -1) -> None:
        """Maps the file `fd` (see `board_file`); without one, the numbers are this process's own."""
        self._numbers: NDArray[np.int64] = np.frombuffer(mmap.mmap(fd, _num_bytes(num_ranks)), np.int64)
        self._ranks = self._numbers[1:].reshape(num_ranks, _PER_RANK)

    @property
    def epoch(self) -> int:
        """The epoch that the replica is in or goes to: those before it are over, and so are their collectives."""
        return int(self._numbers[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._numbers[0] = epoch

    def count_of(self, local_rank: int) -> NDArray[np.int64]:
        """[1] where a rank keeps its count of collectives entered."""
        return self._ranks[local_rank, :1]

    @property
    def counts(self) -> tuple[int, ...]:
        """Collectives that each rank has entered in its epoch."""
        return tuple(self._ranks[:, 0].tolist())

    def beat(self, local_rank: int) -> None:
        """The rank's process runs."""
        self._ranks[local_rank, 1] = time.monotonic_ns()

    def has_begun(self, local_rank: int) -> bool:
        """Whether the rank has beaten at all."""
        return bool(self._ranks[local_rank, 1])

    def keep_beating(self, local_rank: int) -> None:
        """Beats from a thread until the process ends or stops: the main thread may be in a collective."""

        def run() -> None:
            while True:
                self.beat(local_rank)
                time.sleep(RANK_BEAT_S)

        threading.Thread(target=run, name="beat", daemon=True).start()

    def is_alive(self) -> bool:
        """Whether every rank has beaten within SILENCE_S, or not begun to: its start has a deadline of its own."""
        last_ns = self._ranks[:, 1]
        is_silent = (last_ns > 0) & (last_ns < time.monotonic_ns() - int(SILENCE_S * 1e9))
        return not is_silent.any()


def board_file(num_ranks: int) -> IO[bytes]:
    """A file for the board of so many ranks; it may be closed when all have mapped it."""
    file = tempfile.TemporaryFile()
    file.truncate(_num_bytes(num_ranks))
    return file


def _num_bytes(num_ranks: int) -> int:
    return 8 * (1 + _PER_RANK * num_ranks)
