"""Taking over from a lost master: a real Redis, real sockets, and masters that are killed, frozen or cut off."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from coordinator import keys
from coordinator.errors import LeaseHeld
from coordinator.membership import Membership
from coordinator.standby import begin, take_over
from coordinator.store import LEASE_S, Lease, Record
from tests.redis_server import RedisServer, redis_server

GROUP = "g"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def opened(server: RedisServer) -> AsyncIterator[Callable[[], Membership]]:
    """Opens stores, each as a process of its own would; all of them are closed at the end."""
    server.call("FLUSHALL")
    stores: list[Membership] = []

    def open_store() -> Membership:
        stores.append(Membership.at(server.url, GROUP))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.close()


@asynccontextmanager
async def clock(*, greets: bool) -> AsyncIterator[str]:
    """A master's address: one that greets whoever connects, or, frozen, lets the kernel take the connection."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\1\xc0")
        await reader.read()
        writer.close()

    if greets:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as serving:
            yield f"127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield f"127.0.0.1:{listener.getsockname()[1]}"


async def mastered(store: Membership, address: str) -> Lease:
    """A group whose master is at `address`, with a committed membership."""
    lease = await store.take_lease(holder="first", address=address, seen_token=0, seen_epoch=0)
    await store.commit(lease.token, Record(epoch=lease.epoch, members=(0, 1), evicted=(), config_hash="c"))
    return lease


def standby(store: Membership, *, holder: str = "second", told_epoch: int = 1) -> asyncio.Task[Lease]:
    return asyncio.create_task(take_over(store, holder=holder, address="10.0.0.2:1", told_epoch=lambda: told_epoch))


async def renewed(store: Membership, lease: Lease, for_s: float) -> None:
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        await store.renew(lease.token, lease.epoch)
        await asyncio.sleep(LEASE_S / 8)


async def test_a_master_at_whose_address_nobody_listens_is_replaced_before_its_lease_runs_out(
    opened: Callable[[], Membership],
) -> None:
    master = opened()
    async with clock(greets=True) as address:
        lease = await mastered(master, address)
        waiting = standby(opened())
        await renewed(master, lease, 1.5 * LEASE_S)
    lease = await asyncio.wait_for(waiting, LEASE_S / 2)
    assert (lease.token, lease.epoch) == (2, 2)
    assert lease.record is not None and lease.record.members == (0, 1)
    found = await master.master()
    assert found is not None and (found.token, found.host) == (2, "10.0.0.2")


async def test_a_frozen_master_is_replaced_when_its_lease_has_run_out_and_not_before(
    opened: Callable[[], Membership],
) -> None:
    async with clock(greets=False) as address:
        master = opened()
        lease = await mastered(master, address)
        waiting = standby(opened())
        await renewed(master, lease, LEASE_S)
        assert not waiting.done()
        stopped_s = time.monotonic()
        assert (await asyncio.wait_for(waiting, 2 * LEASE_S + 2.0)).token == 2
        assert time.monotonic() - stopped_s > LEASE_S / 2


async def test_a_master_that_serves_but_cannot_renew_is_left_alone(opened: Callable[[], Membership]) -> None:
    async with clock(greets=True) as address:
        await mastered(opened(), address)
        waiting = standby(opened())
        await asyncio.sleep(2.5 * LEASE_S)
        assert not waiting.done()
        waiting.cancel()


async def test_of_two_standbys_one_takes_over_and_the_other_watches_it(opened: Callable[[], Membership]) -> None:
    async with clock(greets=True) as address:
        pass
    await mastered(opened(), address)
    standbys = [standby(opened(), holder=f"standby {number}") for number in range(2)]
    done, waiting = await asyncio.wait(standbys, return_when=asyncio.FIRST_COMPLETED, timeout=2 * LEASE_S)
    assert len(done) == len(waiting) == 1
    for each in standbys:
        each.cancel()


async def test_a_group_that_has_ended_is_not_taken_over(opened: Callable[[], Membership]) -> None:
    async with clock(greets=True) as address:
        pass
    master = opened()
    lease = await mastered(master, address)
    await master.release(lease.token)
    waiting = standby(opened())
    await asyncio.sleep(1.5 * LEASE_S)
    assert not waiting.done()
    waiting.cancel()


async def test_a_group_begins_at_once_where_none_has_been_or_the_last_one_has_ended(
    opened: Callable[[], Membership],
) -> None:
    store = opened()
    began_s = time.monotonic()
    lease = await begin(store, holder="a", address="h:1")
    await store.release(lease.token)
    again = await begin(store, holder="b", address="h:1")
    assert (again.token, again.epoch) == (2, 2)
    assert time.monotonic() - began_s < LEASE_S / 2


async def test_a_group_that_lives_is_not_begun_again(opened: Callable[[], Membership], server: RedisServer) -> None:
    """A supervisor that was started again finds that another has taken its group over meanwhile."""
    store, other = opened(), opened()
    lease = await mastered(store, "10.0.0.1:1")
    server.call("DEL", keys.lease(GROUP))
    beginning = asyncio.create_task(begin(opened(), holder="again", address="10.0.0.1:1"))
    await asyncio.sleep(LEASE_S / 4)
    await other.take_lease(holder="standby", address="10.0.0.2:1", seen_token=lease.token, seen_epoch=lease.epoch)
    with pytest.raises(LeaseHeld, match=r"10\.0\.0\.2:1 \(token 2\)"):
        await asyncio.wait_for(beginning, LEASE_S)


async def test_a_group_whose_master_died_without_a_standby_is_begun_again_after_a_while(
    opened: Callable[[], Membership],
) -> None:
    await mastered(opened(), "10.0.0.1:1")
    lease = await asyncio.wait_for(begin(opened(), holder="again", address="10.0.0.1:1"), 3 * LEASE_S)
    assert (lease.token, lease.epoch) == (2, 2)
