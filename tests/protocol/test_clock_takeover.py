"""A master that keeps its membership in a store: commits, the store's absence, and the next master."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from coordinator.clock import Phase
from coordinator.errors import Deposed, Fenced, GroupFailed, StoreUnavailable
from coordinator.master import Master, Mastership, bind
from coordinator.member import Member
from coordinator.store import Lease, MasterAddress, Record, View
from tests.clock_driver import make_settings
from tests.protocol.test_clock_group import ROOT, SECRET, make_member, reconfigure, take_step, until


class MemoryStore:
    """A Store that does what it is told at once, or says that it is away."""

    def __init__(self) -> None:
        self.is_away = False
        self.token = self.epoch = 0
        self.record: Record | None = None
        self.waiting: list[str] = []
        self.num_renewals = 0

    async def take_lease(
        self, *, holder: str, address: str, seen_token: int, seen_epoch: int, replaces: int | None = None
    ) -> Lease:
        self.token += 1
        self.epoch = max(self.epoch, seen_epoch) + 1
        return Lease(token=self.token, epoch=self.epoch, record=self.record)

    async def renew(self, token: int, epoch: int) -> int:
        self._check(token)
        self.num_renewals += 1
        return len(self.waiting)

    async def commit(self, token: int, record: Record) -> None:
        self._check(token)
        assert self.record is None or record.epoch > self.record.epoch or record == self.record
        self.record, self.epoch = record, max(self.epoch, record.epoch)

    async def release(self, token: int) -> None:
        raise NotImplementedError

    async def master(self) -> MasterAddress | None:
        raise NotImplementedError

    async def view(self) -> View:
        raise NotImplementedError

    async def commands(self, pending: Collection[str]) -> list[str]:
        taken, self.waiting = self.waiting, []
        return taken

    async def command(self, name: str) -> None:
        self.waiting.append(name)

    async def close(self) -> None:
        raise NotImplementedError

    def _check(self, token: int) -> None:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        if token != self.token:
            raise Fenced(f"the lease has token {self.token}, this master has {token}")


class Served:
    """A master that serves, and where."""

    def __init__(self, master: Master, port: int, run: asyncio.Task[None]) -> None:
        self.master = master
        self.port = port
        self.run = run

    async def die(self) -> None:
        """Its process ends."""
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)
        await self.master.close()


@asynccontextmanager
async def serving(store: MemoryStore, *, size: int = 3, is_takeover: bool = False) -> AsyncIterator[Served]:
    settings = make_settings(size, startup_deadline_s=5.0, progress_deadline_s=2.0)
    lease = await store.take_lease(holder="h", address="", seen_token=0, seen_epoch=0)
    master = Master(settings, SECRET, Mastership(store=store, lease=lease, is_takeover=is_takeover))
    listener = await bind("127.0.0.1", 0)
    await master.start(listener)
    served = Served(master, listener.getsockname()[1], asyncio.ensure_future(master.run()))
    try:
        yield served
    finally:
        await served.die()


class Whereabouts:
    """Where members find their master."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def find(self) -> tuple[str, int] | None:
        return "127.0.0.1", self.port


@asynccontextmanager
async def running(served: Served) -> AsyncIterator[tuple[list[Member], Whereabouts]]:
    """Three members that have done a step."""
    where = Whereabouts(served.port)
    members = [make_member(served.port, rank, find_master=where.find, redial_s=3.0, silence_s=1.0) for rank in range(3)]
    try:
        await asyncio.gather(*(member.join() for member in members))
        await asyncio.gather(*(member.ready(b"") for member in members))
        await take_step(members, 1, 1, 1)
        yield members, where
    finally:
        for member in members:
            member.close()


async def test_each_membership_is_in_the_store_before_members_are_told() -> None:
    store = MemoryStore()
    async with serving(store) as served, running(served) as (members, _):
        first = store.record
        assert first is not None and (first.epoch, first.members, first.evicted) == (1, (0, 1, 2), ())
        members[1].close()
        change = await reconfigure([members[0], members[2]])
        assert store.record == Record(epoch=2, members=(0, 2), evicted=((1,),), config_hash=first.config_hash)
        assert (change.epoch, change.members) == (2, (0, 2))


