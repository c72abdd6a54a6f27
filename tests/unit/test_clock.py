"""The clock's rules, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.clock import MAX_LEAD, Clock, Phase
from coordinator.errors import JoinRefused
from coordinator.messages import MAX_BLOBS_BYTES, STOP, Failed, Fault, Go, Ready, Release, Welcome
from tests.clock_driver import CONFIG, Group, make_hello


@pytest.fixture
def clock_class() -> type[Clock]:
    """The mutant tests pass another."""
    return Clock


def reason_of(output: Any) -> str:
    assert isinstance(output, Failed), output
    return output.reason


# Starting


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": "h"}, "group is 'h', this master's is 'g'"),
        ({"config": {**CONFIG, "dtype": "bfloat16"}}, "dtype is bfloat16, the group's is float32"),
        ({"config": {**CONFIG, "tp": "8"}}, "tp is 8, the group's is 4"),
        ({"config": {**CONFIG, "ep": "2"}}, "ep is 2, the group's is absent"),
        ({"config": {"dtype": "float32", "tp": "4"}}, "model_hash is absent, the group's is abc"),
        ({"dp_rank": 3}, "dp_rank is 3, the group has 3 members"),
    ],
)
def test_a_hello_that_differs_is_refused_by_the_field_that_differs(changes: dict[str, Any], reason: str) -> None:
    group = Group(is_started=False)
    with pytest.raises(JoinRefused, match=reason):
        group.clock.hello(make_hello(**{"dp_rank": 0, **changes}), 0.0)
    assert group.clock.missing == [0, 1, 2]


def test_no_member_has_a_configuration_of_its_own(clock_class: type[Clock]) -> None:
    with pytest.raises(JoinRefused):
        Group(clock_class, is_started=False).clock.hello(make_hello(0, config={**CONFIG, "tp": "8"}), 0.0)


def test_a_rank_is_refused_while_the_first_that_has_it_lives(clock_class: type[Clock]) -> None:
    group = Group(clock_class, is_started=False)
    group.clock.hello(make_hello(1), group.now_s)
    with pytest.raises(JoinRefused, match="dp_rank 1 is taken by r1, which is alive"):
        group.clock.hello(make_hello(1, replica_id="other"), group.now_s)
    assert group.clock.lost(1, "EOF") == ()
    group.clock.hello(make_hello(1, replica_id="other"), group.now_s)
    assert group.clock.missing == [0, 2]


def test_the_epoch_begins_with_the_last_hello_and_steps_with_the_last_ready() -> None:
    group = Group(is_started=False)
    assert [group.clock.hello(make_hello(rank), group.now_s) for rank in (2, 0)] == [(), ()]
    assert group.clock.hello(make_hello(1), group.now_s) == (Welcome(epoch=0, members=(0, 1, 2)),)
    assert [group.send(rank, Ready(epoch=0, blob=b"%d" % rank)) for rank in (1, 2)] == [None, None]
    assert group.send(0, Ready(epoch=0, blob=b"0")) == Go(epoch=0, blobs=(b"0", b"1", b"2"))
    assert group.clock.phase is Phase.RUNNING


def test_who_is_missing_at_the_startup_deadline_is_named(clock_class: type[Clock]) -> None:
    group = Group(clock_class, is_started=False)
    group.clock.hello(make_hello(1), group.now_s)
    with pytest.raises(JoinRefused):
        group.clock.hello(make_hello(2, config={**CONFIG, "tp": "8"}), group.now_s)
    assert group.pass_time(59.0) is None
    reason = reason_of(group.pass_time(2.0))
    assert "within 60 s: dp_rank 0 has not joined, dp_rank 2 was refused: tp is 8, the group's is 4" in reason


def test_a_blob_that_would_not_fit_into_the_go_names_its_member() -> None:
    group = Group(is_started=False)
    for rank in range(3):
        group.clock.hello(make_hello(rank), group.now_s)
    limit = MAX_BLOBS_BYTES // 3
    assert group.send(0, Ready(epoch=0, blob=bytes(limit))) is None
    assert f"member 1 (r1) has a blob of {limit + 1} bytes" in reason_of(
        group.send(1, Ready(epoch=0, blob=bytes(limit + 1)))
    )


def test_who_is_not_ready_at_the_startup_deadline_is_named() -> None:
    group = Group(is_started=False)
    for rank in range(3):
        group.clock.hello(make_hello(rank), group.now_s)
    group.send(0, Ready(epoch=0, blob=b""))
    group.send(2, Ready(epoch=0, blob=b""))
    assert "within 60 s: member 1 (r1) is not ready" in reason_of(group.pass_time(61.0))


# Arrivals and releases


def test_a_step_is_released_when_the_last_has_arrived(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    assert group.arrive(0, 3) is None
    assert group.arrive(2) is None
    release = group.arrive(1, 1)
    assert release == Release(epoch=0, step=0, decode_tokens=(3, 1, 0), prefill_tokens=(0, 0, 0), commands=())
    assert release.tokens == (3, 1, 0)


def test_an_idle_arrival_stands_until_its_step_is_released_and_may_be_replaced(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    assert group.arrive_all((0, 0), (0, 0), (0, 0)) is None
    assert group.clock.is_parked
    assert group.arrive(1, 0, 7) == Release(
        epoch=0, step=0, decode_tokens=(0, 0, 0), prefill_tokens=(0, 7, 0), commands=()
    )
    assert not group.clock.is_parked


def test_a_release_uses_arrivals_up(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.run_step((1, 0), (1, 0), (1, 0))
    assert group.arrive(0, 1) is None
    assert group.arrive(0, 2) is None
    assert group.arrive(1, 1) is None


def test_a_late_arrival_is_ignored(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.run_step((1, 0), (0, 0), (0, 0))
    group.arrive(0)
    group.arrive(2)
    assert group.arrive(1, 9, step=0) is None
    assert group.arrive(1, 2).decode_tokens == (0, 2, 0)


def test_an_arrival_for_a_step_to_come_breaks_the_protocol() -> None:
    assert "member 1 (r1) arrived for step 1 while step 0 is running" in reason_of(Group().arrive(1, 1, step=1))


def test_a_frame_of_another_epoch_is_ignored(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.arrive(0)
    group.arrive(1)
    assert group.arrive(2, 5, epoch=1) is None
    assert group.arrive(2) is None


def test_no_more_than_the_lead_is_released_before_a_commit(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    for _ in range(MAX_LEAD):
        assert group.arrive_all((1, 0), (1, 0)) is not None
    assert group.arrive_all((1, 0), (1, 0)) is None
    assert group.done(0, 0) is None
    assert group.done(0, 1) is None
    assert group.done(1, 0).step == MAX_LEAD


def test_the_group_has_committed_what_all_have_done(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive_all((1, 0), (0, 0))
    group.done(0, 0)
    assert group.clock.committed == -1
    group.done(1, 0)
    assert group.clock.committed == 0


@pytest.mark.parametrize("step", [0, 2, 5])
def test_dones_come_in_order_and_only_for_released_steps(clock_class: type[Clock], step: int) -> None:
    group = Group(clock_class, size=2)
    group.run_step((1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0))
    assert f"member 1 (r1) reported step {step}, its next is 1" in reason_of(group.done(1, step))


def test_a_done_for_a_step_that_was_not_released_breaks_the_protocol(clock_class: type[Clock]) -> None:
    assert "reported step 0" in reason_of(Group(clock_class).done(1, 0))


# Prefills


def test_a_prefill_is_held_while_others_decode_but_not_longer_than_the_delay(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2, prefill_delay_s=0.5)
    held = group.run_step((1, 8), (1, 0))
    assert (held.prefill_tokens, held.tokens) == ((0, 0), (1, 1))
    group.now_s += 0.4
    assert not any(group.run_step((1, 8), (1, 0)).prefill_tokens)
    group.now_s += 0.1
    assert group.run_step((1, 8), (1, 0)).prefill_tokens == (8, 0)


def test_prefills_run_at_once_when_all_have_one(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    assert not any(group.run_step((1, 8), (1, 0)).prefill_tokens)
    assert group.run_step((1, 8), (1, 9)).prefill_tokens == (8, 9)


def test_prefills_run_at_once_when_nobody_decodes(clock_class: type[Clock]) -> None:
    assert Group(clock_class, size=2).run_step((0, 8), (0, 0)).prefill_tokens == (8, 0)


def test_a_prompt_that_goes_on_is_not_held_again_and_takes_others_along(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=3)
    group.run_step((1, 8), (1, 4), (1, 4))
    assert group.run_step((1, 8), (1, 0), (1, 0)).prefill_tokens == (8, 0, 0)
    assert group.run_step((1, 8), (1, 6), (1, 0)).prefill_tokens == (8, 6, 0)
    assert not any(group.run_step((1, 0), (1, 0), (1, 0)).prefill_tokens)
    assert not any(group.run_step((1, 8), (1, 0), (1, 0)).prefill_tokens)


def test_without_a_delay_no_prefill_is_held() -> None:
    assert Group(size=2, prefill_delay_s=0.0).run_step((1, 8), (1, 0)).prefill_tokens == (8, 0)


# Commands


def test_a_command_is_in_one_release_and_wakes_a_parked_group(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive_all((0, 0), (0, 0))
    (release,) = group.clock.command("drain", group.now_s)
    assert release == Release(epoch=0, step=0, decode_tokens=(0, 0), prefill_tokens=(0, 0), commands=("drain",))
    assert group.arrive_all((0, 0), (1, 0)).commands == ()


def test_what_several_members_want_is_one_command_of_all(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=3)
    assert group.clock.command("profile", group.now_s) == ()
    group.arrive(0, wants=("drain",))
    group.arrive(1, wants=("drain", "sleep"))
    assert group.arrive(2).commands == ("profile", "drain", "sleep")


def test_after_stop_nothing_is_released_and_leaving_is_no_loss(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive_all((0, 0), (1, 0))
    group.arrive_all((0, 0), (1, 0))
    group.clock.command(STOP, group.now_s)
    group.done(0, 0)
    assert group.done(1, 0) is None
    group.arrive(0)
    assert group.clock.phase == "running"
    assert group.arrive(1).commands == (STOP,)
    for rank in range(2):
        group.done(rank, 1)
        assert group.done(rank, 2) is None
        assert group.clock.lost(rank, "EOF") == ()
    assert group.clock.phase == "stopped"


def test_who_leaves_before_its_last_step_is_done_was_lost(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive(0, wants=(STOP,))
    group.arrive(1)
    group.done(0, 0)
    assert group.clock.lost(0, "EOF") == ()
    assert "member 1 (r1) was lost before step 1: EOF" in reason_of(group.clock.lost(1, "EOF")[0])


def test_who_does_not_leave_after_stop_is_named(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive(0, wants=(STOP,))
    group.arrive(1)
    group.done(0, 0)
    group.done(1, 0)
    group.clock.lost(0, "EOF")
    assert "member 1 (r1) did not leave" in reason_of(group.pass_time(11.0))


# Verdicts


def test_a_lost_connection_fails_the_group_at_once(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    assert "member 2 (r2) was lost before step 0: EOF" in reason_of(group.clock.lost(2, "EOF")[0])
    assert group.clock.phase == "failed"
    assert group.arrive_all((1, 0), (1, 0), (1, 0)) is None
    assert group.clock.lost(1, "EOF") == ()
    with pytest.raises(JoinRefused):
        group.clock.hello(make_hello(2), group.now_s)


def test_a_fault_fails_the_group_with_its_words(clock_class: type[Clock]) -> None:
    output = Group(clock_class).send(1, Fault(epoch=0, step=4, what="connection reset"))
    assert "member 1 (r1) failed in step 4: connection reset" in reason_of(output)


def test_a_parked_member_is_judged_by_its_beats_alone(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.run_step((1, 0), (0, 0), (0, 0))
    group.arrive_all((0, 0), (0, 0), (0, 0))
    assert group.pass_time(1000.0) is None
    assert "member 1 (r1) was silent for 10 s" in reason_of(group.pass_time(11.0, beating={0, 2}))


def test_a_step_that_is_not_done_names_who_is_silent(clock_class: type[Clock]) -> None:
    group = Group(clock_class, progress_deadline_s=2.0)
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.pass_time(0.25)
    assert "step 1 was not done within 2 s: member 1 (r1) is silent" in reason_of(group.pass_time(5.0, beating={0, 2}))


def test_a_step_that_is_not_done_names_who_is_furthest_behind_in_collectives(clock_class: type[Clock]) -> None:
    group = Group(clock_class, progress_deadline_s=2.0)
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.pass_time(0.25, beating={0, 2}, collectives=(70, 70))
    group.pass_time(0.25, beating={1}, collectives=(70, 69))
    group.pass_time(0.25, beating={0, 2}, collectives=(70, 70))
    verdict = None
    while verdict is None:
        group.pass_time(0.25, beating={0, 2}, collectives=(70, 70))
        verdict = group.pass_time(0.25, beating={1}, collectives=(70, 69))
    assert "step 1 was not done within 2 s: member 1 (r1) is furthest behind" in reason_of(verdict)


def test_a_step_in_which_no_rank_is_behind_names_all_that_are_not_done() -> None:
    group = Group(progress_deadline_s=2.0)
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.done(1, 1)
    reason = reason_of(group.pass_time(3.0, collectives=(5,)))
    assert "waiting for member 0 (r0) and member 2 (r2), no rank is behind" in reason


def test_each_step_has_the_whole_deadline_from_the_commit_before_it(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2, progress_deadline_s=2.0)
    group.run_step((1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0))
    for step in range(1, 20):
        group.arrive_all((1, 0), (1, 0))
        assert group.pass_time(1.5) is None
        group.done(0, step)
        group.done(1, step)


def test_a_member_that_does_not_arrive_while_others_have_work_is_named(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive(0)
    assert group.pass_time(100.0) is None, "nobody has work"
    group.arrive(0, 1)
    group.arrive(2)
    assert group.pass_time(9.5) is None
    assert "member 1 (r1) did not arrive for step 1 within 10 s" in reason_of(group.pass_time(1.0))


def test_work_that_was_withdrawn_waits_for_nobody() -> None:
    group = Group()
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive(0, 1)
    group.arrive(0)
    assert group.pass_time(20.0) is None
    group.arrive(0, 1)
    assert group.pass_time(9.5) is None


def test_the_first_step_has_the_startup_deadline(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive_all((1, 0), (1, 0))
    assert group.pass_time(55.0) is None
    assert "step 0 was not done within 60 s" in reason_of(group.pass_time(6.0))


def test_time_in_which_the_master_did_not_run_counts_against_nobody(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.run_step((1, 0), (1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.pass_time(0.25)
    group.now_s += 3600.0
    assert group.clock.tick(group.now_s) == ()
    assert group.pass_time(8.0) is None
    assert "step 1 was not done" in reason_of(group.pass_time(3.0))
