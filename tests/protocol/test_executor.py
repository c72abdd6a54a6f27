"""The executor with real processes and the real frames; the workers have no model (fake_worker.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvloop

from replica import rank_board
from replica.errors import CheckpointError, CollectiveFailed, WorkerFailed
from replica.executor import Exchange, RankExecutor, Regrouped
from replica.executor_mp import LocalRanks
from replica.frames import Init, Progress, StepInput
from replica.rank_board import RankBoard
from replica.worker_environment import WORKER_ENVIRONMENT
from tests.commands import wait_until

FAKE_WORKER = Path(__file__).parent / "fake_worker.py"
ROOT = FAKE_WORKER.parents[2]

INIT = Init(
    model="five5",
    dtype="float32",
    device="cpu",
    num_threads=1,
    block_size=16,
    kv_cache_bytes=1,
    max_model_len=16,
    max_num_seqs=1,
    max_num_batched_tokens=16,
)


def make_step(step: int, num_tokens: int = 1) -> StepInput:
    ints = np.zeros(num_tokens, np.int32)
    floats = np.zeros(1, np.float32)
    one = np.zeros(1, np.int32)
    return StepInput(
        step=step,
        num_decodes=0,
        token_ids=ints,
        positions=ints,
        slots=ints,
        query_starts=np.array([0, num_tokens], np.int32),
        context_lens=one,
        block_tables=np.zeros((1, 1), np.int32),
        sample_rows=one,
        temperature=floats,
        top_k=one,
        top_p=floats,
        min_p=floats,
        seeds=np.zeros(1, np.uint64),
        choices=one,
        output_indices=one,
    )


@asynccontextmanager
async def executor_of(mode: str, *, num_ranks: int = 1) -> AsyncIterator[RankExecutor]:
    executor = RankExecutor(LocalRanks(num_ranks, command=(sys.executable, str(FAKE_WORKER), mode)))
    try:
        yield executor
    finally:
        pids = pids_of(executor)
        await executor.close()
        assert all(map(is_gone, pids))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pids_of(executor: RankExecutor) -> list[int]:
    return [worker.process.pid for worker in executor._ranks]


def is_python(pid: int) -> bool:
    return "python" in Path(f"/proc/{pid}/exe").readlink().name


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


@pytest.fixture(autouse=True)
def fake_worker_finds_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def test_a_worker_loads_reports_and_runs_steps() -> None:
    progress: list[Progress] = []
    async with executor_of("works") as executor:
        ready = await executor.start(INIT, timeout_s=20, on_progress=progress.append)
        assert ready.num_blocks == 5
        assert progress == [Progress(done_bytes=10, total_bytes=20), Progress(done_bytes=20, total_bytes=20)]
        for step in range(3):
            output = await executor.step(make_step(step))
            assert (output.step, output.token_ids.tolist()) == (step, [step])


async def test_a_step_larger_than_the_sockets_buffer_arrives_whole() -> None:
    async with executor_of("works") as executor:
        await executor.start(INIT, timeout_s=20)
        output = await executor.step(make_step(4, num_tokens=500_000))
        assert output.token_ids.tolist() == [4]


async def test_all_ranks_take_part_and_rank_0_answers() -> None:
    async with executor_of("works", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        assert len(set(pids_of(executor))) == 2
        assert (await executor.step(make_step(1))).token_ids.tolist() == [1]


async def test_a_checkpoint_that_the_worker_refuses_is_a_checkpoint_error() -> None:
    async with executor_of("refuses") as executor:
        with pytest.raises(CheckpointError, match="truncated"):
            await executor.start(INIT, timeout_s=20)


@pytest.mark.parametrize(
    ("mode", "timeout_s", "message"),
    [
        ("dies at start", 20, "rank 0 ended: exit status 7"),
        ("never ready", 1.0, r"not ready after 1 s \(--startup-timeout-s\)"),
        ("sends garbage", 20, "no frame"),
        ("claims a huge frame", 20, "2147483648 bytes, limit is"),
    ],
)
async def test_a_worker_that_cannot_start_fails_in_one_line(mode: str, timeout_s: float, message: str) -> None:
    async with executor_of(mode) as executor:
        with pytest.raises(WorkerFailed, match=message) as raised:
            await executor.start(INIT, timeout_s=timeout_s)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("mode", "message"),
    [("fails a step", "rank 0 failed: RuntimeError: boom"), ("dies in a step", "rank 0 ended: killed by SIGKILL")],
)
async def test_a_worker_that_ends_in_a_step_fails_the_step_with_its_reason(mode: str, message: str) -> None:
    async with executor_of(mode) as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(WorkerFailed, match=message):
            await executor.step(make_step(0))


async def test_a_worker_killed_while_nothing_runs_is_noticed_at_once() -> None:
    async with executor_of("works", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        watch = asyncio.create_task(executor.watch(1))
        await asyncio.sleep(0.05)
        assert not watch.done()
        os.kill(pids_of(executor)[1], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(WorkerFailed, match="rank 1 ended: killed by SIGKILL"):
            await watch
        assert time.monotonic() - killed_s < 1


async def test_a_frozen_worker_is_killed_when_the_executor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.executor.SHUTDOWN_S", 0.2)
    async with executor_of("freezes in a step") as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await executor.step(make_step(0))


async def test_workers_exit_by_themselves_when_they_are_asked_to() -> None:
    async with executor_of("works") as executor:
        await executor.start(INIT, timeout_s=20)
        process = executor._ranks[0].process
        await executor.close()
        assert process.end == "exit status 0"


async def test_a_worker_without_an_engine_ends() -> None:
    """A process that starts the executor is killed; its worker must not outlive it."""
    script = (
        "import asyncio, sys\n"
        "from tests.protocol.test_executor import FAKE_WORKER, INIT, pids_of\n"
        "from replica.executor import RankExecutor\n"
        "from replica.executor_mp import LocalRanks\n"
        "async def main():\n"
        "    executor = RankExecutor(LocalRanks(command=(sys.executable, str(FAKE_WORKER), 'works')))\n"
        "    await executor.start(INIT, timeout_s=20)\n"
        "    print(*pids_of(executor), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert engine.stdout is not None
    async with asyncio.timeout(30):
        worker_pid = int(await engine.stdout.readline())
    engine.kill()
    await engine.wait()
    await asyncio.to_thread(wait_until, lambda: is_gone(worker_pid), "the end of the worker", 1)


@pytest.mark.parametrize("given", ["", "64"])
async def test_the_caches_of_a_workers_matmuls_are_bounded_unless_the_operator_says_how(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WORKER_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        if given:
            monkeypatch.setenv(name, given)
    async with executor_of("works") as executor:
        await executor.start(INIT, timeout_s=20)
        (pid,) = pids_of(executor)
        environment = environment_of(pid)
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        assert f"{name}={given or WORKER_ENVIRONMENT[name]}" in environment


async def test_a_worker_ignores_what_the_whole_process_group_gets_before_its_first_line() -> None:
    async with executor_of("works") as executor:
        starting = asyncio.create_task(executor.start(INIT, timeout_s=20))
        await asyncio.to_thread(wait_until, lambda: any(map(is_python, pids_of(executor))), "the worker's interpreter")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pids_of(executor)[0], number)
        await starting


def test_a_worker_killed_with_a_step_unread_is_a_failed_worker_and_the_executor_closes() -> None:
    """Its end of the socket is reset then, and uvloop, unlike asyncio, refuses to write to such a transport."""

    async def run() -> None:
        async with executor_of("works") as executor:
            await executor.start(INIT, timeout_s=20)
            (pid,) = pids_of(executor)
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGKILL)
            for step in range(2):
                with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
                    await executor.step(make_step(step))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def own_blobs(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The exchange of a replica that is a whole group."""
    return blobs


