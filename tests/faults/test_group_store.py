"""The Redis that keeps a group's membership dies, freezes and forgets: serving never pauses, only membership does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from coordinator.private_redis import FROZEN_S
from tests.commands import READY_TIMEOUT_S, Commands, wait_until
from tests.faults.survival import (
    CRASH_PAUSE_S,
    NOTICED_S,
    ROUNDS,
    TIMEOUT_S,
    Group,
    Load,
    children_of,
    kill,
    under_load,
)
from tests.redis_server import RedisServer, redis_server

FREEZE_S = 10.0
PAUSE_S = 0.5  # nothing waits for Redis, whose clients here time out after so long

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.parametrize("round_", ROUNDS)]


def kill_connections(redis: RedisServer) -> None:
    answer = redis.call("CLIENT", "KILL", "TYPE", "normal")
    assert int(answer.removeprefix(b":").split()[0]) > 0, answer


def forget(redis: RedisServer) -> None:
    assert redis.call("FLUSHALL").startswith(b"+OK")


def restart_empty(redis: RedisServer) -> None:
    redis.kill()
    redis.start()


def num_keys(redis: RedisServer) -> int:
    return int(redis.call("DBSIZE").removeprefix(b":").split()[0])


def test_serving_does_not_pause_whatever_happens_to_redis_and_a_death_without_it_fails_the_group(
    commands: Commands, tmp_path: Path, round_: int
) -> None:
    with redis_server(tmp_path, password="of the store") as redis:
        group = Group.start(commands, "--redis-url", redis.url, "--progress-deadline-s", "3")
        for act in (kill_connections, forget, restart_empty):
            assert num_keys(redis) > 0
            with under_load(group) as load:
                act(redis)
                check_unpaused(group, load, act.__name__)
            wait_until(lambda: num_keys(redis) > 0, "the membership to be stored again", NOTICED_S)
        redis.freeze()
        thaw_s = time.monotonic() + FREEZE_S
        while time.monotonic() < thaw_s:
            with under_load(group) as load:
                check_unpaused(group, load, "freeze")
        with under_load(group) as load:
            redis.thaw()
            check_unpaused(group, load, "thaw")
        assert "membership store is away" in group.log() and "membership store is back" in group.log()

        redis.kill()
        with under_load(group) as load:
            kill(group.replicas[0].engine_pid)
            load.check_lost(group.replicas)
            errors = [error for stream in load.streams[group.replicas[1]] for error in stream.errors]
        assert errors and all("the new membership could not be committed within 3 s" in str(e) for e in errors)
        redis.start()
        wait_until(lambda: group.log().count("replica ready") == 6, "the second life of all", READY_TIMEOUT_S)


def test_a_private_redis_that_is_frozen_for_good_is_replaced_and_members_may_be_lost_again(
    commands: Commands, round_: int
) -> None:
    group = Group.start(commands)
    redis_pid = private_redis(group)
    with under_load(group) as load:
        os.kill(redis_pid, signal.SIGSTOP)
        kill(group.replicas[0].engine_pid)  # whose eviction must wait for the next Redis
        load.check_survivors("loss of a replica without a store", group.replicas[:1], limit_s=FROZEN_S + CRASH_PAUSE_S)
        load.check_lost(group.replicas[:1])
    assert private_redis(group) != redis_pid
    assert "private Redis is frozen, it is replaced" in group.log()


def private_redis(group: Group) -> int:
    """The process id of the Redis that the group's command runs for itself."""
    (command,) = group.commands
    (pid,) = [pid for pid in children_of(command.process.pid) if "redis" in Path(f"/proc/{pid}/comm").read_text()]
    return pid


def check_unpaused(group: Group, load: Load, what: str) -> None:
    """Waits for the streams: none has paused, and no epoch has ended."""
    pause_s, limit_s = load.pause_s(group.replicas), PAUSE_S + group.noise_s
    print(f"redis {what}: pause_ms={round(1000 * pause_s)} limit_ms={round(1000 * limit_s)}")
    assert pause_s <= limit_s
    assert [replica.group()["reconfigurations"] for replica in group.replicas] == [0, 0, 0]
