"""Ranks as real processes that are connected by TCP, for one layout after another.

They are forked from a server that has imported torch once, so that eight of them start in the time of one.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from replica.groups import CollectiveCount
from replica.layout import Layout
from replica.rendezvous import Rendezvous
from tests.layout_driver import NUM_BLOCKS, Reference, Script, run_rank
from tests.step_driver import CPU, RankModel

DEADLINE_S: Final = 60.0
COLLECTIVE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Job:
    """What one process shall do as one rank of a layout."""

    folder: Path
    layout: Layout
    rank: int
    script: Script
    dtype: torch.dtype
    pinned: Reference | None


@dataclass(frozen=True)
class Result:
    """What a rank found."""

    logits: list[Tensor]
    num_collectives: int
    weight_bytes: int


class RankProcesses:
    """As many processes as the largest layout has ranks."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(
        self, folder: Path, layout: Layout, script: Script, dtype: torch.dtype, pinned: Reference | None = None
    ) -> list[Result]:
        """Runs a script in a layout; one result for each rank. A rank's exception is raised."""
        connections = self._connections[: layout.world]
        for rank, connection in enumerate(connections):
            _send(connection, Job(folder, layout, rank, script, dtype, pinned))
        blobs = [_receive(connection) for connection in connections]
        for connection in connections:
            _send(connection, blobs)
        return [_receive(connection) for connection in connections]


@contextmanager
def rank_processes(count: int) -> Iterator[RankProcesses]:
    """The processes, which are gone afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.layout_processes"])
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=_process, args=(theirs,), daemon=True) for _, theirs in pipes]
    try:
        for process in processes:
            process.start()
        yield RankProcesses([ours for ours, _ in pipes])
    finally:
        for process, (ours, theirs) in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            ours.close()
            theirs.close()


def _process(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        job: Job = pickle.loads(connection.recv_bytes())
        try:
            _send(connection, _run(job, connection))
        except Exception as err:
            _send(connection, err)


def _run(job: Job, connection: Connection) -> Result:
    model = RankModel(job.folder, job.layout, job.rank, num_blocks=NUM_BLOCKS, dtype=job.dtype)
    rendezvous = Rendezvous(job.layout, job.rank, device=CPU, peer_host="127.0.0.1", timeout_s=COLLECTIVE_TIMEOUT_S)
    _send(connection, rendezvous.blob())
    count = CollectiveCount()
    groups = rendezvous.connect(pickle.loads(connection.recv_bytes()), count)
    logits = run_rank(model, groups, job.script, job.pinned)
    rendezvous.close()
    return Result(logits, count.value, model.weight_bytes)


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))  # not `send`, which gives tensors as shared memory


def _receive(connection: Connection) -> Any:
    assert connection.poll(DEADLINE_S), "a rank does not answer"
    value = pickle.loads(connection.recv_bytes())
    if isinstance(value, Exception):
        raise value
    return value