async def regroup(
    executor: RankExecutor, epoch: int, exchange: Exchange = own_blobs, timeout_s: float = 20.0
) -> Regrouped:
    return await executor.regroup(epoch=epoch, members=(0,), evicted=((1,),), exchange=exchange, timeout_s=timeout_s)


async def never(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """An exchange whose peers do not come."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_ranks_exchange_their_blobs_and_the_slowest_reload_and_the_most_bytes_are_told() -> None:
    seen: list[tuple[bytes, ...]] = []

    async def exchange(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        seen.append(blobs)
        return blobs

    async with executor_of("works", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        regrouped = await regroup(executor, 3, exchange)
        assert seen == [(b"0 of 3", b"1 of 3")]
        assert (regrouped.reload_s, regrouped.weight_bytes) == (0.5, 21)
        assert (await executor.step(make_step(1))).token_ids.tolist() == [1]


async def superseded(blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """An exchange that is called off."""
    raise LookupError("a newer epoch")


@pytest.mark.parametrize("mode", ["aborts on rank 1", "waits on rank 0"])
async def test_a_collective_that_fails_cuts_the_step_off_and_the_next_epoch_begins_with_clean_answers(
    mode: str,
) -> None:
    async with executor_of(mode, num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        for epoch in (1, 2):
            with pytest.raises(CollectiveFailed, match="rank 1 did not finish step 5 with its peers: rank 7 is gone"):
                async with asyncio.timeout(20):
                    await executor.step(make_step(5))
            await regroup(executor, epoch)


async def test_a_late_answer_to_a_step_that_was_cut_off_is_dropped() -> None:
    async with executor_of("answers a step late", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        for epoch in (1, 2, 3):
            step = asyncio.create_task(executor.step(make_step(7, num_tokens=100_000)))
            await asyncio.sleep(0.05 * (epoch - 1))
            step.cancel()
            await asyncio.wait({step})
            await regroup(executor, epoch)
            assert (await executor.step(make_step(epoch))).step == epoch


async def test_an_epoch_is_superseded_wherever_it_is() -> None:
    async with executor_of("works", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        for epoch in range(1, 40):
            cut_off = asyncio.create_task(regroup(executor, epoch, own_blobs if epoch % 2 else never))
            for _ in range(epoch % 13):
                await asyncio.sleep(0)
            cut_off.cancel()
            await asyncio.wait({cut_off})
        await regroup(executor, 40)
        assert (await executor.step(make_step(0))).step == 0


async def test_an_epoch_whose_peers_are_not_reached_may_be_followed_by_another() -> None:
    async with executor_of("reaches nobody at first", num_ranks=2) as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(CollectiveFailed, match=r"rank \d does not reach its peers: rank 7 is gone"):
            await regroup(executor, 1)
        await regroup(executor, 2)


async def test_what_the_exchange_raises_comes_through_and_another_epoch_may_follow() -> None:
    async with executor_of("works") as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(LookupError):
            await regroup(executor, 1, superseded)
        await regroup(executor, 2)


async def test_a_rank_that_ends_in_an_epoch_is_a_failed_worker() -> None:
    async with executor_of("dies in an epoch") as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(WorkerFailed, match="rank 0 ended: exit status 3"):
            await regroup(executor, 1)


async def test_an_epoch_that_takes_too_long_is_a_failed_worker() -> None:
    async with executor_of("works") as executor:
        await executor.start(INIT, timeout_s=20)
        with pytest.raises(WorkerFailed, match=r"not connected after 0.2 s \(--startup-timeout-s\)"):
            await regroup(executor, 1, never, timeout_s=0.2)


def test_ranks_that_have_not_begun_to_beat_count_as_alive_and_silent_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = RankBoard(2)
    assert board.is_alive()
    board.beat(0)
    board.beat(1)
    assert board.is_alive()
    monkeypatch.setattr(rank_board, "SILENCE_S", 0.0)
    time.sleep(0.001)
    assert not board.is_alive()
    board.beat(0)
    assert not board.is_alive()  # rank 1


def test_both_ends_of_a_board_see_the_same_numbers() -> None:
    with rank_board.board_file(3) as file:
        ours, theirs = (RankBoard(3, file.fileno()) for _ in range(2))
    theirs.count_of(2)[0] += 7
    ours.epoch = 4
    assert ours.counts == (0, 0, 7) and theirs.epoch == 4
