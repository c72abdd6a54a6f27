"""A real worker process, spoken to in frames as its engine does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from replica.checkpoint import SINGLE_FILE
from replica.frames import FRAMES_VERSION, Failed, Frame, Init, Progress, Ready, Shutdown, StepInput, StepOutput
from replica.rank_board import board_file
from replica.worker import FrameChannel
from tests.checkpoints import VARIANTS, write_checkpoint
from tests.step_driver import StepDriver

DEADLINE_S: Final = 30.0  # a loaded machine starts torch in several seconds
GONE_S: Final = 10.0  # a worker without an engine ends so soon; torch takes its time on a busy machine
PROMPT: Final = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


class WorkerProcess:
    """The engine's ends of a worker's socket and pipe."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        with board_file(1) as board:
            fds = (theirs.fileno(), lifeline, board.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "replica.worker", *map(str, fds)],
                pass_fds=fds,
                stderr=subprocess.PIPE,
                text=True,
            )
        theirs.close()
        os.close(lifeline)
        self.sock.settimeout(DEADLINE_S)
        self.channel = FrameChannel(self.sock)

    def answer(self, frame: Frame) -> Frame | None:
        """Sends a frame; the next one back that is not Progress."""
        self.channel.send(frame)
        while isinstance(answer := self.channel.receive(), Progress):
            pass
        return answer

    def let_go(self) -> None:
        """Closes the lifeline, as an engine's death does."""
        os.close(self.lifeline)
        self.lifeline = -1

    def end(self) -> tuple[int, str]:
        """Waits for the exit: its code, and what the process wrote to stderr."""
        stderr = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, stderr

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.sock.close()
        if self.lifeline >= 0:
            self.let_go()


@contextmanager
def running() -> Iterator[WorkerProcess]:
    worker = WorkerProcess()
    try:
        yield worker
    finally:
        worker.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), VARIANTS["transformers_5"])


