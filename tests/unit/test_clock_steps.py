"""The rules of stepping within an epoch, one by one."""

from __future__ import annotations

import pytest

from coordinator.clock import Clock
from coordinator.messages import STOP, Done, Release
from coordinator.steps import MAX_LEAD
from tests.clock_driver import Group, reason_of, reconfigure_of


@pytest.fixture
def clock_class() -> type[Clock]:
    """The mutant tests pass another."""
    return Clock


# Arrivals and releases


def test_a_step_is_released_when_the_last_has_arrived(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    assert group.arrive(0, 3) is None
    assert group.arrive(2) is None
    release = group.arrive(1, 1)
    assert release == Release(epoch=1, step=0, decode_tokens=(3, 1, 0), prefill_tokens=(0, 0, 0), commands=())
    assert release.tokens == (3, 1, 0)


def test_an_idle_arrival_stands_until_its_step_is_released_and_may_be_replaced(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    assert group.arrive_all((0, 0), (0, 0), (0, 0)) is None
    assert group.clock.is_parked
    assert group.arrive(1, 0, 7) == Release(
        epoch=1, step=0, decode_tokens=(0, 0, 0), prefill_tokens=(0, 7, 0), commands=()
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


def test_an_arrival_for_a_step_to_come_breaks_the_protocol(clock_class: type[Clock]) -> None:
    what = "member 1 (r1) arrived for step 1 while step 0 is the next"
    assert what in reason_of(Group(clock_class).arrive(1, 1, step=1))


def test_a_frame_of_another_epoch_is_ignored(clock_class: type[Clock]) -> None:
    group = Group(clock_class)
    group.arrive(0)
    group.arrive(1)
    assert group.arrive(2, 5, epoch=2) is None
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
    assert group.clock.committed_step == -1
    group.done(1, 0)
    assert group.clock.committed_step == 0


@pytest.mark.parametrize("step", [0, 2, 5])
def test_dones_come_in_order_and_only_for_released_steps(clock_class: type[Clock], step: int) -> None:
    group = Group(clock_class, size=2)
    group.run_step((1, 0), (1, 0))
    group.arrive_all((1, 0), (1, 0))
    outputs = group.tell(1, Done(epoch=1, step=step))
    assert f"member 1 (r1) reported step {step}, its next is 1" in reconfigure_of(outputs).reason


def test_a_done_for_a_step_that_was_not_released_breaks_the_protocol(clock_class: type[Clock]) -> None:
    assert "reported step 0" in reason_of(Group(clock_class).done(1, 0))


def test_a_new_epoch_starts_from_nothing(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive(0, 5)
    group.arrive(1, 5)
    group.lose(2)
    assert (group.clock.step, group.clock.committed_step) == (0, -1)
    group.form()
    assert group.arrive(0, 1) is None, "what stood in the epoch before is void"
    assert group.arrive(1, 2) == Release(epoch=2, step=0, decode_tokens=(1, 2), prefill_tokens=(0, 0), commands=())


def test_nothing_is_released_between_two_epochs(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, commits_by_hand=True)
    group.arrive_all((0, 0), (0, 0), (0, 0))
    group.lose(2)
    assert group.clock.command("drain", group.now_s) == ()
    assert group.arrive(0, 1) is None and group.arrive(1, 1) is None
    group.commit()
    assert group.clock.command("sleep", group.now_s) == ()
    group.form()
    group.arrive(0)
    assert group.arrive(1).commands == ("drain", "sleep")


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
    assert release == Release(epoch=1, step=0, decode_tokens=(0, 0), prefill_tokens=(0, 0), commands=("drain",))
    assert group.arrive_all((0, 0), (1, 0)).commands == ()


def test_what_several_members_want_is_one_command_of_all(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=3)
    assert group.clock.command("profile", group.now_s) == ()
    group.arrive(0, wants=("drain",))
    group.arrive(1, wants=("drain", "sleep"))
    assert group.arrive(2).commands == ("profile", "drain", "sleep")


def test_a_command_whose_step_was_cut_off_is_carried_again(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.clock.command("drain", group.now_s)
    assert group.clock.pending_commands == {"drain"}
    assert group.arrive_all((1, 0), (0, 0), (0, 0)).commands == ("drain",)
    assert group.clock.pending_commands == {"drain"}, "not all have acted on it"
    group.done(0, 1)
    group.lose(2)
    group.form()
    assert group.arrive_all((0, 0), (0, 0)).commands == ("drain",)
    group.done(0, 0)
    group.done(1, 0)
    assert not group.clock.pending_commands
    group.lose(1)
    group.form()
    assert group.arrive_all((1, 0)).commands == ()


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
        assert group.lose(rank) == []
    assert group.clock.phase == "stopped"


def test_who_leaves_before_its_last_step_is_done_was_lost(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive(0, wants=(STOP,))
    group.arrive(1)
    group.done(0, 0)
    assert group.lose(0) == []
    assert "member 1 (r1) was lost before step 1: EOF" in reason_of(group.lose(1)[0])


def test_who_does_not_leave_after_stop_is_named(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive(0, wants=(STOP,))
    group.arrive(1)
    group.done(0, 0)
    group.done(1, 0)
    group.lose(0)
    assert "member 1 (r1) did not leave" in reason_of(group.pass_time(11.0))
