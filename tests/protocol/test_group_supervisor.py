"""The supervisor of a group: which of its engines (fake_engine.py) it starts again, over a real clock and store."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.membership import Membership
from coordinator.store import Record
from replica import group_master, supervisor
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.layout import Layout
from replica.supervisor import Supervisor
from tests.clock_driver import make_settings
from tests.commands import wait_until
from tests.redis_server import redis_server

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
CONFIG_HASH = make_settings(config={}).config_hash
CONFIG = ReplicaConfig(model=Path("some/model"), port=7000, layout=Layout.resolve(dp=2, tp=2))


@pytest.fixture(autouse=True)
def fake_engine_finds_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_ENGINE.parents[2]))
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(supervisor, "END_S", 0.2)


class Trial:
    """A supervised group whose engines each follow a plan of their own."""

    def __init__(self, folder: Path, plans: tuple[str, str], config: ReplicaConfig = CONFIG) -> None:
        self.folder = folder
        command = (sys.executable, str(FAKE_ENGINE), str(folder / "notes-{dp_rank}"), *plans)
        self.supervisor = Supervisor(config, shared={}, command=command)

    async def run(self) -> int:
        async with asyncio.timeout(30):
            return await self.supervisor.run()

    def lives(self, dp_rank: int) -> list[list[str]]:
        """What each life of one engine has noted: time, model, key, port, master port, group, secret."""
        notes = self.folder / f"notes-{dp_rank}"
        return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

    async def wait_for_life(self, number: int) -> None:
        def have_begun() -> bool:
            return all(len(self.lives(dp_rank)) >= number for dp_rank in range(2))

        await asyncio.to_thread(wait_until, have_begun, f"life {number} of both")


async def test_each_engine_has_its_own_port_and_all_have_the_same_clock_and_secret(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ("serve", "serve"))
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(1)
    trial.supervisor.stop()
    assert await running == 0
    (first,), (second,) = trial.lives(0), trial.lives(1)
    assert (first[3], second[3]) == ("7000", "7001")
    assert first[4:] == second[4:] and int(first[4]) > 0 and len(first[6]) >= 16


@pytest.mark.parametrize("first", ["ready-1", "ready-kill"])
async def test_the_others_go_on_without_an_engine_that_dies_and_which_is_not_started_again(
    tmp_path: Path, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    trial = Trial(tmp_path, (f"{first} serve", "serve"))
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(1)
    await asyncio.to_thread(wait_until, lambda: "replica lost" in caplog.text, "the death of the first")
    await asyncio.sleep(0.3)  # longer than the pause before a restart
    assert not running.done() and [len(trial.lives(dp_rank)) for dp_rank in range(2)] == [1, 1]
    trial.supervisor.stop()
    assert await running == 0, "what was lost before has no part in how the rest ends"
    (line,) = [record.getMessage() for record in caplog.records if "replica lost" in record.getMessage()]
    assert "not started again as long as its group goes on dp_rank=0" in line


@pytest.mark.parametrize(
    "plans",
    [
        ("ready-1 serve", "ready-1 serve"),
        ("ready-kill serve", "ready-1 serve"),
        ("failed-1 serve", "stubborn serve"),  # as an engine that is frozen
        ("stubborn serve", "failed-1 serve"),
    ],
)
async def test_a_group_that_has_ended_is_started_again_as_a_whole(tmp_path: Path, plans: tuple[str, str]) -> None:
    trial = Trial(tmp_path, plans)
    running = asyncio.create_task(trial.run())
    await trial.wait_for_life(2)
    trial.supervisor.stop()
    assert await running == 0


ELSEWHERE = replace(
    CONFIG,
    layout=Layout.resolve(dp=2, tp=2, nnodes=2),
    node_rank=1,
    master_port=7999,
    group_secret="a secret of both machines",
)


async def test_a_machine_that_has_lost_its_replicas_ends_with_1_as_its_group_goes_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ("", "ready-kill serve"), ELSEWHERE)
    assert await trial.run() == 1
    assert trial.lives(0) == [] and len(trial.lives(1)) == 1


@asynccontextmanager
async def group_elsewhere(folder: Path) -> AsyncIterator[tuple[Membership, ReplicaConfig, int]]:
    """A group whose master's supervisor, on another machine, is frozen: the kernel takes connections, nobody greets.

    Yields the store, the settings of this machine and the master's token.
    """
    with redis_server(folder) as redis, socket.create_server(("127.0.0.1", 0)) as frozen:
        config = replace(ELSEWHERE, group="g", redis_url=redis.url)
        store = Membership.at(redis.url, "g")
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        lease = await store.take_lease(holder="frozen", address=address, seen_token=0, seen_epoch=0)
        await store.commit(lease.token, both_live(1))
        try:
            yield store, config, lease.token
        finally:
            await store.close()


def both_live(epoch: int) -> Record:
    return Record(epoch=epoch, members=(0, 1), evicted=(), config_hash=CONFIG_HASH)


async def test_a_machine_that_has_just_lost_its_replicas_takes_over_from_a_master_that_is_frozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with group_elsewhere(tmp_path) as (store, config, _):
        trial = Trial(tmp_path, ("", "ready-kill serve"), config)
        running = asyncio.create_task(trial.run())
        await asyncio.to_thread(wait_until, lambda: "taking over as master" in caplog.text, "the takeover")
        assert len(trial.lives(1)) == 1 and (await store.view()).token == 2, "for those of the other machine"
        trial.supervisor.stop()
        await running


async def test_a_machine_that_has_lost_its_replicas_ends_once_the_others_have_a_membership_without_them(
    tmp_path: Path,
) -> None:
    async with group_elsewhere(tmp_path) as (store, config, token):
        trial = Trial(tmp_path, ("", "ready-kill serve"), config)
        running = asyncio.create_task(trial.run())
        await asyncio.to_thread(wait_until, lambda: len(trial.lives(1)) == 1, "its replica")
        for _ in range(4):
            await store.renew(token, 1)
            await asyncio.sleep(0.25)
        assert not running.done(), "its replica is a member yet"
        await store.commit(token, Record(epoch=2, members=(0,), evicted=((1,),), config_hash=CONFIG_HASH))
        assert await running == 1
        assert len(trial.lives(1)) == 1


async def test_a_machine_whose_replicas_have_stopped_with_their_group_ends_at_once(tmp_path: Path) -> None:
    async with group_elsewhere(tmp_path) as (_, config, _):
        async with asyncio.timeout(group_master.MISSED_S - 1):
            assert await Trial(tmp_path, ("", "ready-0"), config).run() == 0


async def test_a_machine_that_has_lost_its_replicas_ends_in_time_where_nobody_says_what_became_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_master, "MISSED_S", 0.5)
    async with group_elsewhere(tmp_path) as (_, config, _):
        assert await Trial(tmp_path, ("", "ready-kill serve"), config).run() == 1


async def test_a_machine_whose_group_has_failed_starts_its_replicas_again(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ("", "failed-1 serve"), ELSEWHERE)
    running = asyncio.create_task(trial.run())
    await asyncio.to_thread(wait_until, lambda: len(trial.lives(1)) == 2, "the second life")
    trial.supervisor.stop()
    assert await running == 0
    assert trial.lives(1)[1][4:6] == ["7999", "127.0.0.1:7999"], "the address that all machines were told"


@pytest.mark.parametrize(("status", "code"), [("early-2", 2), ("early-1", 1)])
async def test_an_engine_that_ends_before_it_is_ready_takes_the_others_along(
    tmp_path: Path, status: str, code: int
) -> None:
    trial = Trial(tmp_path, ("stubborn", status))
    assert await trial.run() == code
    assert [len(trial.lives(dp_rank)) for dp_rank in range(2)] in ([1, 1], [0, 1])


async def test_a_taken_master_port_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trial = Trial(tmp_path, ("serve", "serve"), replace(CONFIG, master_port=port))
        with pytest.raises(ConfigError, match=rf"clock at 127\.0\.0\.1:{port}: .*--master-port"):
            await trial.run()
    assert trial.lives(0) == trial.lives(1) == []
