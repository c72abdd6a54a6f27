"""The registry: who may get requests, and that no count drifts."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import JoinRefused
from proxy.protocol import Hello, LoadReport
from proxy.registry import PROBE_FAILURES_OUT, PROBE_SUCCESSES_IN, Registry
from proxy.replicas import InFlight, Replica, ReplicaState

HELLO = Hello(
    replica_id="r0",
    incarnation="a",
    url="http://h:1/",
    model="tiny",
    model_hash="0",
    group="g",
    dp_rank=0,
    max_model_len=64,
    max_num_seqs=4,
)
MODELS = {"tiny": {"id": "tiny"}}
REPORT = LoadReport(
    sequence=1, running=3, waiting=0, queued_prefill_tokens=0, free_blocks=1, total_blocks=2, step=5, epoch=0
)


def registry() -> Registry:
    return Registry(heartbeat_timeout_s=3.0)


def join(
    to: Registry, replica_id: str = "r0", incarnation: str = "a", *, line: int = 1, now_s: float = 0.0
) -> int | None:
    hello = replace(HELLO, replica_id=replica_id, incarnation=incarnation, group=f"group of {replica_id}")
    return to.join(hello, MODELS, connection_id=line, now_s=now_s)


def only(of: Registry) -> Replica:
    (replica,) = of.known()
    return replica


def test_a_replica_is_live_from_its_hello_on() -> None:
    state = registry()
    assert join(state, now_s=10.0) is None
    assert [replica.url for replica in state.live(now_s=10.0)] == ["http://h:1"]


@pytest.mark.parametrize("others", [{"dp_rank": 0}, {"dp_rank": 2, "model_hash": "1"}])
def test_a_replica_of_another_group_of_the_same_name_is_refused_while_the_first_lives(others: dict[str, Any]) -> None:
    state = registry()
    state.join(HELLO, MODELS, connection_id=1, now_s=0.0)
    state.join(replace(HELLO, incarnation="b"), MODELS, connection_id=2, now_s=0.0)  # its next life
    state.join(replace(HELLO, replica_id="r1", dp_rank=1), MODELS, connection_id=3, now_s=0.0)
    state.join(replace(HELLO, replica_id="r2", group="h"), MODELS, connection_id=4, now_s=0.0)
    other = replace(HELLO, replica_id="r3", **others)
    with pytest.raises(JoinRefused, match=r"another group is named 'g': the live replica 'r0' .* apart \(--group\)"):
        state.join(other, MODELS, connection_id=5, now_s=1.0)
    assert {replica.replica_id for replica in state.live(now_s=1.0)} == {"r0", "r1", "r2"}, "nobody is disturbed"
    state.join(other, MODELS, connection_id=6, now_s=3.5)  # all that were there are silent


def test_a_silent_replica_gets_no_new_requests_until_it_reports_again() -> None:
    state = registry()
    join(state, now_s=10.0)
    assert state.live(now_s=13.0)
    assert not state.live(now_s=13.1)
    assert state.state(only(state), now_s=13.1) is ReplicaState.SUSPECT
    state.report(1, REPORT, now_s=14.0)
    assert state.live(now_s=16.9)


def test_a_leaving_replica_gets_no_new_requests_however_often_it_reports() -> None:
    state = registry()
    join(state)
    state.leaving(1)
    state.report(1, REPORT, now_s=0.5)
    assert not state.live(now_s=0.5)
    assert state.state(only(state), now_s=0.5) is ReplicaState.LEAVING


def test_the_end_of_the_connection_means_gone_at_once() -> None:
    state = registry()
    join(state)
    replica = only(state)
    assert state.gone(1) is replica
    assert state.known() == [] and state.gone(1) is None


def test_an_older_report_does_not_overwrite_a_newer_one_but_proves_life() -> None:
    state = registry()
    join(state)
    state.report(1, replace(REPORT, sequence=5, running=1), now_s=1.0)
    state.report(1, replace(REPORT, sequence=4, running=9), now_s=2.0)
    assert only(state).report == replace(REPORT, sequence=5, running=1)
    assert only(state).last_seen_s == 2.0


def test_a_new_life_of_the_same_replica_replaces_the_old_whose_end_then_changes_nothing() -> None:
    state = registry()
    join(state, incarnation="a", line=1)
    place = InFlight(only(state))
    assert join(state, incarnation="b", line=2) == 1
    assert only(state).incarnation == "b" and only(state).in_flight == 0
    place.release()
    state.report(1, REPORT, now_s=9.0)
    state.leaving(1)
    assert state.gone(1) is None
    assert only(state).in_flight == 0 and only(state).report is None and state.live(now_s=0.0)


def test_a_namesake_at_another_url_is_refused_while_the_first_is_alive_and_takes_its_place_when_it_is_silent() -> None:
    state = registry()
    join(state, line=1)
    namesake = replace(HELLO, incarnation="b", url="http://other:2")
    with pytest.raises(JoinRefused, match="http://h:1"):
        state.join(namesake, MODELS, connection_id=2, now_s=3.0)
    assert only(state).incarnation == "a" and state.gone(2) is None
    assert state.join(namesake, MODELS, connection_id=3, now_s=3.1) == 1
    assert only(state).url == "http://other:2"


def test_time_in_which_the_proxy_slept_is_nobody_s_silence() -> None:
    state = registry()
    join(state, now_s=0.0)
    state.tick(now_s=1.0, every_s=0.25)
    assert state.live(now_s=9.0), "nothing has been read since the last tick"
    state.tick(now_s=9.25, every_s=0.25)  # 8 s late
    assert only(state).last_seen_s == 8.0 and state.live(now_s=9.25)
    for tick in range(1, 9):
        state.tick(now_s=9.25 + tick / 4, every_s=0.25)
    assert not state.live(now_s=11.25), "silence while it is awake counts"


def test_a_tick_that_is_late_by_a_moment_does_not_call_a_silent_replica_back() -> None:
    state = registry()
    join(state, now_s=0.0)
    was_silent = False
    for moment in range(1, 800):
        now_s = moment / 100
        if moment % 26 == 0:
            state.tick(now_s=now_s, every_s=0.25)
        assert not (was_silent and state.live(now_s=now_s)), f"live again at {now_s} s"
        was_silent = was_silent or not state.live(now_s=now_s)
    assert was_silent


def test_a_replica_heard_of_before_the_late_tick_is_not_of_the_future() -> None:
    state = registry()
    join(state, now_s=0.0)
    state.tick(now_s=0.0, every_s=0.25)
    state.report(1, REPORT, now_s=9.0)
    state.tick(now_s=9.25, every_s=0.25)
    assert only(state).last_seen_s == 9.25


def test_a_life_that_comes_back_still_has_in_flight_what_it_had() -> None:
    state = registry()
    join(state, line=1)
    place = InFlight(only(state))
    state.leaving(1)
    state.report(1, replace(REPORT, sequence=7), now_s=0.0)
    state.gone(1)
    join(state, line=2, now_s=5.0)
    assert only(state).in_flight == 1 and state.live(now_s=5.0)
    assert only(state).report is None, "a new connection counts its reports anew"
    place.release()
    assert only(state).in_flight == 0


def test_a_life_that_ended_and_has_nothing_in_flight_is_forgotten() -> None:
    state = registry()
    for line in range(100):
        join(state, incarnation=str(line), line=line)
        state.gone(line)
    gc.collect()
    assert len(state._lives) == 0


def test_a_place_is_given_back_once_however_often_it_is_released() -> None:
    state = registry()
    join(state)
    replica = only(state)
    with InFlight(replica) as place:
        assert replica.in_flight == 1
        place.release()
        assert replica.in_flight == 0
    place.release()
    assert replica.in_flight == 0


def test_a_refused_connection_puts_a_replica_out_until_its_next_report() -> None:
    state = registry()
    join(state)
    state.connect_failed(only(state))
    assert state.state(only(state), now_s=0.0) is ReplicaState.UNREACHABLE
    state.report(1, REPORT, now_s=0.5)
    assert state.live(now_s=0.5)


def test_a_backend_is_live_after_its_first_good_probe_and_never_suspect() -> None:
    state = registry()
    backend = state.add_backend("http://b:1", now_s=0.0)
    assert not state.live(now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=1.0)
    assert state.live(now_s=1000.0) == [backend] and backend.models == MODELS


def test_a_backend_goes_out_after_three_failures_in_a_row_and_comes_back_after_two_successes() -> None:
    state = registry()
    backend = state.add_backend("http://b:1", now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    for _ in range(PROBE_FAILURES_OUT - 1):
        state.probe_failed(backend)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    for _ in range(PROBE_FAILURES_OUT - 1):
        state.probe_failed(backend)
    assert state.live(now_s=0.0)
    state.probe_failed(backend)
    assert not state.live(now_s=0.0)
    for _ in range(PROBE_SUCCESSES_IN - 1):
        state.probe_succeeded(backend, MODELS, now_s=0.0)
    assert not state.live(now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    assert state.live(now_s=0.0)


def test_a_refused_connection_puts_a_backend_out_at_once() -> None:
    state = registry()
    backend = state.add_backend("http://b:1", now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    state.connect_failed(backend)
    assert not state.live(now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    assert not state.live(now_s=0.0)
    state.probe_succeeded(backend, MODELS, now_s=0.0)
    assert state.live(now_s=0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "gone", "leaving", "report", "refuse", "take", "release"]), st.integers(0, 5)
        ),
        max_size=80,
    )
)
def test_counts_equal_the_places_taken_in_any_order_of_events(events: list[tuple[str, int]]) -> None:
    state = registry()
    taken: list[tuple[Replica, InFlight]] = []
    lines = 0
    for now_s, (event, number) in enumerate(events):
        known = state.known()
        if event == "join":
            lines += 1
            join(state, f"r{number % 3}", f"life{number}", line=lines, now_s=float(now_s))
        elif event == "gone":
            state.gone(number)
        elif event == "leaving":
            state.leaving(number)
        elif event == "report":
            state.report(number, replace(REPORT, sequence=now_s), now_s=float(now_s))
        elif event == "refuse" and known:
            state.connect_failed(known[number % len(known)])
        elif event == "take" and known:
            taken.append((known[number % len(known)], InFlight(known[number % len(known)])))
        elif event == "release" and taken:
            taken.pop(number % len(taken))[1].release()
        for replica in [*state.known(), *(replica for replica, _ in taken)]:
            assert replica.in_flight == sum(owner is replica for owner, _ in taken)
        ids = [replica.replica_id for replica in state.known()]
        assert len(ids) == len(set(ids))
        assert all(replica in state.known() for replica in state.live(now_s=float(now_s)))
    for _, place in taken:
        place.release()
    assert all(replica.in_flight == 0 for replica in state.known())
