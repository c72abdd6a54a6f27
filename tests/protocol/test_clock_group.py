"""A real master and real members over TCP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from coordinator import member as member_module
from coordinator.clock import ClockSettings, Phase
from coordinator.errors import GroupFailed, JoinFailed, JoinRefused, MasterLost
from coordinator.handshake import new_challenge
from coordinator.master import Master
from coordinator.member import Member
from coordinator.messages import STOP, Accepted, Message, encode
from tests.clock_driver import CONFIG, make_hello

SECRET = b"0123456789abcdef"
ROOT = Path(__file__).parents[2]


def make_member(port: int, dp_rank: int, *, secret: bytes = SECRET, **settings: Any) -> Member:
    hello = make_hello(**{"dp_rank": dp_rank, **settings.pop("hello", {})})
    values = {"startup_deadline_s": 5.0, "silence_s": 2.0, "collectives": tuple, **settings}
    return Member(hello=hello, host="127.0.0.1", port=port, secret=secret, **values)


@asynccontextmanager
async def serving(size: int = 2, **settings: Any) -> AsyncIterator[tuple[Master, int, asyncio.Task[None]]]:
    """A master, its port, and the task that runs it, which the test may await for the verdict."""
    limits = {"startup_deadline_s": 5.0, "progress_deadline_s": 2.0, **settings}
    master = Master(ClockSettings(group="g", size=size, config=CONFIG, **limits), SECRET)
    port = await master.start("127.0.0.1", 0)
    run = asyncio.ensure_future(master.run())
    try:
        yield master, port, run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await master.close()


@asynccontextmanager
async def running(size: int = 2, **settings: Any) -> AsyncIterator[tuple[Master, list[Member], asyncio.Task[None]]]:
    """A group whose members have all joined and are ready."""
    async with serving(size, **settings) as (master, port, run):
        members = [make_member(port, dp_rank) for dp_rank in range(size)]
        try:
            welcomes = await asyncio.gather(*(member.join() for member in members))
            assert {welcome.members for welcome in welcomes} == {tuple(range(size))}
            goes = await asyncio.gather(*(m.ready(b"%d" % rank) for rank, m in enumerate(members)))
            assert {go.blobs for go in goes} == {tuple(b"%d" % rank for rank in range(size))}
            yield master, members, run
        finally:
            for member in members:
                member.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(3.0):
        while not is_true():  # noqa: ASYNC110  nothing in the product signals this
            await asyncio.sleep(0.01)


async def take_step(members: list[Member], *decode_tokens: int) -> None:
    for member, count in zip(members, decode_tokens, strict=True):
        member.arrive(decode_tokens=count, prefill_tokens=0)
    for release in await asyncio.gather(*(member.released() for member in members)):
        assert release.decode_tokens == decode_tokens
    for member in members:
        member.done(member.step - 1)


async def test_a_group_steps_parks_wakes_and_stops_as_asked() -> None:
    async with running(3) as (master, members, run):
        for step in range(200):
            await take_step(members, step % 3, 1, 0)
        for member in members:
            member.arrive(decode_tokens=0, prefill_tokens=0)
        await asyncio.sleep(0.1)
        assert master.clock.is_parked
        members[2].arrive(decode_tokens=0, prefill_tokens=7)
        members[0].want("drain")
        releases = await asyncio.gather(*(member.released() for member in members))
        assert [release.prefill_tokens for release in releases] == [(0, 0, 7)] * 3
        for member in members:
            member.done(200)
            member.arrive(decode_tokens=0, prefill_tokens=0)
        drained = [release.commands for release in releases]
        if drained == [()] * 3:  # the wish came after the wake's release, so it is in the next
            drained = [(await member.released()).commands for member in members]
            for member in members:
                member.done(201)
                member.arrive(decode_tokens=0, prefill_tokens=0)
        assert drained == [("drain",)] * 3
        master.command(STOP)
        assert [(await member.released()).commands for member in members] == [(STOP,)] * 3
        for member in members:
            member.done(member.step - 1)
            member.close()
        async with asyncio.timeout(2.0):
            await run
        assert master.clock.phase is Phase.STOPPED


def test_a_group_steps_parks_wakes_and_stops_under_uvloop_too() -> None:
    uvloop.run(test_a_group_steps_parks_wakes_and_stops_as_asked())


async def test_an_arrival_overlaps_the_forward_before() -> None:
    async with running(2) as (_, members, _):
        for step in range(5):
            for member in members:
                member.arrive(decode_tokens=1, prefill_tokens=0)
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(member.released() for member in members))
            if step > 0:  # step - 1 ended only now, after the release of `step`
                for member in members:
                    member.done(step - 1)


async def test_a_parked_group_costs_next_to_no_cpu() -> None:
    async with running(4) as (_, members, _):
        await take_step(members, 1, 1, 1, 1)
        for member in members:
            member.arrive(decode_tokens=0, prefill_tokens=0)
        await asyncio.sleep(0.2)
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(2.0)
        share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        assert share < 0.02, f"the master and 4 members in this process take {share:.1%} of a core"


async def test_a_member_that_is_gone_ends_the_group_at_once_and_is_named() -> None:
    async with running(3, progress_deadline_s=60.0) as (_, members, run):
        for member in members:
            member.arrive(decode_tokens=0, prefill_tokens=0)
        calls: list[Coroutine[Any, Any, Any]] = [members[0].released(), members[1].released(), members[1].failed()]
        waits = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.05)
        began_s = time.monotonic()
        members[2].close()
        for wait in waits:
            with pytest.raises(GroupFailed, match=r"member 2 \(r2\) was lost before step 0"):
                await wait
        assert time.monotonic() - began_s < 0.5
        with pytest.raises(GroupFailed, match="member 2"):
            await run


async def test_a_fault_ends_the_group_for_all() -> None:
    async with running(2) as (_, members, _):
        await take_step(members, 1, 1)
        members[1].fault(0, "all_gather raised")
        members[0].arrive(decode_tokens=1, prefill_tokens=0)
        with pytest.raises(GroupFailed, match=r"member 1 .* all_gather raised"):
            await members[0].released()


async def test_a_member_that_waits_for_a_step_nobody_else_arrives_for_gets_a_verdict() -> None:
    async with running(2, progress_deadline_s=0.6) as (_, members, _):
        await take_step(members, 1, 1)
        members[0].arrive(decode_tokens=1, prefill_tokens=0)
        with pytest.raises(GroupFailed, match=r"member 1 \(r1\) did not arrive for step 1 within 0.6 s"):
            async with asyncio.timeout(3.0):
                await members[0].released()


async def test_a_busy_event_loop_is_not_a_dead_member() -> None:
    """The members beat from threads: one whose loop is blocked for longer than the deadline stays."""
    async with serving(1, progress_deadline_s=1.0) as (_, port, run):
        errors: list[BaseException] = []

        async def blocked() -> None:
            member = make_member(port, 0)
            try:
                await member.join()
                await member.ready(b"")
                member.arrive(decode_tokens=0, prefill_tokens=0)
                time.sleep(2.0)  # noqa: ASYNC251  this is the point
                member.arrive(decode_tokens=1, prefill_tokens=0)
                await member.released()
                await asyncio.sleep(0.5)
                member.done(0)
            finally:
                member.close()

        def run_blocked() -> None:
            try:
                asyncio.run(blocked())
            except BaseException as err:
                errors.append(err)

        thread = threading.Thread(target=run_blocked)
        thread.start()
        with pytest.raises(GroupFailed, match="was lost before step 1"):
            async with asyncio.timeout(5.0):
                await run
        await asyncio.to_thread(thread.join)
        assert errors == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hello": {"config": {**CONFIG, "dtype": "bfloat16"}}}, "dtype is bfloat16, the group's is float32"),
        ({"hello": {"group": "other"}}, "group is 'other'"),
        ({"secret": b"another secret of 24 b"}, "its secret is not the group's"),
        ({"hello": {"dp_rank": 2}}, "dp_rank is 2, the group has 2 members"),
    ],
)
async def test_who_does_not_fit_is_told_why_at_once(changes: dict[str, Any], reason: str) -> None:
    async with serving() as (master, port, _):
        member = make_member(port, 0, **changes)
        began_s = time.monotonic()
        with pytest.raises(JoinRefused, match=reason):
            await member.join()
        member.close()
        assert time.monotonic() - began_s < 1.0
        assert master.clock.missing == [0, 1]


async def test_a_rank_is_refused_while_the_first_lives_and_free_when_it_is_gone() -> None:
    async with serving() as (master, port, _):
        first, second, third = (make_member(port, 0, hello={"replica_id": name}) for name in ("a", "b", "c"))
        joining = asyncio.ensure_future(first.join())
        await until(lambda: master.clock.missing == [1])
        with pytest.raises(JoinRefused, match="dp_rank 0 is taken by a, which is alive"):
            await second.join()
        first.close()
        with pytest.raises(MasterLost):
            await joining
        await until(lambda: master.clock.missing == [0, 1])
        other = make_member(port, 1)
        await asyncio.gather(third.join(), other.join())
        for member in (second, third, other):
            member.close()


async def test_the_late_end_of_a_members_first_connection_does_not_end_its_second() -> None:
    async with serving() as (master, port, _):
        first, second = make_member(port, 0), make_member(port, 0)
        first_join = asyncio.ensure_future(first.join())
        await until(lambda: master.clock.missing == [1])
        first_connection = master._members[0]
        first.close()
        await asyncio.gather(first_join, return_exceptions=True)
        await until(lambda: master.clock.missing == [0, 1])
        second_join = asyncio.ensure_future(second.join())
        await until(lambda: master.clock.missing == [1])
        master.on_member_lost(first_connection, 0, "EOF")
        assert master.clock.missing == [1]
        second.close()
        await asyncio.gather(second_join, return_exceptions=True)


async def test_a_missing_member_is_named_to_all_at_the_startup_deadline() -> None:
    async with serving(2, startup_deadline_s=0.6) as (_, port, run):
        member = make_member(port, 0)
        with pytest.raises(GroupFailed, match=r"did not start within 0.6 s: dp_rank 1 has not joined"):
            await member.join()
        with pytest.raises(GroupFailed):
            await run
        member.close()


async def test_a_member_that_was_accepted_waits_for_the_others_longer_than_for_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_module, "CONNECT_S", 0.2)
    async with serving(2) as (_, port, _run):
        first, second = make_member(port, 0), make_member(port, 1)
        joining = asyncio.ensure_future(first.join())
        await asyncio.sleep(0.5)
        assert (await second.join()).members == (await joining).members == (0, 1)
        first.close()
        second.close()


async def test_without_a_master_joining_ends_at_the_deadline() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        member = make_member(bound.getsockname()[1], 0, startup_deadline_s=0.5)
        with pytest.raises(JoinFailed, match=r"no master at 127.0.0.1:\d+ within 0.5 s"):
            await member.join()
        member.close()


async def test_a_master_that_starts_later_is_found() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    member = make_member(port, 0)
    joining = asyncio.ensure_future(member.join())
    await asyncio.sleep(0.2)
    master = Master(ClockSettings(group="g", size=1, config=CONFIG), SECRET)
    await master.start("127.0.0.1", port)
    async with asyncio.timeout(3.0):
        await joining
    member.close()
    await master.close()


async def test_a_taken_master_port_is_an_error_at_once() -> None:
    async with serving() as (_, port, _):
        with pytest.raises(OSError, match="in use"):
            await Master(ClockSettings(group="g", size=1, config=CONFIG), SECRET).start("127.0.0.1", port)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([new_challenge(), Accepted(proof=bytes(32))], "does not know the group's secret"),
        ([replace(new_challenge(), version=2)], "the master speaks version 2, this member 1"),
    ],
)
async def test_a_master_that_is_not_the_groups_or_of_another_version_is_not_followed(
    frames: list[Message], reason: str
) -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(map(encode, frames)))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
        member = make_member(server.sockets[0].getsockname()[1], 0)
        with pytest.raises(JoinRefused, match=reason):
            await member.join()
        member.close()
        await asyncio.sleep(0.05)  # until `pretend` has ended too


MASTER_PROGRAM = """
import asyncio, sys
from coordinator.clock import ClockSettings
from coordinator.master import Master
from tests.clock_driver import CONFIG

async def serve():
    master = Master(ClockSettings(group="g", size=1, config=CONFIG), b"0123456789abcdef")
    print(await master.start("127.0.0.1", 0), flush=True)
    await master.run()

asyncio.run(serve())
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_master_that_is_gone_or_silent_is_lost(blow: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MASTER_PROGRAM), stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert process.stdout is not None
    member = make_member(int(await process.stdout.readline()), 0, silence_s=1.0)
    try:
        await member.join()
        await member.ready(b"")
        member.arrive(decode_tokens=0, prefill_tokens=0)
        process.send_signal(blow)
        began_s = time.monotonic()
        with pytest.raises(MasterLost, match="closed|reset" if blow is signal.SIGKILL else "silent for 1"):
            await member.released()
        assert time.monotonic() - began_s < (0.5 if blow is signal.SIGKILL else 2.0)
    finally:
        member.close()
        process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio leaves it to the garbage collector
