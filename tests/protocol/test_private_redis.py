"""The Redis of the group's own: secret, restarted, and never left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from coordinator import private_redis
from coordinator.errors import PrivateRedisFailed, StoreUnavailable
from coordinator.membership import Membership
from coordinator.private_redis import FROZEN_S, PrivateRedis, find_server
from coordinator.store import Record

END_S = FROZEN_S + 5.0


@asynccontextmanager
async def running() -> AsyncIterator[PrivateRedis]:
    """A private Redis that is started again when it dies."""
    server = PrivateRedis()
    await server.start()
    keeper = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper
        await server.close()


async def test_it_serves_its_own_user_with_a_password_that_no_command_line_shows() -> None:
    async with running() as server:
        store = Membership.at(server.url, "group")
        assert (await store.take_lease(holder="a", address="h:1", seen_token=0, seen_epoch=0)).token == 1
        await store.close()
        password, path = server.url.removeprefix("unix://:").split("@")
        assert len(password) == 64
        assert password.encode() not in read_bytes(f"/proc/{server.pid}/cmdline")
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        stranger = Membership.at(f"unix://{path}", "group")
        with pytest.raises(StoreUnavailable, match="uthentication required"):
            await stranger.view()
        await stranger.close()
    assert not is_there(os.path.dirname(path))


def is_there(path: str) -> bool:
    return os.path.exists(path)


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


async def test_when_it_dies_it_comes_again_at_the_same_place_and_is_told_what_it_lacks() -> None:
    async with running() as server:
        store = Membership.at(server.url, "group")
        lease = await store.take_lease(holder="a", address="h:1", seen_token=0, seen_epoch=0)
        record = Record(epoch=1, members=(0, 1), evicted=(), config_hash="c")
        await store.commit(lease.token, record)
        for _ in range(2):
            dead = server.pid
            assert dead is not None
            os.kill(dead, signal.SIGKILL)
            await until_renewed(store, lease.token)
            assert server.pid != dead
        found = await store.take_lease(holder="b", address="h:2", seen_token=0, seen_epoch=0, replaces=1)
        assert (found.token, found.record) == (2, record)
        await store.close()


async def until_renewed(store: Membership, token: int, epoch: int = 1) -> None:
    began_s = time.monotonic()
    while True:
        try:
            return await store.renew(token, epoch)
        except StoreUnavailable:
            assert time.monotonic() - began_s < END_S
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent_however_that_ends(number: signal.Signals) -> None:
    code = """if True:
        import asyncio
        from coordinator.private_redis import PrivateRedis
        async def main():
            server = PrivateRedis()
            await server.start()
            print(server.pid, server.url, flush=True)
            await server.run()
        asyncio.run(main())
        """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    child = int(pid)
    assert is_alive(child)
    parent.send_signal(number)
    parent.wait(END_S)
    parent.stdout.close()
    deadline_s = time.monotonic() + END_S
    while is_alive(child):
        assert time.monotonic() < deadline_s, "the server was left behind"
        time.sleep(0.01)
    shutil.rmtree(Path(url.partition("@")[2]).parent)  # an empty folder is all that stays


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_frozen_one_is_replaced_in_bounded_time_and_the_next_is_told_what_it_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as server:
        store = Membership.at(server.url, "group")
        lease = await store.take_lease(holder="a", address="h:1", seen_token=6, seen_epoch=9)
        frozen = server.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        await until_renewed(store, lease.token, epoch=12)
        assert server.pid != frozen and not is_alive(frozen)
        view = await store.view()
        assert (view.token, view.epoch) == (lease.token, 12), "the highest that was ever seen"
        await store.close()
    assert "private Redis is frozen, it is replaced" in caplog.text


async def test_one_that_is_frozen_for_a_moment_is_left_alone() -> None:
    async with running() as server:
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S / 3)
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(FROZEN_S)
        assert server.pid == pid and is_alive(pid)


async def test_a_frozen_one_is_ended_at_close_all_the_same() -> None:
    server = PrivateRedis()
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await server.close()
    assert not is_alive(pid)


async def test_without_a_server_to_start_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(private_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrivateRedisFailed, match=r"redis-server or valkey-server .* --redis-url"):
        await PrivateRedis().start()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_the_path_goes_before_the_package_s(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / name
    binary.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(binary)


async def test_a_server_that_ends_at_once_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = PrivateRedis()
    with pytest.raises(PrivateRedisFailed, match="ended with code 3"):
        await server.start()
    await server.close()
