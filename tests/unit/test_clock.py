"""The rules of a group's membership, one by one: how it starts, whom it evicts, and how it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.clock import Clock, Commit, Expel, Phase
from coordinator.errors import JoinRefused
from coordinator.messages import (
    MAX_BLOBS_BYTES,
    Evicted,
    Go,
    Ready,
    Reconfigure,
    Release,
)
from tests.clock_driver import CONFIG, Group, make_hello, reason_of, reconfigure_of


@pytest.fixture
def clock_class() -> type[Clock]:
    """The mutant tests pass another."""
    return Clock


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
    assert group.lose(1) == []
    group.clock.hello(make_hello(1, replica_id="other"), group.now_s)
    assert group.clock.missing == [0, 2]


def test_the_epoch_begins_with_the_last_hello_and_steps_with_the_last_ready(clock_class: type[Clock]) -> None:
    group = Group(clock_class, is_started=False, commits_by_hand=True)
    assert [group.join(rank) for rank in (2, 0)] == [[], []]
    assert group.join(1) == []
    assert group.commits == [Commit(epoch=1, members=(0, 1, 2), evicted=(), reason="all members have joined")]
    (reconfigure,) = group.commit()
    assert reconfigure == Reconfigure(
        epoch=1, members=(0, 1, 2), evicted=(), kinds=(), reason="all members have joined", detect_ms=0, agree_ms=0
    )
    assert [group.send(rank, Ready(epoch=1, blob=b"%d" % rank)) for rank in (1, 2)] == [None, None]
    assert group.send(0, Ready(epoch=1, blob=b"0")) == Go(epoch=1, blobs=(b"0", b"1", b"2"))
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
        group.join(rank)
    limit = MAX_BLOBS_BYTES // 3
    assert group.send(0, Ready(epoch=1, blob=bytes(limit))) is None
    assert f"member 1 (r1) has a blob of {limit + 1} bytes" in reason_of(
        group.send(1, Ready(epoch=1, blob=bytes(limit + 1)))
    )


def test_who_is_not_ready_at_the_startup_deadline_is_named() -> None:
    group = Group(is_started=False)
    for rank in range(3):
        group.join(rank)
    group.send(0, Ready(epoch=1, blob=b""))
    group.send(2, Ready(epoch=1, blob=b""))
    assert "within 60 s: member 1 (r1) is not ready" in reason_of(group.pass_time(61.0))


# What ends without a verdict on anybody


def test_until_the_first_step_is_committed_a_loss_fails_the_group(clock_class: type[Clock]) -> None:
    for is_started in (True, False):
        group = Group(clock_class, is_started=is_started)
        if not is_started:
            for rank in range(3):
                group.join(rank)
        (output,) = group.lose(2)
        assert "member 2 (r2) was lost before step 0: EOF" in reason_of(output)
        assert group.clock.phase == "failed"
        assert group.arrive(0, 1) is None
        assert group.lose(1) == []
        with pytest.raises(JoinRefused):
            group.join(2)


def test_the_first_step_has_the_startup_deadline(clock_class: type[Clock]) -> None:
    group = Group(clock_class, size=2)
    group.arrive_all((1, 0), (1, 0))
    assert group.pass_time(55.0) is None
    assert "step 0 was not done within 60 s" in reason_of(group.pass_time(6.0))


def test_the_last_one_cannot_be_survived(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, size=2)
    reconfigure_of(group.lose(0))
    assert "was lost before step 0: EOF; no member is left" in reason_of(group.lose(1)[0])


def test_members_that_do_not_fit_do_not_go_on(clock_class: type[Clock]) -> None:
    def why_not(members: tuple[int, ...]) -> str:
        return "" if len(members) > 1 else "9 GiB are needed, 8 GiB are reserved"

    group = Group.stepped(clock_class, why_not=why_not)
    assert reconfigure_of(group.lose(2)).members == (0, 1)
    reason = reason_of(group.lose(0)[0])
    assert "member 0 (r0) was lost" in reason and "9 GiB are needed, 8 GiB are reserved" in reason


# Losses


def test_a_lost_connection_is_evicted_at_once(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.now_s += 0.125
    expel, reconfigure = group.lose(1)
    assert expel == Expel(dp_rank=1, message=Evicted(epoch=2, reason="member 1 (r1) was lost before step 1: EOF"))
    assert reconfigure == Reconfigure(
        epoch=2,
        members=(0, 2),
        evicted=((1,),),
        kinds=("lost",),
        reason="member 1 (r1) was lost before step 1: EOF",
        detect_ms=125,
        agree_ms=0,
    )
    assert [group.send(rank, Ready(epoch=2, blob=b"%d" % rank)) for rank in (2, 0)] == [
        None,
        Go(epoch=2, blobs=(b"0", b"2")),
    ]
    assert group.run_step((4, 0), (5, 0)) == Release(
        epoch=2, step=0, decode_tokens=(4, 5), prefill_tokens=(0, 0), commands=()
    )


def test_an_evicted_member_is_not_heard_any_more(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.lose(1)
    assert group.lose(1) == []
    assert group.arrive(1, 1) is None
    with pytest.raises(JoinRefused, match=r"r1 \(r1\), dp_rank 1, was evicted: member 1 .* EOF"):
        group.join(1, epoch=1)
    with pytest.raises(JoinRefused, match="was evicted"):
        group.join(1, incarnation="another")
    group.form()
    assert group.arrive_all((1, 0), (0, 0)) is not None


def test_nobody_joins_a_group_that_runs(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    with pytest.raises(JoinRefused, match="dp_rank 1 is taken by r1, which is alive"):
        group.join(1, epoch=1)


def test_a_loss_while_an_epoch_forms_is_the_next_epoch(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, size=4)
    group.lose(3)
    group.send(0, Ready(epoch=2, blob=b""))
    reconfigure = reconfigure_of(group.lose(1))
    assert (reconfigure.epoch, reconfigure.members, reconfigure.evicted) == (3, (0, 2), ((3,), (1,)))
    assert group.send(2, Ready(epoch=2, blob=b"")) is None, "a late frame"
    assert group.send(0, Ready(epoch=3, blob=b"")) is None, "it must say so again"
    assert isinstance(group.send(2, Ready(epoch=3, blob=b"")), Go)


def test_a_member_that_breaks_the_protocol_is_evicted(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    reconfigure = reconfigure_of(group.tell(1, Ready(epoch=1, blob=b"")))
    assert "member 1 (r1) was ready while the group is running" in reconfigure.reason


# Committing


def test_members_are_told_only_of_what_is_committed(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, commits_by_hand=True)
    group.now_s += 0.25
    assert group.lose(1) == []
    assert (group.clock.phase, group.clock.epoch, group.clock.members) == ("committing", 1, (0, 1, 2))
    (commit,) = group.commits
    reason = "member 1 (r1) was lost before step 1: EOF"
    assert commit == Commit(epoch=2, members=(0, 2), evicted=((1,),), reason=reason)
    assert group.clock.committed(7, group.now_s) == ()
    group.now_s += 0.5
    reconfigure = reconfigure_of(group.commit())
    assert (reconfigure.detect_ms, reconfigure.agree_ms) == (250, 500)
    assert (group.clock.phase, group.clock.epoch, group.clock.members) == ("forming", 2, (0, 2))


def test_a_loss_while_a_commit_is_under_way_follows_in_an_epoch_of_its_own(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, size=5, commits_by_hand=True)
    group.lose(4)
    assert group.lose(3) == group.lose(0) == []
    assert len(group.commits) == 1, "one at a time"
    (expel,) = group.commit()
    assert expel.dp_rank == 4, "nobody is told of the epoch between"
    assert [(c.epoch, c.members, c.evicted) for c in group.commits] == [(3, (1, 2), ((4,), (0, 3)))]
    *expels, reconfigure = group.commit()
    assert [expel.dp_rank for expel in expels] == [3, 0]
    assert (reconfigure.epoch, reconfigure.members, reconfigure.evicted) == (3, (1, 2), ((4,), (0, 3)))
    assert all(f"member {rank}" in reconfigure.reason for rank in (0, 3, 4))


def test_late_frames_of_an_epoch_at_its_end_are_ignored(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, commits_by_hand=True)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.lose(2)
    assert group.done(0, 1) is None and group.done(1, 1) is None
    assert group.clock.committed_step == 0
    group.arrive(0, 1, step=9)
    assert reconfigure_of(group.commit()).members == (0, 1), "not even a breach of the protocol is heeded"


def test_a_membership_that_cannot_be_committed_fails_the_group(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class, commits_by_hand=True)
    group.lose(1)
    assert group.pass_time(9.5, beating={0, 2}) is None
    reason = reason_of(group.pass_time(1.0, beating={0, 2}))
    assert "member 1 (r1) was lost" in reason and "could not be committed within 10 s" in reason
    assert (group.clock.epoch, group.clock.last_epoch) == (1, 2), "it may yet be carried out"


def test_a_deposed_master_says_nothing_any_more(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive(0, 1)
    group.arrive(1)
    assert group.clock.deposed("token 4 has the lease", group.now_s) == ()
    assert group.clock.phase == "deposed" and group.clock.failure == "token 4 has the lease"
    assert group.arrive(2) is None
    assert group.lose(0) == []
    assert group.pass_time(30.0, beating=set()) is None
    assert group.clock.command("drain", group.now_s) == ()


# Another master


def test_a_new_master_begins_the_next_epoch_when_the_last_members_have_come(clock_class: type[Clock]) -> None:
    group = Group.taken_over(clock_class, size=4, evicted=((1,),))
    assert group.clock.members == (0, 2, 3)
    assert group.join(0, epoch=5) == group.join(3, epoch=5) == []
    (reconfigure,) = group.join(2, epoch=4)
    assert (reconfigure.epoch, reconfigure.members, reconfigure.evicted) == (6, (0, 2, 3), ((1,),))
    assert reconfigure.reason == "a new master has taken over"
    group.form()
    assert group.run_step((1, 0), (0, 0), (0, 0)).epoch == 6


def test_a_new_master_evicts_who_does_not_come_within_a_second(clock_class: type[Clock]) -> None:
    group = Group.taken_over(clock_class, size=4, evicted=((1,),))
    group.join(0, epoch=5)
    group.join(3, epoch=5)
    group.lose(3)
    assert group.pass_time(0.75) is None
    group.join(3, epoch=5)
    (_, reconfigure) = group.watch(0.5, {0: (), 3: ()})
    assert (reconfigure.epoch, reconfigure.members, reconfigure.evicted) == (6, (0, 3), ((1,), (2,)))
    assert "dp_rank 2 has not come back within 1 s" in reconfigure.reason


def test_a_new_master_takes_only_members_of_the_epochs_before(clock_class: type[Clock]) -> None:
    group = Group.taken_over(clock_class, size=4, evicted=((1,),))
    with pytest.raises(JoinRefused, match="was evicted"):
        group.join(1, epoch=3)
    with pytest.raises(JoinRefused, match="of a group that runs"):
        group.join(0)
    with pytest.raises(JoinRefused, match="was a member in epoch 5 of an earlier life"):
        Group(clock_class, is_started=False).join(0, epoch=5)


def test_the_next_epoch_is_above_every_one_that_a_member_was_told_of(clock_class: type[Clock]) -> None:
    """The store has lost its data, or the last master died between its commit and this one's lease."""
    group = Group.taken_over(clock_class)
    group.join(0, epoch=5)
    group.join(2, epoch=9)
    assert reconfigure_of(group.join(1, epoch=8)).epoch == 10