async def test_steps_go_on_while_the_store_is_away_and_a_loss_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.master")
    store = MemoryStore()
    async with serving(store) as served, running(served) as (members, _):
        store.is_away = True
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.5:
            await take_step(members, 1, 1, 1)
            await asyncio.sleep(0.01)
        members[1].close()
        left = [members[0], members[2]]
        waits = [asyncio.ensure_future(member.superseded()) for member in left]
        await asyncio.sleep(0.5)
        assert served.master.clock.phase is Phase.COMMITTING and not any(wait.done() for wait in waits)
        store.is_away = False
        change = await reconfigure(left)
        assert 400 < change.agree_ms < 1500
        await take_step(left, 1, 1)
        await asyncio.gather(*waits)
        await until(lambda: "membership store is back" in caplog.messages)
    for once in ("membership store is away", "membership is not committed yet"):
        assert sum(once in message for message in caplog.messages) == 1, once


async def test_a_loss_that_cannot_be_committed_by_the_deadline_fails_the_group() -> None:
    store = MemoryStore()
    async with serving(store) as served, running(served) as (members, _):
        store.is_away = True
        members[1].close()
        with pytest.raises(GroupFailed, match=r"member 1 .* could not be committed within 2 s"):
            async with asyncio.timeout(4.0):
                await members[0].failed()
        with pytest.raises(GroupFailed):
            await served.run


async def test_operators_commands_come_from_the_store() -> None:
    store = MemoryStore()
    async with serving(store) as served, running(served) as (members, _):
        for member in members:
            member.arrive(decode_tokens=0, prefill_tokens=0)
        await store.command("drain")
        async with asyncio.timeout(2.0):
            assert [(await member.released()).commands for member in members] == [("drain",)] * 3


async def test_members_go_on_with_the_next_master_when_theirs_is_gone() -> None:
    store = MemoryStore()
    async with serving(store) as first, running(first) as (members, where):
        for member in members:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        waits = [asyncio.ensure_future(member.released()) for member in members]
        await asyncio.gather(*waits)
        await first.die()
        began_s = time.monotonic()
        members[0].done(1)  # what they still do is said to nobody
        async with serving(store, is_takeover=True) as second:
            where.port = second.port
            change = await reconfigure(members)
            assert (change.epoch, change.members, change.reason) == (2, (0, 1, 2), "a new master has taken over")
            await take_step(members, 1, 1, 1)
            assert time.monotonic() - began_s < 1.5


async def test_the_next_master_evicts_who_does_not_come() -> None:
    store = MemoryStore()
    async with serving(store) as first, running(first) as (members, where):
        await first.die()
        members[2].close()
        async with serving(store, is_takeover=True) as second:
            where.port = second.port
            change = await reconfigure(members[:2])
            assert (change.epoch, change.members, change.evicted) == (2, (0, 1), ((2,),))
            await take_step(members[:2], 1, 1)


async def test_a_deposed_master_drops_its_members_and_they_find_the_other() -> None:
    store = MemoryStore()
    async with serving(store) as first, running(first) as (members, where):
        async with serving(store, is_takeover=True) as second:
            where.port = second.port
            with pytest.raises(Deposed, match="the lease has token 2, this master has 1"):
                async with asyncio.timeout(2.0):
                    await first.run
            assert (await reconfigure(members)).epoch == 2
            await take_step(members, 1, 1, 1)


async def test_a_deposed_master_evicts_nobody() -> None:
    store = MemoryStore()
    async with serving(store) as first, running(first) as (members, _):
        await until(lambda: store.num_renewals > 0)
        await store.take_lease(holder="other", address="", seen_token=0, seen_epoch=0)
        members[2].close()
        with pytest.raises(Deposed):
            await first.run
        assert store.record is not None and store.record.epoch == 1
        assert members[0].epoch == 1


MASTER_PROGRAM = """
import asyncio
from coordinator.master import Master, bind
from tests.clock_driver import make_settings

async def serve():
    master = Master(make_settings(2, progress_deadline_s=2.0), b"0123456789abcdef")
    listener = await bind("127.0.0.1", 0)
    await master.start(listener)
    print(listener.getsockname()[1], flush=True)
    await master.run()

asyncio.run(serve())
"""


async def hang() -> None:
    """A store that does not answer when it is asked for the master."""
    await asyncio.sleep(60.0)


async def test_members_that_took_a_frozen_master_for_dead_come_back_to_it() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MASTER_PROGRAM), stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    limits = {"silence_s": 1.0, "redial_s": 5.0}
    members = [make_member(port, 0, **limits), make_member(port, 1, **limits, find_master=hang)]
    try:
        await asyncio.gather(*(member.join() for member in members))
        await asyncio.gather(*(member.ready(b"") for member in members))
        await take_step(members, 1, 1)
        for member in members:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        await asyncio.gather(*(member.released() for member in members))
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(3.0):
            change = await reconfigure(members)
        assert (change.members, change.reason) == ((0, 1), "the master was paused")
        await take_step(members, 1, 1)
    finally:
        for member in members:
            member.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio leaves it to the garbage collector
