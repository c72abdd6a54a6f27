"""A supervisor's mastership over the lives of its group, on a real Redis and with real members of the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import keys, standby
from coordinator.errors import GroupFailed
from coordinator.member import Member
from coordinator.membership import Membership
from coordinator.messages import Hello
from coordinator.store import Record
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.group_master import GroupMaster
from replica.layout import Layout
from tests.clock_driver import make_settings
from tests.commands import free_port
from tests.redis_server import RedisServer, redis_server

SECRET = "a secret of the group"
CONFIG = ReplicaConfig(
    model=Path("m"), layout=Layout.resolve(dp=2, tp=2), group="g", group_secret=SECRET, progress_deadline_s=5.0
)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


class Served:
    """A GroupMaster that runs, and the failures that it has told of."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.failures: list[str] = []
        self.config = config
        self.master = GroupMaster(
            config,
            {},
            why_not=lambda members: "",
            told_epoch=lambda: 0,
            has_members=lambda: False,
            on_failed=self._note_failure,
        )

    def _note_failure(self) -> None:
        self.failures.append(self.master.failure)


@asynccontextmanager
async def served(config: ReplicaConfig) -> AsyncIterator[Served]:
    made = Served(config)
    running: asyncio.Task[None] | None = None
    try:
        made.config = await made.master.start()
        running = asyncio.create_task(made.master.run())
        yield made
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        await made.master.close()


@asynccontextmanager
async def both_joined(config: ReplicaConfig, life: str) -> AsyncIterator[tuple[list[Member], int]]:
    """Two members that were told of the group's first epoch, and its number."""
    members = [
        Member(
            hello=Hello(group="g", replica_id=f"r{rank}", incarnation=f"{life}{rank}", dp_rank=rank, config={}, url=""),
            host=config.master_addr,
            port=config.master_port,
            secret=SECRET.encode(),
            startup_deadline_s=10.0,
            silence_s=5.0,
            collectives=lambda: (0,),
        )
        for rank in range(2)
    ]
    try:
        async with asyncio.timeout(20):
            first, _ = await asyncio.gather(*(member.join() for member in members))
        yield members, first.epoch
    finally:
        for member in members:
            member.close()


async def test_a_group_that_has_failed_begins_its_next_life_at_the_same_address_in_a_later_epoch(
    redis: RedisServer,
) -> None:
    async with served(replace(CONFIG, redis_url=redis.url)) as serving:
        async with both_joined(serving.config, "first") as (members, epoch):
            members[1].close()  # before a step is done
            with pytest.raises(GroupFailed, match="member 1"):
                await members[0].failed()
        async with both_joined(serving.config, "second") as (_, later_epoch):
            assert later_epoch > epoch
        assert len(serving.failures) >= 1 and "member 1 (r1) was lost" in serving.failures[0]


async def test_a_supervisor_that_comes_when_there_is_a_master_sends_its_replicas_there(redis: RedisServer) -> None:
    config = replace(CONFIG, redis_url=redis.url)
    async with served(config) as first, served(config) as second:
        assert first.master.is_serving and not second.master.is_serving
        assert second.config.master_port == first.config.master_port
        async with both_joined(second.config, "any"):
            pass


async def test_a_supervisor_that_ends_well_leaves_the_next_one_nothing_to_wait_for(redis: RedisServer) -> None:
    config = replace(CONFIG, redis_url=redis.url)
    for _ in range(2):
        async with asyncio.timeout(2), served(config) as serving:
            await asyncio.sleep(0.05)
            assert serving.master.is_serving


async def test_without_a_redis_one_of_its_own_is_started_and_gone_at_the_end() -> None:
    async with served(CONFIG) as serving, both_joined(serving.config, "any"):
        assert serving.master._redis is not None and serving.master._redis.pid is not None
    assert serving.master._redis.pid is None


async def test_garbage_under_the_group_s_name_is_a_bad_setting(redis: RedisServer) -> None:
    redis.call("HSET", keys.mastership("g"), "token", "1", "holder", "x", "address", "nowhere")
    redis.call("SET", keys.lease("g"), "1")
    told = r"lockstep:\{g\}:mastership has address 'nowhere', which no group has written: delete this key, or .*-group"
    with pytest.raises(ConfigError, match=told):
        async with served(replace(CONFIG, redis_url=redis.url)):
            pass


async def stored(redis: RedisServer, *, config_hash: str, is_over: bool = False) -> None:
    """What a group of this name has left behind."""
    store = Membership.at(redis.url, "g")
    lease = await store.take_lease(holder="x", address="10.0.0.9:7", seen_token=0, seen_epoch=4)
    await store.commit(lease.token, Record(epoch=5, members=(0, 1, 2), evicted=(), config_hash=config_hash))
    if is_over:
        await store.release(lease.token)
    else:
        redis.call("DEL", keys.lease("g"))
    await store.close()


@pytest.mark.parametrize("node_rank", [0, 1])
async def test_a_group_under_whose_name_another_configuration_was_lost_is_refused(
    redis: RedisServer, node_rank: int
) -> None:
    await stored(redis, config_hash="c0ffee" * 10)
    layout = Layout.resolve(dp=2, tp=2, nnodes=2)
    config = replace(CONFIG, redis_url=redis.url, layout=layout, node_rank=node_rank, master_port=free_port())
    told = (
        r"--group is 'g', .* another group: its configuration has the hash c0ffeec0ffee, this one's [0-9a-f]{12}; "
        r"it was last in epoch 5 with 3 replicas, its master at 10\.0\.0\.9:7; take another --group, or delete the key "
        r"lockstep:\{g\}:mastership if"
    )
    with pytest.raises(ConfigError, match=told):
        async with served(config):
            pass


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_group_of_the_same_configuration_goes_on_above_what_it_has_left(
    redis: RedisServer, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "LEASE_S", 0.1)  # for which a standby has the first right
    await stored(redis, config_hash=make_settings(config={}).config_hash, is_over=is_over)
    async with (
        served(replace(CONFIG, redis_url=redis.url)) as serving,
        both_joined(serving.config, "new") as (_, epoch),
    ):
        assert epoch > 5


async def test_the_name_of_a_group_that_has_ended_well_is_free_for_another_configuration(redis: RedisServer) -> None:
    await stored(redis, config_hash="c0ffee" * 10, is_over=True)
    async with (
        served(replace(CONFIG, redis_url=redis.url)) as serving,
        both_joined(serving.config, "new") as (_, epoch),
    ):
        assert epoch > 5


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "http://127.0.0.1:6379"])
async def test_a_redis_that_cannot_be_had_is_a_bad_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot keep the group's membership: .*Redis.* \(--redis-url\)"):
        async with served(replace(CONFIG, redis_url=url)):
            pass