@pytest.fixture(scope="module")
def init(folder: Path) -> Init:
    return Init(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_size=16,
        kv_cache_bytes=2 * 3 * 2 * 16 * 4 * 16 * 20 + 1,  # 20 blocks, and a byte that makes none
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


@pytest.fixture(scope="module")
def ready(init: Init) -> Iterator[tuple[WorkerProcess, list[Frame]]]:
    """A warm worker, and all that it said until it was."""
    with running() as worker:
        said: list[Frame] = []
        worker.channel.send(init)
        while not said or isinstance(said[-1], Progress):
            frame = worker.channel.receive()
            assert frame is not None
            said.append(frame)
        yield worker, said


def prompt_step(token_ids: list[int], *, step: int = 0, num_samples: int = 1) -> StepInput:
    """A whole prompt in blocks 0 and on, sampled greedily after its last token as often as asked."""
    T, N = len(token_ids), num_samples
    return StepInput(
        step=step,
        num_decodes=0,
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(T, dtype=np.int32),
        slots=np.arange(T, dtype=np.int32),
        query_starts=np.array([0, T], np.int32),
        context_lens=np.array([T], np.int32),
        block_tables=np.arange(-(-T // 16), dtype=np.int32)[None],
        sample_rows=np.full(N, T - 1, np.int32),
        temperature=np.zeros(N, np.float32),
        top_k=np.zeros(N, np.int32),
        top_p=np.ones(N, np.float32),
        min_p=np.zeros(N, np.float32),
        seeds=np.zeros(N, np.uint64),
        choices=np.zeros(N, np.int32),
        output_indices=np.zeros(N, np.int32),
    )


def greedy_token(folder: Path) -> int:
    driver = StepDriver(folder)
    s = driver.add(PROMPT)
    driver.step({s: len(PROMPT)})
    return s.output_ids[0]


def test_a_worker_reports_its_loading_and_then_how_many_blocks_it_has(
    ready: tuple[WorkerProcess, list[Frame]], folder: Path
) -> None:
    _, (*progress, last) = ready
    assert isinstance(last, Ready) and last.num_blocks == 20 and last.load_s > 0
    assert 0 < last.weight_bytes < (folder / SINGLE_FILE).stat().st_size
    reports = [frame for frame in progress if isinstance(frame, Progress)]
    assert len(reports) == len(progress) > 0
    assert reports[-1].done_bytes == reports[-1].total_bytes == last.weight_bytes  # float32 in the file too


def test_a_step_gives_the_models_own_greedy_token(ready: tuple[WorkerProcess, list[Frame]], folder: Path) -> None:
    answer = ready[0].answer(prompt_step(PROMPT, step=41))
    assert isinstance(answer, StepOutput) and answer.step == 41
    assert answer.token_ids.tolist() == [greedy_token(folder)]


def test_a_step_without_tokens_is_answered_without_tokens(ready: tuple[WorkerProcess, list[Frame]]) -> None:
    empty = replace(
        prompt_step([], num_samples=0),
        query_starts=np.zeros(1, np.int32),
        context_lens=np.zeros(0, np.int32),
        block_tables=np.zeros((0, 0), np.int32),
    )
    answer = ready[0].answer(empty)
    assert isinstance(answer, StepOutput) and answer.token_ids.shape == (0,)


def test_equal_seeds_sample_equal_tokens_and_other_seeds_others(ready: tuple[WorkerProcess, list[Frame]]) -> None:
    seeds = np.array([7, 2**64 - 1, 7, *range(100, 117)], np.uint64)
    frame = replace(prompt_step(PROMPT, num_samples=20), temperature=np.full(20, 2.0, np.float32), seeds=seeds)
    answer = ready[0].answer(frame)
    assert isinstance(answer, StepOutput)
    assert answer.token_ids[0] == answer.token_ids[2]
    assert len(set(answer.token_ids.tolist())) > 5


def test_interrupts_of_the_process_group_do_not_end_a_worker(
    ready: tuple[WorkerProcess, list[Frame]], folder: Path
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        ready[0].process.send_signal(number)
    answer = ready[0].answer(prompt_step(PROMPT))
    assert isinstance(answer, StepOutput) and answer.token_ids.tolist() == [greedy_token(folder)]


def test_shutdown_ends_it_with_0_and_without_a_word(ready: tuple[WorkerProcess, list[Frame]]) -> None:
    assert ready[0].answer(Shutdown()) is None
    assert ready[0].end() == (0, "")


def test_a_worker_ends_with_its_engine_though_a_forward_is_running(init: Init) -> None:
    with running() as worker:
        assert isinstance(worker.answer(init), Ready)
        num_samples = 60_000  # seconds of work, and more than the socket holds: once sent, the worker is at it
        temperature = np.ones(num_samples, np.float32)
        worker.channel.send(replace(prompt_step(PROMPT, num_samples=num_samples), temperature=temperature))
        worker.let_go()
        assert worker.process.wait(timeout=GONE_S) == 1
        with suppress(ConnectionResetError):
            assert worker.channel.receive() is None


def test_a_closed_socket_ends_a_worker(init: Init) -> None:
    with running() as worker:
        assert isinstance(worker.answer(init), Ready)
        worker.sock.close()
        assert worker.process.wait(timeout=GONE_S) == 0


def test_a_damaged_checkpoint_is_the_users_fault(init: Init, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes()[:-100])
    with running() as worker:
        answer = worker.answer(replace(init, model=str(tmp_path)))
        assert isinstance(answer, Failed) and answer.is_config and "was the download cut short?" in answer.error
        assert worker.end() == (2, "")


def test_a_cache_too_small_for_one_sequence_is_refused_with_what_it_needs(init: Init) -> None:
    with running() as worker:
        answer = worker.answer(replace(init, max_model_len=16 * 20 + 1))
        assert isinstance(answer, Failed) and answer.is_config
        assert "holds 320 tokens, one sequence may have 321" in answer.error and "--kv-cache-gb" in answer.error
        assert worker.end()[0] == 2


def test_a_step_that_raises_is_told_to_the_engine_and_ends_the_worker(init: Init) -> None:
    with running() as worker:
        assert isinstance(worker.answer(init), Ready)
        answer = worker.answer(prompt_step([10**6]))
        assert isinstance(answer, Failed) and not answer.is_config and "IndexError" in answer.error
        code, stderr = worker.end()
        assert code == 1 and "worker failed" in stderr and "Traceback" in stderr


def test_a_frame_that_is_not_init_is_refused(init: Init) -> None:
    with running() as worker:
        answer = worker.answer(replace(init, version=999))
        assert isinstance(answer, Failed) and f"expected Init of version {FRAMES_VERSION}" in answer.error
        assert worker.end()[0] == 1
