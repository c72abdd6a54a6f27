"""A real master and real members over TCP."""

from __future__ import annotations

import asyncio
import contextlib
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
from coordinator.clock import Phase
from coordinator.errors import Evicted, GroupFailed, JoinFailed, JoinRefused, MasterLost, Superseded
from coordinator.handshake import new_challenge
from coordinator.master import Master, bind
from coordinator.member import Member
from coordinator.messages import STOP, Accepted, Message, Reconfigure, encode
from tests.clock_driver import CONFIG, make_hello, make_settings

SECRET = b"0123456789abcdef"
ROOT = Path(__file__).parents[2]


def make_member(port: int, dp_rank: int, *, secret: bytes = SECRET, **settings: Any) -> Member:
    hello = make_hello(**{"dp_rank": dp_rank, **settings.pop("hello", {})})
    values = {"startup_deadline_s": 5.0, "silence_s": 2.0, "collectives": tuple, "redial_s": 0.3, **settings}
    return Member(hello=hello, host="127.0.0.1", port=port, secret=secret, **values)


@asynccontextmanager
async def serving(size: int = 2, **settings: Any) -> AsyncIterator[tuple[Master, int, asyncio.Task[None]]]:
    """A master, its port, and the task that runs it, which the test may await for the verdict."""
    limits = {"startup_deadline_s": 5.0, "progress_deadline_s": 2.0, **settings}
    master = Master(make_settings(size, **limits), SECRET)
    listener = await bind("127.0.0.1", 0)
    await master.start(listener)
    port = listener.getsockname()[1]
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
            epochs = await asyncio.gather(*(member.join() for member in members))
            assert {(epoch.epoch, epoch.members) for epoch in epochs} == {(1, tuple(range(size)))}
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


async def reconfigure(members: list[Member]) -> Reconfigure:
    """Members take up the next epoch. Returns how it begins."""
    changes = await asyncio.gather(*(member.reconfigured(member.epoch) for member in members))
    assert changes == [changes[0]] * len(members)
    goes = await asyncio.gather(*(member.ready(b"%d" % number) for number, member in enumerate(members)))
    assert {go.blobs for go in goes} == {tuple(b"%d" % number for number in range(len(members)))}
    return changes[0]


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
        releases = await asyncio.gather(*(member.released() for member in members))
        assert [release.prefill_tokens for release in releases] == [(0, 0, 7)] * 3
        for member in members:
            member.done(200)
            member.arrive(decode_tokens=0, prefill_tokens=0)
        members[0].want("drain")
        assert [(await member.released()).commands for member in members] == [("drain",)] * 3
        for member in members:
            member.done(201)
            member.arrive(decode_tokens=0, prefill_tokens=0)
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


async def test_a_member_that_is_gone_at_the_start_ends_the_group_at_once_and_is_named() -> None:
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


async def test_the_others_go_on_at_once_when_a_member_is_gone() -> None:
    async with running(3, progress_deadline_s=60.0) as (master, members, _):
        await take_step(members, 1, 1, 1)
        left = members[:2]
        for member in left:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        waits = [asyncio.ensure_future(member.released()) for member in left]
        began_s = time.monotonic()
        members[2].close()
        for wait in waits:
            with pytest.raises(Superseded, match="epoch 2 follows epoch 1"):
                await wait
        change = await reconfigure(left)
        assert (change.epoch, change.members, change.evicted) == (2, (0, 1), ((2,),))
        assert "member 2 (r2) was lost before step 1" in change.reason
        for _ in range(20):
            await take_step(left, 1, 0)
        assert time.monotonic() - began_s < 0.5
        assert master.clock.epoch == left[0].epoch == 2


async def test_a_loss_while_members_make_themselves_ready_supersedes_the_epoch() -> None:
    async with running(4, progress_deadline_s=60.0) as (_, members, _):
        await take_step(members, 1, 1, 1, 1)
        members[3].close()
        first = await members[0].reconfigured(1)
        waiting = asyncio.ensure_future(members[0].ready(b"0"))
        await asyncio.sleep(0.05)
        members[2].close()
        with pytest.raises(Superseded, match="epoch 3 follows epoch 2"):
            await waiting
        assert (first.epoch, first.members) == (2, (0, 1, 2))
        change = await reconfigure(members[:2])
        assert (change.epoch, change.members, change.evicted) == (3, (0, 1), ((3,), (2,)))
        await take_step(members[:2], 1, 1)


async def test_what_the_old_epoch_still_says_does_not_reach_the_new_one() -> None:
    async with running(3) as (master, members, _):
        await take_step(members, 1, 1, 1)
        for member in members:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        await asyncio.gather(*(member.released() for member in members))
        members[2].close()
        await asyncio.gather(*(member.superseded() for member in members[:2]))
        members[0].done(1)  # its ranks have reported just now
        members[0].arrive(decode_tokens=9, prefill_tokens=9)
        change = await reconfigure(members[:2])
        assert change.members == master.clock.members == (0, 1)
        await take_step(members[:2], 1, 1)
        assert master.clock.committed_step <= 0


