"""How urgent a request is: of two ways to say so, and as proxy and replica both understand it."""

from __future__ import annotations

import pytest

from proxy.admission import PRIORITIES
from replica.api.priority import priority_of
from replica.errors import BadRequest


@pytest.mark.parametrize(
    ("asked", "header", "number"),
    [(None, None, 0), (5, None, 5), (None, " High ", -1), (None, "low", 1), (7, "high", 7), (0, "low", 0)],
)
def test_the_body_s_number_goes_before_the_header_s_class(asked: int | None, header: str | None, number: int) -> None:
    assert priority_of(asked, header) == number


def test_proxy_and_replica_know_the_same_classes_in_the_same_order() -> None:
    numbers = [priority_of(None, name) for name in sorted(PRIORITIES, key=PRIORITIES.__getitem__)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("asked", [None, 1])
def test_a_class_that_is_none_is_refused_with_those_there_are(asked: int | None) -> None:
    with pytest.raises(BadRequest, match="X-Priority is 'urgent', must be one of high, normal, low"):
        priority_of(asked, "urgent")
