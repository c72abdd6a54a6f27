"""What a replica tells of its group."""

from __future__ import annotations

import logging

import pytest

from replica.group_state import GroupPhase, GroupState
from replica.step_clock import Reconfiguration

LOST = "member 1 (b) was lost before step 7: its connection ended (EOF)"


def changed(epoch: int, members: tuple[int, ...], *evicted: tuple[int, ...], reason: str = LOST) -> Reconfiguration:
    return Reconfiguration(
        epoch=epoch,
        members=members,
        evicted=evicted,
        kinds=tuple("lost" for event in evicted for _ in event),
        reason=reason,
        detect_s=0.002,
        agree_s=0.003,
    )


def test_a_replica_alone_is_a_group_that_runs() -> None:
    assert GroupState().to_json() == {
        "state": "running",
        "epoch": 0,
        "members": [0],
        "evicted": [],
        "reconfigurations": 0,
        "last_reconfiguration": None,
    }


def test_the_parts_of_a_pause_are_told_as_they_come_and_summed_over_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = GroupState(unix_s=lambda: 1000.0)
    state.forming(Reconfiguration(epoch=1, members=(0, 1, 2)))
    assert state.phase is GroupPhase.FORMING
    state.connected(rebuild_s=1.0, reload_s=0.0)
    assert state.phase is GroupPhase.RUNNING and not state.awaits_first_step, "a start is no pause"
    state.changed(changed(2, (0, 2), (1,)))
    assert state.phase is GroupPhase.RECONFIGURING and not state.awaits_first_step
    state.connected(rebuild_s=0.04, reload_s=0.05)
    assert state.phase is GroupPhase.RUNNING and state.awaits_first_step
    state.stepped(0.006)
    assert not state.awaits_first_step
    told = state.to_json()
    parts = {"detect_s": 0.002, "agree_s": 0.003, "rebuild_s": 0.04, "reload_s": 0.05, "first_step_s": 0.006}
    assert told["last_reconfiguration"] == parts
    assert told["evicted"] == [{"dp_ranks": [1], "kinds": ["lost"], "epoch": 2, "reason": LOST, "at": 1000.0}]

    state.changed(changed(3, (0,), (1,), (2,), reason="silent"))
    state.connected(rebuild_s=0.01, reload_s=0.0)
    assert state.seconds == pytest.approx(
        {"detect": 0.004, "agree": 0.006, "rebuild": 0.05, "reload": 0.05, "first_step": 0.006}
    )
    assert [eviction.dp_ranks for eviction in state.evictions] == [(1,), (2,)]
    lines = [record.getMessage() for record in caplog.records]
    assert f"group reconfigures epoch=2 members=[0, 2] evicted=[1] reason={LOST!r}" in lines
    assert any(line.startswith("group goes on epoch=2 members=[0, 2] detect_s=0.002 agree_s=0.003") for line in lines)


def test_an_epoch_with_the_same_members_evicts_nobody() -> None:
    state = GroupState()
    state.forming(Reconfiguration(epoch=1, members=(0, 1)))
    state.changed(changed(2, (0, 1), reason="no rank is behind another"))
    assert state.evictions == [] and state.num_reconfigurations == 1


def test_evictions_that_were_never_told_of_come_with_the_next_epoch() -> None:
    state = GroupState()
    state.forming(Reconfiguration(epoch=1, members=(0, 1, 2, 3)))
    state.changed(changed(3, (0,), (1,), (2, 3)))
    (eviction,) = state.evictions
    assert (eviction.dp_ranks, eviction.kinds, eviction.epoch) == ((1, 2, 3), ("lost",) * 3, 3)


def test_a_group_that_looks_for_a_new_master_is_told_of_as_one_that_changes() -> None:
    is_looking = False
    state = GroupState(is_looking=lambda: is_looking)
    assert state.state is GroupPhase.RUNNING
    is_looking = True
    assert state.state is GroupPhase.RECONFIGURING and state.to_json()["state"] == "reconfiguring"
    state.phase = GroupPhase.LOST
    assert state.state is GroupPhase.LOST
