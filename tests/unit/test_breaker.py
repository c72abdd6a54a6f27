"""When a replica is left alone, and how it comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.breaker import MIN_OUTCOMES, OPEN_S, WINDOW_S, Breaker, RetryBudget


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MIN_OUTCOMES):
        breaker.ended(False, at_s)
    return breaker


def test_a_few_failures_among_many_answers_open_nothing() -> None:
    breaker = Breaker()
    for number in range(1000):
        breaker.ended(number % 3 != 0, number * 0.001)
    assert breaker.is_shut and breaker.allows(1.0)


def test_few_outcomes_say_nothing() -> None:
    breaker = Breaker()
    for _ in range(MIN_OUTCOMES - 1):
        breaker.ended(False, 0.0)
    assert breaker.is_shut


def test_failures_that_are_long_past_do_not_count() -> None:
    breaker = Breaker()
    for number in range(50):
        breaker.ended(False, number * WINDOW_S)
    assert breaker.is_shut


def test_an_open_breaker_lets_one_request_try_and_closes_when_it_ends_well() -> None:
    breaker = opened()
    assert not breaker.allows(OPEN_S - 0.1) and breaker.allows(OPEN_S)
    breaker.sent(OPEN_S)
    assert not breaker.allows(OPEN_S + 0.1), "one at a time"
    breaker.ended(True, OPEN_S + 0.2)
    assert breaker.is_shut and breaker.allows(OPEN_S + 0.2)


def test_a_trial_that_fails_opens_it_again_and_one_whose_client_left_says_nothing() -> None:
    breaker = opened()
    breaker.sent(OPEN_S)
    breaker.ended(False, OPEN_S)
    assert not breaker.allows(2 * OPEN_S - 0.1) and breaker.allows(2 * OPEN_S)
    breaker.sent(2 * OPEN_S)
    breaker.abandoned()
    assert not breaker.is_shut and breaker.allows(2 * OPEN_S)


def test_a_trial_that_never_ends_does_not_keep_it_open_for_ever() -> None:
    breaker = opened()
    breaker.sent(OPEN_S)
    assert breaker.allows(OPEN_S + WINDOW_S + 0.1)


@given(st.lists(st.booleans(), max_size=300))
def test_retries_are_at_most_a_fifth_of_all_requests_and_a_few(asked: list[bool]) -> None:
    budget, retries = RetryBudget(), 0
    for wants_retry in asked:
        budget.earn()
        retries += wants_retry and budget.spend()
    assert retries <= len(asked) * RetryBudget.RATIO + RetryBudget.MOST
