"""A group of three replicas that loses some: the others go on within a second, whatever dies or freezes.

Each is one round in CI; SURVIVE_ROUNDS holds more (`make survive`).
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.commands import Commands
from tests.faults.survival import (
    CRASH_PAUSE_S,
    ROUNDS,
    TIMEOUT_S,
    Group,
    kill,
    stopped,
    stopped_in_a_collective,
    under_load,
    wait_for_line,
    wait_gone,
)

DEADLINE_S = 2.0  # --progress-deadline-s of the groups in which something freezes
FREEZE_PAUSE_S = DEADLINE_S + 1.0

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.parametrize("round_", ROUNDS)]


def test_others_go_on_without_a_worker_that_is_killed_and_then_without_a_replica(
    commands: Commands, round_: int
) -> None:
    group = Group.start(commands, "--survive", "2")
    worker_lost, engine_lost, last = (group.replicas[(round_ + i) % 3] for i in range(3))
    with under_load(group) as load:
        kill(worker_lost.worker_pids[0])
        load.check_survivors("kill of a worker", [worker_lost], limit_s=CRASH_PAUSE_S)
        load.check_lost([worker_lost])
    wait_gone(worker_lost.pids, "the end of the replica whose worker was killed")
    with under_load(group, [engine_lost, last]) as load:
        kill(engine_lost.engine_pid)
        load.check_survivors("kill of a replica", [worker_lost, engine_lost], limit_s=CRASH_PAUSE_S)
        load.check_lost([engine_lost])
    wait_gone(engine_lost.pids, "the end of the worker of a replica that was killed")
    assert group.log().count("it is not started again as long as its group goes on") == 2
    assert group.log().count("replica ready") == 3


def test_the_last_one_goes_on_when_two_replicas_are_killed_at_once(commands: Commands, round_: int) -> None:
    group = Group.start(commands, "--survive", "2")
    victims = [group.replicas[round_ % 3], group.replicas[(round_ + 1) % 3]]
    with under_load(group) as load:
        kill(*(victim.engine_pid for victim in victims))  # within 50 ms, since one call follows the other
        load.check_survivors("kill of two replicas within 50 ms", victims, limit_s=CRASH_PAUSE_S)
        load.check_lost(victims)


def test_a_replica_may_be_killed_while_the_others_reconfigure_after_another(commands: Commands, round_: int) -> None:
    group = Group.start(commands, "--survive", "2")
    first, second = group.replicas[round_ % 3], group.replicas[(round_ + 1) % 3]
    with under_load(group) as load:
        os.kill(first.engine_pid, signal.SIGKILL)
        wait_for_line(group, "group reconfigures epoch=2")
        kill(second.engine_pid)
        assert "group goes on epoch=2" not in group.log(), "the second was killed too late"
        load.check_survivors("kill of a replica during a reconfiguration", [first, second], limit_s=CRASH_PAUSE_S)
        load.check_lost([first, second])


def test_others_go_on_without_what_freezes_and_it_is_harmless_when_it_thaws(commands: Commands, round_: int) -> None:
    group = Group.start(commands, "--survive", "2", "--progress-deadline-s", f"{DEADLINE_S:g}")
    with_worker, with_engine, last = (group.replicas[(round_ + i) % 3] for i in range(3))
    with under_load(group) as load, stopped_in_a_collective(with_worker.worker_pids[0]):
        load.check_survivors("freeze of a worker in a collective", [with_worker], limit_s=FREEZE_PAUSE_S)
        load.check_lost([with_worker])
    wait_gone(with_worker.pids, "the end of the replica whose worker was frozen")
    with under_load(group, [with_engine, last]) as load:
        with stopped(with_engine.engine_pid):
            load.check_survivors("freeze of a replica", [with_worker, with_engine], limit_s=FREEZE_PAUSE_S)
        load.check_lost([with_engine])
    wait_gone(with_engine.pids, "the end of the replica that was frozen")
    assert f"{with_engine.engine_pid} replica.engine replica is cut off from its group" in group.log()
    assert last.ask() == 200 and last.group()["members"] == [last.dp_rank]