def test_a_new_master_to_which_nobody_comes_fails_the_group(clock_class: type[Clock]) -> None:
    group = Group.taken_over(clock_class)
    assert "no member is left" in reason_of(group.pass_time(1.5, beating=set()))


# The master's own pauses


def test_time_in_which_the_master_did_not_run_counts_against_nobody(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.arrive_all((1, 0), (1, 0), (1, 0))
    group.pass_time(0.25)
    group.now_s += 3600.0
    assert group.clock.tick(group.now_s) == ()
    assert group.pass_time(8.0) is None
    assert isinstance(group.pass_time(3.0), Reconfigure)


def test_a_member_that_took_a_paused_master_for_dead_may_come_back(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.now_s += 5.0
    assert group.lose(0) == group.lose(2) == []
    assert group.join(0, epoch=1) == []
    with pytest.raises(JoinRefused, match="of a group that runs"):
        group.join(2, epoch=1, incarnation="another")
    assert group.arrive(1, 1) is None and group.clock.phase == "gathering"
    (reconfigure,) = group.join(2, epoch=1)
    assert (reconfigure.epoch, reconfigure.members, reconfigure.reason) == (2, (0, 1, 2), "the master was paused")
    group.form()
    assert group.run_step((1, 0), (2, 0), (3, 0)).decode_tokens == (1, 2, 3)


def test_a_member_that_was_lost_while_the_master_was_paused_is_evicted_a_second_later(clock_class: type[Clock]) -> None:
    group = Group.stepped(clock_class)
    group.now_s += 5.0
    assert group.lose(2) == []
    reconfigure = reconfigure_of(group.watch(1.5, {0: (), 1: ()}))
    assert (reconfigure.evicted, "dp_rank 2 has not come back" in reconfigure.reason) == (((2,),), True)
    group.form()
    group.run_step((1, 0), (1, 0))
    assert reconfigure_of(group.lose(1)).members == (0,), "the pause is over"
