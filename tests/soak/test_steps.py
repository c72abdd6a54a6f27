"""Many released steps with random idleness, requests and aborts: all members end at the same step (`make soak`)."""

from __future__ import annotations

import pytest

from tests.unit.group_soak import soak

NUM_STEPS = 100_000


@pytest.mark.timeout(1200)
async def test_100_000_steps_with_random_idleness_end_with_equal_counters() -> None:
    await soak(11, num_steps=NUM_STEPS)
