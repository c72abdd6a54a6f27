"""Some hundred requests of all kinds leave no task, block, file or object behind (`make flat`: hours of them)."""

from __future__ import annotations

from tests.soak.simulated_load import simulate

MAX_MORE_OBJECTS = 60  # of a type, for 600 requests: grammars are remembered, up to a bound


async def test_600_requests_of_all_kinds_leave_nothing_behind() -> None:
    held = await simulate(4, requests_per_min=300, count_objects_at=(2, 4))
    assert held.statuses[200] > held.statuses.total() / 2
    assert not [status for status in held.statuses if status and status >= 500]
    assert max(held.open_files[2:]) <= max(held.open_files[:2])
    more = held.grown(2, 4, by=MAX_MORE_OBJECTS)
    lazily_made = {"weakref.ReferenceType", "builtins.builtin_function_or_method"}  # once, and of no number of requests
    assert not more.keys() - lazily_made
