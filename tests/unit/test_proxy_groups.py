"""What the members of a group say of it, taken together, and what follows for each of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.groups import Group, GroupState, taken_together
from proxy.protocol import Hello, LoadReport
from proxy.registry import Registry
from proxy.replicas import Replica, ReplicaState

MODELS = {"tiny": {"id": "tiny"}}
REPORT = LoadReport(
    sequence=1, running=0, waiting=0, queued_prefill_tokens=0, free_blocks=1, total_blocks=1, step=0, epoch=1
)


class Told:
    """A registry whose replicas are members of one group, and what they report."""

    def __init__(self, size: int) -> None:
        self.evicted: list[str] = []
        self.registry = Registry(
            heartbeat_timeout_s=3.0, on_eviction=lambda replica: self.evicted.append(replica.replica_id)
        )
        self.sequence = 0
        for rank in range(size):
            self.join(rank)

    def join(self, rank: int, incarnation: str = "a", *, now_s: float = 0.0) -> None:
        hello = Hello(
            replica_id=f"r{rank}",
            incarnation=incarnation,
            url=f"http://h:{rank + 1}",
            model="tiny",
            model_hash="0",
            group="g",
            dp_rank=rank,
            max_model_len=64,
            max_num_seqs=4,
        )
        self.registry.join(hello, MODELS, connection_id=rank, now_s=now_s)

    def say(self, rank: int, epoch: int, *members: int, now_s: float = 0.0, is_reconfiguring: bool = False) -> None:
        self.sequence += 1
        report = replace(
            REPORT,
            sequence=self.sequence,
            epoch=epoch,
            members=list(members),
            is_reconfiguring=is_reconfiguring,
        )
        self.registry.report(rank, report, now_s=now_s)

    def replica(self, rank: int) -> Replica:
        return next(each for each in self.registry.known() if each.dp_rank == rank)

    def states(self, now_s: float = 0.0) -> list[str]:
        return [str(self.registry.state(each, now_s=now_s)) for each in self.registry.known()]

    def group(self, now_s: float = 0.0) -> tuple[Group, GroupState]:
        return self.registry.groups(now_s=now_s)["g"]


def test_while_one_member_reconfigures_none_of_the_group_takes_a_request() -> None:
    told = Told(3)
    for rank in range(3):
        told.say(rank, 1, 0, 1, 2)
    assert told.states() == ["live"] * 3 and told.group()[1] is GroupState.LIVE
    told.say(1, 1, 0, 1, 2, is_reconfiguring=True)
    assert told.states() == ["reconfiguring"] * 3 and told.group()[1] is GroupState.RECONFIGURING
    assert told.registry.may_be_live_soon("tiny", now_s=0.0) and not told.registry.may_be_live_soon("x", now_s=0.0)


def test_who_is_in_the_new_epoch_serves_and_who_is_behind_waits_for_it() -> None:
    told = Told(2)
    told.say(0, 1, 0, 1, is_reconfiguring=True)
    told.say(1, 1, 0, 1, is_reconfiguring=True)
    told.say(0, 2, 0, 1)
    assert told.states() == ["live", "reconfiguring"] and told.group()[0].epoch == 2
    told.say(1, 2, 0, 1)
    assert told.states() == ["live", "live"] and told.evicted == []


def test_a_member_that_the_newest_epoch_does_not_name_is_evicted_for_good_and_its_requests_are_told_once() -> None:
    told = Told(3)
    for rank in range(3):
        told.say(rank, 1, 0, 1, 2)
    told.say(0, 2, 0, 2)
    assert told.evicted == ["r1"] and told.states() == ["live", "evicted", "reconfiguring"]
    told.say(2, 2, 0, 2)
    told.say(1, 1, 0, 1, 2)  # it was frozen, and wakes up
    assert told.states() == ["live", "evicted", "live"] and told.evicted == ["r1"]
    assert told.replica(1).is_dead
    told.registry.gone(1)
    told.join(1, "a")
    told.say(1, 1, 0, 1, 2)
    assert told.states()[-1] == "evicted", "the same life is not taken back"
    told.join(1, "b")
    assert told.states()[-1] == "live", "a new one has not been judged"


def test_a_new_life_that_is_in_the_epoch_already_is_not_taken_for_the_evicted_one() -> None:
    told = Told(2)
    told.say(0, 2, 0)
    told.join(1, "b")
    assert told.evicted == []
    told.say(1, 3, 0, 1)
    told.say(0, 3, 0, 1)
    assert told.states() == ["live", "live"] and told.evicted == []


def test_a_member_that_froze_in_the_middle_of_a_change_does_not_hold_up_the_others() -> None:
    told = Told(2)
    told.say(1, 1, 0, 1, is_reconfiguring=True)
    told.say(0, 1, 0, 1, now_s=3.5)
    assert told.states(now_s=3.5) == ["live", "suspect"]
    assert told.group(now_s=3.5)[1] is GroupState.LIVE


def test_a_group_of_which_nobody_can_serve_is_dead() -> None:
    told = Told(2)
    told.registry.leaving(0)
    told.registry.connect_failed(told.replica(1))
    assert told.group()[1] is GroupState.DEAD and not told.registry.may_be_live_soon(None, now_s=0.0)
    told.registry.gone(0), told.registry.gone(1)
    assert told.registry.groups(now_s=0.0) == {}


def test_replicas_without_a_group_are_groups_of_their_own() -> None:
    registry = Registry(heartbeat_timeout_s=3.0)
    for name in ("a", "b"):
        hello = Hello(
            replica_id=name,
            incarnation="1",
            url=f"http://{name}",
            model="tiny",
            model_hash="0",
            group="",
            dp_rank=0,
            max_model_len=1,
            max_num_seqs=1,
        )
        registry.join(hello, MODELS, connection_id=ord(name), now_s=0.0)
    registry.report(ord("a"), replace(REPORT, is_reconfiguring=True), now_s=0.0)
    assert [each.replica_id for each in registry.live(now_s=0.0)] == ["b"]


REPORTS = st.builds(
    lambda epoch, is_reconfiguring, members: replace(
        REPORT, epoch=epoch, is_reconfiguring=is_reconfiguring, members=members
    ),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=4),
)


@given(st.lists(REPORTS, max_size=6))
def test_only_reports_of_the_newest_epoch_count_in_whatever_order_they_came(reports: list[LoadReport]) -> None:
    group = taken_together(reports)
    assert group == taken_together([each for each in reports if each.epoch == group.epoch])
    assert group.epoch == max((each.epoch for each in reports), default=0)
    for report in reports:
        if report.epoch == group.epoch:
            assert not group.has_evicted(0, report), "who is in the epoch was not evicted from it"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sets(st.integers(0, 3))), max_size=20))
def test_evicted_replicas_never_serve_and_others_do_when_their_epoch_is_the_newest(
    said: list[tuple[int, int, set[int]]],
) -> None:
    told = Told(4)
    for rank, epoch, members in said:
        told.say(rank, epoch, *sorted(members))
    assert len(told.evicted) == len(set(told.evicted))
    newest = told.group()[0].epoch
    for replica in told.registry.known():
        state = told.registry.state(replica, now_s=0.0)
        assert (state is ReplicaState.EVICTED) is (replica.replica_id in told.evicted)
        if state is ReplicaState.LIVE:
            assert replica.report is None or replica.report.epoch == newest
