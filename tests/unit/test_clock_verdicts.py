"""Who is evicted, one rule after the other: the silent, those that hold others up, and nobody."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.clock import Clock
from coordinator.messages import Beat, Fault, Ready, Reconfigure
from tests.clock_driver import Group, reason_of, reconfigure_of


@pytest.fixture
def clock_class() -> type[Clock]:
    """The mutant tests pass another."""
    return Clock


# Silence and stalls


def test_a_parked_member_is_judged_by_its_beats_alone(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive_all((0, 0), (0, 0), (0, 0))
    assert group.pass_time(1000.0) is None
    group.now_s += 0.25
    group.arrive(1), group.arrive(1)
    reconfigure = reconfigure_of(group.watch(11.0, {0: (), 2: ()}))
    assert "member 1 (r1) was silent for 10 s" in reconfigure.reason
    assert (reconfigure.members, reconfigure.detect_ms) == ((0, 2), 10250)


def test_frames_other_than_beats_do_not_speak_for_the_ranks(clock_class: type[Clock]) -> None:
    """A worker is frozen: no beats come, but its engine still takes requests and arrives with them."""
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (0, 0), (0, 0))
    outputs: list[Any] = []
    for _ in range(10):
        group.arrive(1, 1)
        outputs = outputs or group.watch(0.25, {0: (), 2: ()})
    assert "member 1 (r1)" in reconfigure_of(outputs).reason


def test_a_step_that_is_not_done_blames_who_is_silent(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.now_s += 0.5
    group.watch(0.25, {0: (7,), 1: (7,), 2: (3,)})
    reconfigure = reconfigure_of(group.watch(5.0, {0: (7,), 2: (3,)}))
    assert "step 1 was not done within 2 s: member 1 (r1) is silent" in reconfigure.reason
    assert (reconfigure.evicted, reconfigure.detect_ms) == (((1,),), 2250)


def test_where_no_member_was_heard_none_is_to_blame_for_its_silence(clock_class: type[Clock]) -> None:
    """A master that ran for so short a pause that it does not count as one may not have read their beats yet."""
    group = Group.stepped(clock_class, size=2, progress_deadline_s=1.3)
    group.arrive_all((1, 0), (1, 0))
    group.watch(0.25, {0: (7,), 1: (6,)})
    group.watch(0.25, {})
    group.now_s += 0.75
    reconfigure = reconfigure_of(group.watch(0.25, {}))
    assert "member 1 (r1) is furthest behind" in reconfigure.reason


def test_a_step_that_is_not_done_blames_who_is_furthest_behind_in_collectives(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    reconfigure = reconfigure_of(group.watch(5.0, {0: (70, 70), 1: (70, 69), 2: (70, 70)}))
    assert "step 1 was not done within 2 s: member 1 (r1) is furthest behind" in reconfigure.reason
    assert reconfigure.evicted == ((1,),)


def test_collectives_are_compared_only_when_they_stand_still(clock_class: type[Clock]) -> None:
    """Beats are of different moments: in a step that is merely slow, whoever beat first seems to be behind."""
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    for entered in range(12):
        assert group.watch(0.25, {0: (entered,), 1: (entered + 1,), 2: (entered + 1,)}) == []
    reconfigure = reconfigure_of(group.watch(2.0, {0: (12,), 1: (13,), 2: (13,)}))
    assert reconfigure.evicted == ((0,),) and reconfigure.detect_ms <= 4000


def test_nobody_is_to_blame_for_a_step_whose_collectives_go_on_for_two_deadlines(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    outputs: list[Any] = []
    for entered in range(20):
        outputs = outputs or group.watch(0.25, {0: (entered,), 1: (entered + 1,), 2: (entered + 1,)})
    (reconfigure,) = outputs
    assert (reconfigure.members, 4000 < reconfigure.detect_ms < 4600) == ((0, 1, 2), True)
    assert "its collectives go on, slowly" in reconfigure.reason


def test_collectives_of_the_epoch_before_do_not_count(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.lose(2)
    group.send(1, Beat(epoch=2, step=0, collectives=(500,)))  # told of the epoch, but not ready for it
    group.form()
    group.run_step((1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0))
    outputs: list[Any] = []
    while not outputs:
        group.send(1, Beat(epoch=1, step=0, collectives=(500,)))
        outputs = group.watch(0.25, {0: (20,)})
    assert reconfigure_of(outputs).evicted == ((2,), (1,))


def test_a_step_in_which_nobody_is_behind_begins_again_with_the_same_members(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.done(1, 1)
    (reconfigure,) = group.watch(3.0, dict.fromkeys(range(3), (5,)))
    assert "waiting for member 0 (r0) and member 2 (r2), no rank is behind" in reconfigure.reason
    assert (reconfigure.epoch, reconfigure.members, reconfigure.evicted) == (2, (0, 1, 2), ())


def test_a_group_begins_again_twice_without_a_step_between_and_then_fails(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)

    def stall() -> Any:
        group.arrive_all((1, 0), (1, 0), (1, 0))
        (output,) = group.watch(10.0, dict.fromkeys(range(3), (5,)))
        if isinstance(output, Reconfigure):
            group.form()
        return output

    assert [stall().epoch for _ in range(2)] == [2, 3]
    group.run_step((1, 0), (1, 0), (1, 0))
    assert [stall().epoch for _ in range(2)] == [4, 5]
    assert "no step was done in the 2 epochs before either" in reason_of(stall())


def test_each_step_has_the_whole_deadline_from_the_commit_before_it(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, size=2, progress_deadline_s=2.0)
    group.arrive_all((1, 0), (1, 0))
    for step in range(1, 20):
        group.arrive_all((1, 0), (1, 0))
        assert group.pass_time(1.5) is None
        group.done(0, step)
        group.done(1, step)


def test_the_first_step_of_a_later_epoch_has_three_deadlines(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, progress_deadline_s=2.0)
    group.lose(2)
    group.form()
    group.arrive_all((1, 0), (1, 0))
    assert group.pass_time(5.75) is None
    assert isinstance(group.pass_time(0.75), Reconfigure)


def test_a_member_that_does_not_arrive_while_others_have_work_is_evicted(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive(0)
    assert group.pass_time(100.0) is None, "nobody has work"
    group.arrive(0, 1)
    group.arrive(2)
    assert group.pass_time(9.5) is None
    reconfigure = reconfigure_of(group.watch(1.0, dict.fromkeys(range(3), ())))
    assert "member 1 (r1) did not arrive for step 1 within 10 s" in reconfigure.reason
    assert reconfigure.members == (0, 2)


def test_where_nobody_arrives_for_a_command_nobody_is_to_blame(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.clock.command("drain", group.now_s)
    (reconfigure,) = group.watch(11.0, dict.fromkeys(range(3), ()))
    assert reconfigure.members == (0, 1, 2)


def test_work_that_was_withdrawn_waits_for_nobody() -> None:
    group = Group.stepped()
    group.arrive(0, 1)
    group.arrive(0)
    assert group.pass_time(20.0) is None
    group.arrive(0, 1)
    assert group.pass_time(9.5) is None


def test_who_is_not_ready_by_the_startup_deadline_of_a_later_epoch_is_evicted(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.pass_time(100.0)
    group.lose(2)
    group.send(0, Ready(epoch=2, blob=b""))
    assert group.pass_time(59.0) is None
    reconfigure = reconfigure_of(group.watch(2.0, {0: (), 1: ()}))
    assert "epoch 2 did not begin within 60 s: member 1 (r1) is not ready" in reconfigure.reason
    assert reconfigure.members == (0,)


# Faults


def test_a_fault_waits_for_the_end_of_a_connection(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    assert group.send(0, Fault(epoch=1, step=1, what="connection reset by peer")) is None
    assert group.pass_time(1.0) is None
    assert reconfigure_of(group.lose(2)).evicted == ((2,),)
    group.form()
    assert group.pass_time(5.0) is None, "it was this epoch's, and is settled"


def test_a_fault_blames_who_has_fallen_silent(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.send(0, Fault(epoch=1, step=1, what="timed out"))
    reconfigure = reconfigure_of(group.watch(2.0, {0: (), 2: ()}))
    assert "member 0 (r0) failed in step 1: timed out; member 1 (r1) is silent" in reconfigure.reason
    assert reconfigure.evicted == ((1,),)


def test_a_fault_without_evidence_begins_again_with_the_same_members(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.send(0, Fault(epoch=1, step=1, what="ncclSystemError"))
    group.send(1, Fault(epoch=1, step=1, what="another"))
    (reconfigure,) = group.watch(2.0, {0: (9,), 1: (3,), 2: (9,)})
    reason = "member 0 (r0) failed in step 1: ncclSystemError; no member is lost or silent"
    assert (reconfigure.reason, reconfigure.members) == (reason, (0, 1, 2))
