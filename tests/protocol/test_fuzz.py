"""Bodies that are almost right harm nobody. `make fuzz` sends ten times as many."""

from __future__ import annotations

import pytest

from tests.fuzz import fuzz


@pytest.mark.timeout(300)
async def test_bodies_that_are_almost_right_harm_nobody() -> None:
    report = await fuzz(2000, seed=1)
    assert report.failures == []
    assert sum(report.statuses.values()) + report.hung_up == 2000
    assert report.statuses[200] > 200 and report.statuses[400] > 200 and report.probes > 3