async def test_a_member_whose_ranks_are_frozen_is_evicted_and_told() -> None:
    is_frozen = False
    async with serving(3, progress_deadline_s=1.2) as (_, port, _run):
        members = [make_member(port, rank) for rank in range(2)]
        members.append(make_member(port, 2, is_alive=lambda: not is_frozen))
        await asyncio.gather(*(member.join() for member in members))
        await asyncio.gather(*(member.ready(b"") for member in members))
        await take_step(members, 1, 1, 1)
        for member in members:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        await asyncio.gather(*(member.released() for member in members))
        is_frozen = True
        with pytest.raises(Evicted, match=r"member 2 \(r2\) (was|is) silent"):
            async with asyncio.timeout(3.0):
                await members[2].failed()
        change = await reconfigure(members[:2])
        assert change.evicted == ((2,),)
        assert 1000 < change.detect_ms < 2500
        await take_step(members[:2], 1, 1)
        for member in members:
            member.close()


async def test_an_evicted_member_that_comes_back_is_refused_by_name() -> None:
    async with running(3) as (_, members, _):
        await take_step(members, 1, 1, 1)
        zombie = members[2]
        assert zombie._socket is not None
        zombie._socket.shutdown(socket.SHUT_RDWR)  # the network breaks its connection, and works again
        with pytest.raises(Evicted, match=r"r2 \(r2\), dp_rank 2, was evicted: member 2 \(r2\) was lost"):
            async with asyncio.timeout(2.0):
                await zombie.failed()
        assert (await reconfigure(members[:2])).members == (0, 1)
        late = make_member(0, 2)
        late._address = zombie._address
        with pytest.raises(JoinRefused, match="was evicted"):
            await late.join()
        late.close()


async def test_a_fault_without_a_loss_begins_an_epoch_with_the_same_members() -> None:
    async with running(2) as (_, members, _):
        await take_step(members, 1, 1)
        for member in members:
            member.arrive(decode_tokens=1, prefill_tokens=0)
        await asyncio.gather(*(member.released() for member in members))
        members[1].fault(1, "all_gather raised")
        async with asyncio.timeout(3.0):
            change = await reconfigure(members)
        assert (change.epoch, change.members, change.evicted) == (2, (0, 1), ())
        assert "member 1 (r1) failed in step 1: all_gather raised" in change.reason
        await take_step(members, 1, 1)


async def test_a_member_that_does_not_arrive_while_others_have_work_is_evicted() -> None:
    async with running(2, progress_deadline_s=0.6) as (_, members, _):
        await take_step(members, 1, 1)
        members[0].arrive(decode_tokens=1, prefill_tokens=0)
        with pytest.raises(Superseded):
            async with asyncio.timeout(3.0):
                await members[0].released()
        change = await members[0].reconfigured(1)
        assert "member 1 (r1) did not arrive for step 1 within 0.6 s" in change.reason
        with pytest.raises(Evicted):
            await members[1].failed()


async def test_a_parked_group_lives_on_whose_deadlines_are_shorter_than_the_time_between_beats() -> None:
    async with serving(2, progress_deadline_s=0.2) as (master, port, _):
        members = [make_member(port, dp_rank, silence_s=0.2) for dp_rank in range(2)]
        with contextlib.ExitStack() as stack:
            for member in members:
                stack.callback(member.close)
            await asyncio.gather(*(member.join() for member in members))
            await asyncio.gather(*(member.ready(b"") for member in members))
            for member in members:
                member.arrive(decode_tokens=0, prefill_tokens=0)
            await asyncio.sleep(2.5)
            assert (master.clock.epoch, master.clock.is_parked) == (1, True)


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
    master = Master(make_settings(1), SECRET)
    await master.start(await bind("127.0.0.1", port))
    async with asyncio.timeout(3.0):
        await joining
    member.close()
    await master.close()


async def test_a_taken_master_port_is_an_error_at_once() -> None:
    async with serving() as (_, port, _):
        with pytest.raises(OSError, match="in use"):
            await bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([new_challenge(), Accepted(proof=bytes(32))], "does not know the group's secret"),
        ([replace(new_challenge(), version=3)], "the master speaks version 3, this member 2"),
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
from coordinator.master import Master, bind
from tests.clock_driver import make_settings

async def serve():
    master = Master(make_settings(1), b"0123456789abcdef")
    listener = await bind("127.0.0.1", 0)
    await master.start(listener)
    print(listener.getsockname()[1], flush=True)
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
        why = "closed|reset" if blow is signal.SIGKILL else "silent for 1"
        with pytest.raises(MasterLost, match=rf"({why}).*, and no master was found within 0.3 s"):
            await member.released()
        assert time.monotonic() - began_s < (1.2 if blow is signal.SIGKILL else 2.5)
    finally:
        member.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio leaves it to the garbage collector
