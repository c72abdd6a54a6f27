"""Ranks that reach their engine over TCP, as on another machine: real workers in processes that dial it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from replica.executor import RankExecutor
from replica.frames import Init, StepOutput, encode
from replica.rank_board import RANK_BEAT_S, RankBoard
from replica.rank_link import RankLink
from replica.remote_rank import GREETING_S, Lifeline, RankDoor
from replica.step_clock import LocalClock
from tests.checkpoints import VARIANTS, write_checkpoint
from tests.commands import ROOT, wait_until
from tests.step_driver import make_frame

STARTUP_S = 60.0
NOTICED_S = 10.0
PROGRAM = "import sys, replica.remote_rank as r; sys.exit(r.run(({!r}, {}), {!r}, local_rank={}, num_ranks={}))"


class DialledProcess:
    """A rank's process, of which the engine knows only its lifeline. See RankProcess."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
        self.process, self.lifeline = process, lifeline

    @property
    def end(self) -> str | None:
        return "gone" if self.lifeline.ended.done() else None

    async def wait(self) -> str:
        await asyncio.wait({self.lifeline.ended})
        return "gone"

    def release(self) -> None:
        self.lifeline.release()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.lifeline.close()


class DialledRanks:
    """Two ranks. See RankHost."""

    def __init__(self) -> None:
        self.num_ranks = 2
        self.board = RankBoard(2)
        self.processes: list[subprocess.Popen[bytes]] = []

    async def start(self, init: Init) -> AsyncIterator[RankLink]:
        door = RankDoor("127.0.0.1", self.num_ranks)
        self.processes = [dial(door, rank) for rank in range(self.num_ranks)]
        for rank, (frames, lifeline) in enumerate(await door.admit()):
            process = DialledProcess(self.processes[rank], Lifeline(lifeline, self.board, rank))
            reader, writer = await asyncio.open_connection(sock=frames)
            link = RankLink(rank, process, reader, writer)
            link.write(encode(replace(init, rank=rank)))
            yield link

    async def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def dial(door: RankDoor, rank: int) -> subprocess.Popen[bytes]:
    """The process of one of two ranks."""
    program = PROGRAM.format(*door.address, door.token, rank, 2)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Init:
    return Init(
        model=str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), VARIANTS["transformers_5"])),
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_size=16,
        kv_cache_bytes=2 * 3 * 2 * 16 * 4 * 16 * 20,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        attn_tp=2,
        mlp_tp=2,
        moe_tp=2,
    )


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what, NOTICED_S)


async def settled(executor: RankExecutor) -> tuple[int, ...]:
    """The ranks' counts, which come a little later than what they count."""
    counts: tuple[int, ...] = ()
    async with asyncio.timeout(NOTICED_S):
        while counts != executor.collectives_entered():
            counts = executor.collectives_entered()
            await asyncio.sleep(5 * RANK_BEAT_S)
    return counts


async def test_ranks_elsewhere_step_report_let_go_and_end_as_those_here_do(init: Init) -> None:
    ranks = DialledRanks()
    executor = RankExecutor(ranks)
    empty = replace(make_frame([], {}, []), group_tokens=np.zeros(0, np.int32))
    try:
        assert (await executor.start(init, timeout_s=STARTUP_S)).num_blocks > 0
        await executor.regroup(epoch=0, members=(0,), evicted=(), exchange=LocalClock().exchange, timeout_s=NOTICED_S)
        assert isinstance(await executor.step(empty), StepOutput)
        entered = await settled(executor)
        assert entered[0] == entered[1] > 0
        await until(executor.is_alive, "beats of both ranks")

        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):  # the first rank is in a collective
            async with asyncio.timeout(0.5):
                await executor.step(empty)
        await until(lambda: not executor.is_alive(), "the frozen rank to be noticed")
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        await executor.regroup(epoch=1, members=(0,), evicted=(), exchange=LocalClock().exchange, timeout_s=NOTICED_S)
        await executor.step(empty)
        assert await settled(executor) == entered, "they count from 0 in each epoch"
        await until(executor.is_alive, "beats of both ranks")

        ranks.processes[0].kill()
        with pytest.raises(Exception, match="the worker of rank 0 ended: gone"):
            async with asyncio.timeout(NOTICED_S):
                await executor.failed()
    finally:
        for worker in executor._ranks:
            worker.process.close()  # as the engine's death does
        await until(lambda: ranks.processes[1].poll() == 1, "the end of a rank without an engine")
        await executor.close()


def greeting(token: bytes, connection: int, rank: int) -> bytes:
    return token + bytes([connection, 0, rank])


async def test_only_the_ranks_are_let_in_and_nobody_keeps_them_waiting() -> None:
    door = RankDoor("127.0.0.1", 1)
    admitting = asyncio.ensure_future(door.admit())
    strangers = [socket.create_connection(door.address) for _ in range(5)]
    ranks = [socket.create_connection(door.address) for _ in range(2)]
    said = (b"", b"GET / HTTP/1.1\r\nHost: here.and.there\r\n\r\n", greeting(bytes(32), 0, 0))
    said += (greeting(door.token, 2, 0), greeting(door.token, 0, 1))
    try:
        for sock, data in zip(strangers, said, strict=True):
            sock.sendall(data)
        for connection, sock in enumerate(ranks):
            assert not admitting.done()
            sock.sendall(greeting(door.token, connection, 0))
        async with asyncio.timeout(GREETING_S / 2):
            ((frames, lifeline),) = await admitting
        for ours, theirs in zip((frames, lifeline), ranks, strict=True):
            assert ours.getpeername() == theirs.getsockname()
            ours.close()
        for sock in strangers:
            sock.settimeout(NOTICED_S)
            try:
                assert await asyncio.to_thread(sock.recv, 1) == b""
            except ConnectionResetError:
                pass  # it had said more than was read
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(door.address)
    finally:
        for sock in (*strangers, *ranks):
            sock.close()
        door.close()
