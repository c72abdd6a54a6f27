"""When the supervisor restarts an engine, and with which code it ends (the engines are fake_engine.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replica import supervisor
from replica.config import ReplicaConfig
from replica.supervisor import Supervisor
from tests.commands import DEMO_MODEL, wait_until

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


@pytest.fixture(autouse=True)
def fake_engine_finds_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_ENGINE.parents[2]))


class Trial:
    """A supervised engine whose lives are planned."""

    def __init__(
        self,
        folder: Path,
        plan: str,
        *,
        drain_timeout_s: float = 30.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notes = folder / "notes"
        config = ReplicaConfig(model=Path("some/model"), api_key="secret", drain_timeout_s=drain_timeout_s)
        command = (sys.executable, str(FAKE_ENGINE), str(self.notes), plan)
        self.replica = Supervisor(config, command=command, now_s=now_s)

    async def run(self) -> int:
        async with asyncio.timeout(30):
            return await self.replica.run()

    @property
    def lives(self) -> list[list[str]]:
        return [line.split() for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    async def wait_for_life(self, number: int) -> None:
        await asyncio.to_thread(wait_until, lambda: len(self.lives) >= number, f"life {number}")


def note_pauses(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before restarts, in seconds; they are not waited for."""
    pauses_s: list[float] = []

    async def note(delay_s: float) -> None:
        pauses_s.append(delay_s)

    monkeypatch.setattr(trial.replica, "_pause", note)
    return pauses_s


async def test_an_engine_gets_all_settings_over_its_socket(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "early-2")
    await trial.run()
    assert trial.lives[0][1:3] == ["some/model", "secret"]


@pytest.mark.parametrize(
    ("plan", "code"), [("early-2", 2), ("early-1", 1), ("early-kill", 1), ("ready-2", 2), ("ready-0", 0)]
)
async def test_an_engine_that_is_not_worth_restarting_ends_the_command_with_its_code(
    tmp_path: Path, plan: str, code: int
) -> None:
    trial = Trial(tmp_path, plan)
    assert await trial.run() == code
    assert len(trial.lives) == 1


async def test_an_engine_that_was_ready_is_restarted_after_growing_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.2)
    monkeypatch.setattr(supervisor, "LAST_BACKOFF_S", 0.4)
    trial = Trial(tmp_path, "ready-1 ready-kill ready-1 early-2", now_s=lambda: 0.0)
    pauses_s = note_pauses(trial, monkeypatch)
    assert await trial.run() == 2
    assert pauses_s == [0.2, 0.4, 0.4]


async def test_a_life_that_was_long_begins_again_with_the_first_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter([0.0, 1.0, 2.0, 40.0])  # ready, then dead, of two lives
    trial = Trial(tmp_path, "ready-1 ready-1 early-2", now_s=lambda: next(times_s))
    pauses_s = note_pauses(trial, monkeypatch)
    assert await trial.run() == 2
    assert pauses_s == [1.0, 1.0]


async def test_a_stopped_engine_ends_the_command_with_0(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "serve")
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(1)
    trial.replica.stop()
    assert await running == 0


async def test_a_stop_before_the_engine_has_begun_is_not_lost(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "serve")
    running = asyncio.create_task(trial.run())
    await asyncio.sleep(0)
    trial.replica.stop()
    assert await running == 0
    assert len(trial.lives) == 1


async def test_a_stop_during_the_pause_before_a_restart_ends_at_once(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "ready-1 serve")
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(1)
    await asyncio.sleep(0.5)
    trial.replica.stop()
    assert await running == 0
    assert len(trial.lives) == 1


async def test_an_engine_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 0.1)
    trial = Trial(tmp_path, "stubborn", drain_timeout_s=0.1)
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(1)
    trial.replica.stop()
    assert await running == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_checkpoint_is_checked_ends_the_command_with_0(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def signalled(config: ReplicaConfig) -> Supervisor:
        os.kill(os.getpid(), number)
        return Supervisor(config)

    def fail(*_: object) -> None:
        raise AssertionError("nobody handled the signal")

    monkeypatch.setattr(supervisor, "_make_supervisor", signalled)
    before = signal.signal(number, fail)
    try:
        assert supervisor.supervise(ReplicaConfig(model=DEMO_MODEL, port=0)) == 0
    finally:
        signal.signal(number, before)
