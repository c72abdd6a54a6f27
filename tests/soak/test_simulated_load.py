"""Two hours of load on a whole replica, the time of its forwards left out: it holds no more at the end (`make flat`).

What that means is in simulated_load.py. SIMULATED_MIN shortens it.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.soak.growth import slope
from tests.soak.simulated_load import REQUESTS_PER_S, simulate

NUM_MINUTES: Final = int(os.environ.get("SIMULATED_MIN", "120"))
WARM_UP_MIN: Final = NUM_MINUTES // 4  # caches of grammars, of prefixes and of the allocator fill
MAX_SLOPE_MIB: Final = 1.0  # a minute
MAX_MORE_OBJECTS: Final = NUM_MINUTES  # of a type: far fewer than requests


@pytest.mark.timeout(1800)
async def test_two_hours_of_simulated_load_leave_memory_files_tasks_and_blocks_as_they_were() -> None:
    at = (WARM_UP_MIN, NUM_MINUTES)
    held = await simulate(NUM_MINUTES, requests_per_min=60 * REQUESTS_PER_S, count_objects_at=at)
    grown_mib = slope(list(enumerate(held.rss_mib))[WARM_UP_MIN:])
    more = held.grown(*at, by=20)
    print(f"\n{NUM_MINUTES} simulated minutes, {sum(held.statuses.values())} requests, statuses {dict(held.statuses)}")
    print(f"RSS {held.rss_mib[0]:.1f} MiB, {held.rss_mib[WARM_UP_MIN]:.1f} after warm-up, {held.rss_mib[-1]:.1f} MiB")
    print(f"slope {grown_mib:.4f} MiB a simulated minute, open files {held.open_files[::10]}, more objects {more}")
    assert grown_mib < MAX_SLOPE_MIB
    assert max(held.open_files[WARM_UP_MIN:]) <= max(held.open_files[:WARM_UP_MIN])
    assert not {name: number for name, number in more.items() if number > MAX_MORE_OBJECTS}
