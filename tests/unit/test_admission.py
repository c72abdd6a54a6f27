"""Who is let in, who waits, and that nothing is counted twice or forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.admission import Admission, Caller, Priority, Ticket, parse_priority
from proxy.errors import BadRequest, KeyOverLimit, Overloaded

ANYBODY = Caller(name="anybody")


def admission(**changes: int) -> Admission:
    return Admission(**{"max_requests": 2, "max_tokens": 0, "max_waiting": 100, "queue_timeout_s": 5.0, **changes})  # type: ignore[arg-type]


def ticket(
    of: Admission, name: str = "", caller: Caller | None = None, priority: Priority = Priority.NORMAL, tokens: int = 10
) -> Ticket:
    made = Ticket(name, caller or ANYBODY, priority, tokens)
    of.take(made)
    return made


def let_in(of: Admission) -> list[str]:
    """Who gets in, one after the other, when each one's end lets in the next."""
    order = []
    while of.waiting:
        first = next(of.in_turn())
        of.admit(first)
        order.append(first.request)
        of.give_back(first)
    return order


def test_a_request_over_a_bound_finds_no_room_but_a_single_one_always_does() -> None:
    state = admission(max_tokens=100)
    big = ticket(state, tokens=500)
    assert state.has_room(big)
    state.admit(big)
    small = ticket(state)
    assert not state.has_room(small)
    state.give_back(big)
    assert state.has_room(small)
    state.admit(small)
    state.admit(ticket(state))
    assert not state.has_room(ticket(state)), "two requests are the limit"


def test_the_higher_priority_goes_first_and_within_one_the_keys_take_turns() -> None:
    state = admission()
    alice, bob = Caller(name="alice"), Caller(name="bob")
    for number in range(3):
        state.suspend(ticket(state, f"alice {number}", alice), 0.0)
    state.suspend(ticket(state, "bob 0", bob), 0.0)
    state.suspend(ticket(state, "alice low", alice, Priority.LOW), 0.0)
    state.suspend(ticket(state, "bob high", bob, Priority.HIGH), 0.0)
    assert let_in(state) == ["bob high", "alice 0", "bob 0", "alice 1", "alice 2", "alice low"]


def test_those_who_find_no_room_let_others_pass() -> None:
    state = admission()
    for number in range(4):
        state.suspend(ticket(state, str(number)), 0.0)
    seen = []
    for waiting in state.in_turn():
        seen.append(waiting.request)
        if waiting.request == "2":
            state.admit(waiting)
    assert seen == ["0", "1", "2", "3"] and state.waiting == 3


def test_a_full_queue_refuses_and_counts_nothing() -> None:
    state = admission(max_waiting=1)
    state.suspend(ticket(state), 0.0)
    with pytest.raises(Overloaded, match="limit 1 "):
        state.suspend(ticket(state), 0.0)
    assert state.waiting == 1


def test_a_deadline_counts_from_the_first_wait() -> None:
    state = admission()
    late = ticket(state)
    state.suspend(late, 10.0)
    state.admit(late)
    state.suspend(late, 14.0)
    assert state.overdue(14.9) == [] and state.overdue(15.0) == [late]


def test_a_key_s_own_limits_are_429() -> None:
    state, caller = admission(), Caller(name="alice", max_requests=2, max_tokens=25)
    first = ticket(state, caller=caller)
    ticket(state, caller=caller)
    with pytest.raises(KeyOverLimit, match="2 requests open, limit 2") as caught:
        ticket(state, caller=caller)
    assert caught.value.status == 429 and "Retry-After" in caught.value.headers()
    state.give_back(first)
    with pytest.raises(KeyOverLimit, match="tokens open, limit 25"):
        ticket(state, caller=caller, tokens=20)


def test_a_priority_that_is_none_is_a_bad_request() -> None:
    assert parse_priority(" HIGH ") is Priority.HIGH
    with pytest.raises(BadRequest, match="must be one of high, normal, low"):
        parse_priority("urgent")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("tasg"), st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_whatever_happens_nothing_is_left_when_all_have_ended(events: list[tuple[str, int, int]]) -> None:
    state = admission(max_waiting=5)
    callers = [Caller(name=str(number)) for number in range(3)]
    open_tickets: list[Ticket] = []
    for what, index, number in events:
        if what == "t":
            open_tickets.append(ticket(state, caller=callers[number], priority=Priority(number), tokens=index))
        elif open_tickets:
            chosen = open_tickets[index % len(open_tickets)]
            if what == "a" and not chosen.is_admitted:
                state.admit(chosen)
            elif what == "s" and state.waiting < 5:
                state.suspend(chosen, 0.0)
            elif what == "g":
                state.give_back(chosen)
                open_tickets.remove(chosen)
        assert state.waiting == sum(each.is_waiting for each in open_tickets) == len(list(state.in_turn()))
        assert state.requests == sum(each.is_admitted for each in open_tickets)
    for left in open_tickets:
        state.give_back(left)
    assert (state.requests, state.tokens, state.waiting) == (0, 0, 0)
    assert all((caller.requests, caller.tokens) == (0, 0) for caller in callers)
