"""What a proxy believes a replica has to do: its own requests, and what the replica's reports say of others'."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol import LoadReport
from proxy.replicas import REQUEST_TOKENS, InFlight, Replica

EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "arrive", "finish", "end", "report", "heard"]), st.integers(0, 9)), max_size=80
)


class Life:
    """One replica and the proxy in front of it; all that goes between them takes as long as the test likes."""

    def __init__(self, others: int) -> None:
        self.others = others  # requests that other proxies have there
        self.replica = Replica(
            replica_id="r", incarnation="a", url="http://h:1", models={}, is_backend=False, last_seen_s=0.0
        )
        self.sent: list[InFlight] = []  # not yet there
        self.there: list[InFlight] = []
        self.answered: list[InFlight] = []  # there no more, but the proxy has not seen the answer's end
        self.on_its_way: LoadReport | None = None
        self._sequences = itertools.count(1)

    def happens(self, event: str, number: int) -> None:
        """One event; it does nothing where it cannot happen now."""
        if event == "send":
            self.sent.append(InFlight(self.replica, number))
        elif event == "arrive" and self.sent:
            self.there.append(self.sent.pop(number % len(self.sent)))
        elif event == "finish" and self.there:
            self.answered.append(self.there.pop(number % len(self.there)))
        elif event == "end" and self.answered:
            self.answered.pop(number % len(self.answered)).release()
        elif event == "report" and self.on_its_way is None:
            self.on_its_way = LoadReport(
                sequence=next(self._sequences),
                running=len(self.there),
                waiting=self.others,
                queued_prefill_tokens=0,
                free_blocks=0,
                total_blocks=0,
                step=0,
                epoch=0,
            )
        elif event == "heard" and self.on_its_way is not None:
            self.replica.reported(self.on_its_way)
            self.on_its_way = None


@given(EVENTS, st.integers(0, 5))
def test_no_request_of_ours_is_ever_counted_as_another_s_however_late_a_report_is(
    events: list[tuple[str, int]], others: int
) -> None:
    life = Life(others)
    for event in events:
        life.happens(*event)
        replica = life.replica
        assert 0 <= replica.foreign_requests <= others
        own = len(life.sent) + len(life.there) + len(life.answered)
        assert replica.in_flight == own
        assert replica.load == replica.in_flight_tokens + REQUEST_TOKENS * (own + replica.foreign_requests)


@given(EVENTS, st.integers(0, 5), st.integers(0, 5))
def test_once_all_is_quiet_the_next_reports_say_what_is_there(
    events: list[tuple[str, int]], before: int, after: int
) -> None:
    life = Life(before)
    for event in events:
        life.happens(*event)
    life.others = after  # others came or went
    while life.sent:
        life.happens("arrive", 0)
    while life.answered:
        life.happens("end", 0)
    for _ in range(2):  # one may still be on its way from before
        life.happens("heard", 0)
        life.happens("report", 0)
        life.happens("heard", 0)
    assert life.replica.foreign_requests == after


def test_a_life_that_comes_back_has_its_own_requests_and_nobody_else_s_until_it_reports() -> None:
    life = Life(others=3)
    life.happens("send", 7)
    life.happens("arrive", 0)
    life.happens("report", 0)
    life.happens("heard", 0)
    assert life.replica.load == 7 + 4 * REQUEST_TOKENS
    life.replica.came_back("http://h:1", {}, now_s=1.0)
    assert life.replica.load == 7 + REQUEST_TOKENS
