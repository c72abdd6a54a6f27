"""The membership store on a real Redis: fencing, idempotence, lost data, and every call's end in time."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator import keys
from coordinator.errors import Fenced, LeaseHeld, StoreGarbled, StoreUnavailable
from coordinator.membership import CALL_S, MAX_COMMANDS, SCRIPTS, Membership
from coordinator.redis_client import connect
from coordinator.store import LEASE_S, Lease, MasterAddress, Record
from tests.redis_server import RedisServer, redis_server

GROUP = "10.0.0.1:29500"
ADDRESS = "10.0.0.1:29500"
PYPROJECT = Path(keys.__file__).parents[1] / "pyproject.toml"
LATE_S = CALL_S + 0.3  # a call's own limit, on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), password="open-sesame") as running:
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


@pytest.fixture
def store(opened: Callable[[], Membership]) -> Membership:
    return opened()


async def take(store: Membership, holder: str = "a", **seen: Any) -> Lease:
    arguments: dict[str, Any] = {"seen_token": 0, "seen_epoch": 0, "address": ADDRESS} | seen
    return await store.take_lease(holder=holder, **arguments)


def record(epoch: int, *members: int, evicted: tuple[tuple[int, ...], ...] = ()) -> Record:
    return Record(epoch=epoch, members=members, evicted=evicted, config_hash="c0ffee")


def expire_lease(server: RedisServer) -> None:
    """Redis keeps its own clock, so a test expires a lease by deleting its key."""
    assert server.call("DEL", keys.lease(GROUP)) == b":1\r\n"


async def stored_record(store: Membership) -> Record | None:
    """What the next master would find."""
    view = await store.view()
    return (await take(store, f"reader{view.token}", replaces=view.token)).record


# Leases


async def test_the_first_lease_has_token_1_and_epoch_1_and_no_record(store: Membership) -> None:
    assert await take(store) == Lease(token=1, epoch=1, record=None)
    assert await store.master() == MasterAddress(token=1, host="10.0.0.1", port=29500)


async def test_a_lease_that_stands_is_refused_to_another_and_names_its_holder(opened: Callable[[], Membership]) -> None:
    await take(opened(), "a")
    with pytest.raises(LeaseHeld, match=r"10\.0\.0\.1:29500 \(token 1\)") as refusal:
        await take(opened(), "b", address="10.0.0.2:29500")
    assert (refusal.value.token, refusal.value.address) == (1, ADDRESS)


async def test_a_lease_that_ran_out_goes_to_the_next_with_a_higher_token_and_epoch(
    opened: Callable[[], Membership], server: RedisServer
) -> None:
    first = opened()
    await take(first, "a")
    await first.commit(1, record(1, 0, 1, 2))
    expire_lease(server)
    assert await first.master() is None
    lease = await take(opened(), "b")
    assert lease == Lease(token=2, epoch=2, record=record(1, 0, 1, 2))


async def test_a_lease_runs_out_by_itself_and_the_master_s_numbers_do_not(store: Membership) -> None:
    await take(store, seen_token=4, seen_epoch=8)
    await asyncio.sleep(LEASE_S + 0.3)
    view = await store.view()
    assert (view.is_leased, view.token, view.epoch, view.address) == (False, 5, 9, ADDRESS)


async def test_a_lease_is_replaced_at_once_by_who_knows_its_token(opened: Callable[[], Membership]) -> None:
    await take(opened(), "a")
    with pytest.raises(LeaseHeld):
        await take(opened(), "b", replaces=7)
    assert (await take(opened(), "b", replaces=1)).token == 2
    with pytest.raises(LeaseHeld):
        await take(opened(), "c", replaces=1)  # it has seen the one before


async def test_who_asks_twice_for_the_lease_gets_the_same(store: Membership) -> None:
    first = await take(store, "a")
    assert await take(store, "a") == first
    assert await take(store, "a", seen_token=1, seen_epoch=0) == first


async def test_who_asks_again_after_a_commit_gets_an_epoch_that_is_still_free(store: Membership) -> None:
    first = await take(store, "a")
    await store.commit(first.token, record(first.epoch, 0, 1))
    again = await take(store, "a")
    assert (again.token, again.epoch) == (first.token, first.epoch + 1)


async def test_what_was_seen_elsewhere_is_never_handed_out_again(store: Membership) -> None:
    lease = await take(store, seen_token=11, seen_epoch=40)
    assert (lease.token, lease.epoch) == (12, 41)


async def test_a_lease_that_is_released_may_be_taken_and_a_stale_release_does_nothing(
    opened: Callable[[], Membership],
) -> None:
    first, second = opened(), opened()
    await take(first, "a")
    assert not (await first.view()).is_over
    await first.release(1)
    await first.release(1)
    assert (await first.view()).is_over
    with pytest.raises(Fenced):
        await first.renew(1, 1)  # one that was under way
    await take(second, "b")
    await first.release(1)
    assert await second.master() == MasterAddress(token=2, host="10.0.0.1", port=29500)


async def test_an_ipv6_address_is_given_back_without_brackets(store: Membership) -> None:
    await take(store, address="[fd00::1]:29500")
    assert await store.master() == MasterAddress(token=1, host="fd00::1", port=29500)


# Commits


async def test_a_commit_done_twice_is_one(store: Membership) -> None:
    await take(store)
    await store.commit(1, record(1, 0, 1, 2))
    await store.commit(1, record(2, 0, 2, evicted=((1,),)))
    await store.commit(1, record(2, 0, 2, evicted=((1,),)))
    assert await stored_record(store) == record(2, 0, 2, evicted=((1,),))


async def test_an_epoch_has_one_membership_and_a_late_commit_changes_nothing(store: Membership) -> None:
    await take(store)
    await store.commit(1, record(3, 0, 2))
    for stale in (record(3, 0, 1), record(2, 0, 1, 2)):
        with pytest.raises(Fenced, match="epoch 3"):
            await store.commit(1, stale)
    assert await stored_record(store) == record(3, 0, 2)


async def test_a_master_whose_token_was_replaced_neither_renews_nor_commits_nor_takes_commands(
    opened: Callable[[], Membership],
) -> None:
    first, second = opened(), opened()
    await take(first, "a")
    await take(second, "b", replaces=1)
    for attempt in (first.renew(1, 5), first.commit(1, record(9, 0)), first.commands(())):
        with pytest.raises(Fenced, match="token 2"):
            await attempt
    assert (await second.view()).epoch == 2, "nothing of it was done"


async def test_of_two_holders_of_one_token_the_store_knows_one(
    opened: Callable[[], Membership], server: RedisServer
) -> None:
    """Both can come by it when the store loses its data in between."""
    first, second = opened(), opened()
    await take(first, "a")
    server.call("FLUSHALL")
    assert (await take(second, "b")).token == 1
    for attempt in (first.renew(1, 1), first.commit(1, record(1, 0))):
        with pytest.raises(Fenced):
            await attempt
    await second.renew(1, 1)


@pytest.mark.parametrize("script", SCRIPTS)
async def test_every_script_applied_twice_leaves_what_it_left_once(
    store: Membership, server: RedisServer, script: str
) -> None:
    """A reply may be lost; then the call is made again."""
    await take(store)
    await store.commit(1, record(1, 0, 1))
    await store.command("drain")
    await store.commands(())
    call = store._scripts[script]
    client = connect(server.url)
    state, lease, commands = keys.mastership(GROUP), keys.lease(GROUP), keys.commands(GROUP)
    calls: dict[str, tuple[list[str], list[Any]]] = {
        "take_lease": ([state, lease], ["b", ADDRESS, 3, 6, 1, 2000]),
        "renew": ([state, lease, commands], [1, "a", ADDRESS, 4, record(3, 0).to_json(), 2000]),
        "commit": ([state], [1, "a", ADDRESS, record(5, 1).to_json()]),
        "release": ([state, lease, commands], [1, "a"]),
        "view": ([state, lease], []),
        "add_command": ([commands], ["id sleep", 8]),
        "take_commands": ([state, commands], [1, "a", *store._received]),
    }
    await call(keys=calls[script][0], args=calls[script][1])
    once = await everything(client)
    await call(keys=calls[script][0], args=calls[script][1])
    assert await everything(client) == once
    await client.aclose()


async def everything(client: Any) -> list[Any]:
    return [
        await client.hgetall(keys.mastership(GROUP)),
        await client.get(keys.lease(GROUP)),
        await client.lrange(keys.commands(GROUP), 0, -1),
    ]


# A store that loses its data


def flush(server: RedisServer) -> None:
    server.call("FLUSHALL")


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("lose", [flush, restart])
async def test_a_renewal_gives_a_store_that_lost_its_data_what_it_lacks(
    opened: Callable[[], Membership], server: RedisServer, lose: Callable[[RedisServer], None]
) -> None:
    master = opened()
    lease = await take(master, seen_token=6, seen_epoch=20)
    await master.commit(lease.token, record(21, 0, 1))
    lose(server)
    await until_it_answers(master)
    assert (await master.view()).token == 0
    await master.renew(lease.token, 22)
    assert await master.master() == MasterAddress(token=7, host="10.0.0.1", port=29500)
    next_lease = await take(opened(), "b", replaces=7)
    assert next_lease == Lease(token=8, epoch=23, record=record(21, 0, 1))


@pytest.mark.parametrize("lose", [flush, restart])
async def test_a_commit_into_a_store_that_lost_its_data_fences_older_masters_again(
    opened: Callable[[], Membership], server: RedisServer, lose: Callable[[RedisServer], None]
) -> None:
    old, new = opened(), opened()
    await take(old, "a")
    await take(new, "b", replaces=1)
    lose(server)
    await until_it_answers(new)
    await new.commit(2, record(8, 0, 1))
    with pytest.raises(Fenced):
        await old.commit(1, record(9, 0))
    assert await stored_record(new) == record(8, 0, 1)


async def test_the_higher_token_wins_in_a_store_that_handed_out_a_lower_one_after_its_loss(
    opened: Callable[[], Membership], server: RedisServer
) -> None:
    old, upstart = opened(), opened()
    lease = await take(old, "a", seen_token=6, seen_epoch=20)
    await old.commit(lease.token, record(21, 0, 1))
    server.call("FLUSHALL")
    await take(upstart, "b")
    await upstart.commit(1, record(1, 1))
    await old.renew(lease.token, 21)
    with pytest.raises(Fenced):
        await upstart.renew(1, 1)
    assert await stored_record(old) == record(21, 0, 1)


async def test_a_record_that_is_none_is_not_decided_on(opened: Callable[[], Membership], server: RedisServer) -> None:
    await take(opened(), "a")
    server.call("HSET", keys.mastership(GROUP), "record", '{"epoch":3}')
    with pytest.raises(StoreGarbled, match="which no group has written"):
        await take(opened(), "b", replaces=1)


async def until_it_answers(store: Membership) -> None:
    """The first call after a restart may find its connection closed."""
    for _ in range(3):
        try:
            await store.view()
            return
        except StoreUnavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("the server has not come back")


# Commands


async def test_each_command_is_given_out_once_and_in_order(opened: Callable[[], Membership]) -> None:
    master, operator = opened(), opened()
    await take(master)
    for name in ("drain", "sleep level 1", "drain"):
        await operator.command(name)
    assert await master.renew(1, 1) == 3
    assert await master.commands(()) == ["drain", "sleep level 1", "drain"]
    await operator.command("wake")
    assert await master.commands(()) == ["wake"]
    assert await master.commands(()) == []


async def test_commands_whose_reply_was_lost_are_given_out_again(opened: Callable[[], Membership]) -> None:
    master, operator = opened(), opened()
    await take(master)
    await operator.command("drain")
    await master._run("take_commands", [keys.mastership(GROUP), keys.commands(GROUP)], [1, "a"])
    assert await master.commands(()) == ["drain"]


async def test_commands_that_not_all_members_have_acted_on_go_to_the_next_master_as_well(
    opened: Callable[[], Membership],
) -> None:
    first, second, operator = opened(), opened(), opened()
    await take(first, "a")
    for name in ("sleep", "drain", "sleep"):
        await operator.command(name)
    assert await first.commands(()) == ["sleep", "drain", "sleep"]
    assert await first.commands({"sleep"}) == [], "each master is given them once"
    await take(second, "b", replaces=1)
    assert await second.commands(()) == ["sleep", "sleep"]
    assert await second.commands(()) == []


async def test_commands_that_a_dead_master_never_had_go_to_the_next(opened: Callable[[], Membership]) -> None:
    first, second = opened(), opened()
    await take(first, "a")
    await first.command("drain")
    await take(second, "b", replaces=1)
    assert await second.commands(()) == ["drain"]


async def test_commands_that_nobody_takes_are_bounded(store: Membership) -> None:
    for number in range(MAX_COMMANDS):
        await store.command(f"command {number}")
    with pytest.raises(ValueError, match=f"{MAX_COMMANDS} commands wait already"):
        await store.command("one more")
    with pytest.raises(ValueError, match="1 to 200 characters"):
        await store.command("")


# A store in which another has written


GARBAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "a text for the hash": (("SET", keys.mastership(GROUP), "mine"), "mastership is a string, not a hash"),
    "a list for the lease": (("RPUSH", keys.lease(GROUP), "mine"), "lease is a list, not a string"),
    "a text for the commands": (("SET", keys.commands(GROUP), "mine"), "commands is a string, not a list"),
    "a lease that is no token": (("SET", keys.lease(GROUP), "mine"), "lease is 'mine'"),
    "a token that is no number": (("HSET", keys.mastership(GROUP), "token", "mine"), "mastership has token 'mine'"),
    "an epoch that is no number": (("HSET", keys.mastership(GROUP), "epoch", "x"), "mastership has epoch 'x'"),
    "an address without a port": (("HSET", keys.mastership(GROUP), "address", "h"), "mastership has address 'h'"),
    "a record that is no JSON": (("HSET", keys.mastership(GROUP), "record", "{"), "mastership has record '{'"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_under_a_group_s_key_is_named_with_its_remedy_and_never_another_error(
    opened: Callable[[], Membership], server: RedisServer, name: str
) -> None:
    command, told = GARBAGE[name]
    first, second = opened(), opened()
    await take(first, "a")
    server.call("DEL", command[1])
    assert b"ERR" not in server.call(*command)
    with pytest.raises(StoreGarbled, match="delete this key, or take another --group") as garbled:
        await second.check()
    assert told in str(garbled.value)
    for call in (
        lambda: first.renew(1, 1),
        lambda: first.commit(1, record(1, 0)),
        lambda: second.view(),
        lambda: second.master(),
        lambda: take(second, "b"),
        lambda: first.commands(()),
    ):
        with suppress(StoreUnavailable, LeaseHeld):  # or it has nothing to do with what is wrong
            await call()


async def test_a_server_that_does_not_let_us_look_is_no_garbage(server: RedisServer) -> None:
    server.call("ACL", "SETUSER", "blind", "on", ">secret", "~*", "+@all", "-type")
    blind = Membership.at(f"redis://blind:secret@{server.host}:{server.port}/0", GROUP)
    try:
        with pytest.raises(StoreUnavailable, match=r"did not show what it holds: .*no permissions") as refusal:
            await blind.check()
        assert not isinstance(refusal.value, StoreGarbled)
    finally:
        await blind.close()


async def test_what_a_group_has_written_passes_the_check_and_a_server_that_is_down_is_no_garbage(
    store: Membership, server: RedisServer
) -> None:
    await store.check()
    await take(store)
    await store.commit(1, record(1, 0, 1))
    await store.command("drain")
    await store.check()
    server.kill()
    with pytest.raises(StoreUnavailable) as away:
        await store.check()
    assert not isinstance(away.value, StoreGarbled)
    server.start()


# A server that does not answer


async def test_every_call_to_a_frozen_server_ends_within_its_limit_and_the_next_ones_are_sound(
    store: Membership, server: RedisServer
) -> None:
    await take(store)
    calls: list[Callable[[], Any]] = [
        lambda: take(store),
        lambda: store.renew(1, 1),
        lambda: store.commit(1, record(2, 0)),
        lambda: store.release(1),
        lambda: store.master(),
        lambda: store.view(),
        lambda: store.commands(()),
        lambda: store.command("drain"),
    ]
    server.freeze()
    try:
        for call in calls:
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await call()
            assert time.monotonic() - began_s < LATE_S
    finally:
        server.thaw()
    # No reply of an abandoned call may be taken for another's.
    assert (await store.view()).token == 1
    assert await store.commands(()) in (["drain"], [])
    await store.renew(1, 2)


async def test_a_commit_that_comes_late_out_of_a_frozen_server_does_not_undo_a_newer_one(
    opened: Callable[[], Membership], server: RedisServer
) -> None:
    master = opened()
    await take(master)
    server.freeze()
    try:
        for late in (record(2, 0, 1), record(3, 0)):
            with pytest.raises(StoreUnavailable):
                await master.commit(1, late)
    finally:
        server.thaw()
    await master.commit(1, record(4, 1))
    assert await stored_record(master) == record(4, 1)


async def test_a_call_that_is_cancelled_leaves_no_reply_for_the_next(store: Membership, server: RedisServer) -> None:
    await take(store)
    server.freeze()
    calls = [asyncio.ensure_future(store.view()) for _ in range(3)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    server.thaw()
    await store.commit(1, record(1, 0, 1))
    assert (await store.view()).token == 1
    assert await store.commands(()) == []


async def test_calls_after_the_server_has_cut_the_connections_work_again(
    store: Membership, server: RedisServer
) -> None:
    await take(store)
    for _ in range(2):
        server.call("CLIENT", "KILL", "TYPE", "normal")
        await until_it_answers(store)
        await store.renew(1, 1)


async def test_a_server_that_is_down_is_said_to_be_at_once_and_its_return_is_noticed(
    store: Membership, server: RedisServer
) -> None:
    await take(store)
    server.kill()
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="did not answer renew"):
            await store.renew(1, 1)
    assert time.monotonic() - began_s < LATE_S
    server.start()
    await until_it_answers(store)
    await store.renew(1, 1)


async def test_a_wrong_password_is_said_without_showing_it(server: RedisServer) -> None:
    store = Membership.at(server.url.replace(server.password, "wrong-guess"), GROUP)
    with pytest.raises(StoreUnavailable, match="password") as refusal:
        await store.view()
    assert "wrong-guess" not in str(refusal.value)
    await store.close()


async def test_a_copy_that_only_reads_is_no_store(server: RedisServer) -> None:
    """One that was not promoted yet answers, and refuses to write."""
    store = Membership.at(server.url, GROUP)
    server.call("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match=r"replica|read only"):
            await take(store)
    finally:
        server.call("REPLICAOF", "NO", "ONE")
        await store.close()


def test_the_scripts_are_installed_with_the_package_and_each_lists_its_keys_and_answers() -> None:
    folder = Path(keys.__file__).parent / "scripts"
    assert sorted(path.stem for path in folder.glob("*.lua")) == sorted(SCRIPTS)
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]["coordinator"]
    assert {path.name for pattern in patterns for path in folder.parent.glob(pattern)} >= {f"{n}.lua" for n in SCRIPTS}
    for name in SCRIPTS:
        text = (folder / f"{name}.lua").read_text()
        assert all(word in text for word in ("\n-- KEYS  1", "\n-- Returns "))


async def test_a_task_is_cancelled_in_a_call_whatever_the_call_is_about_to_do(store: Membership) -> None:
    lease = await take(store)

    async def renew_for_ever() -> None:
        while True:
            await store.renew(lease.token, lease.epoch)

    for num_turns in range(40):
        task = asyncio.create_task(renew_for_ever())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=2.0)
        assert task.cancelled(), f"after {num_turns} turns of the loop"
        await asyncio.sleep(0.02)  # the call that was given up gives its connection back: there are few
