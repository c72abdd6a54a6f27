"""One proxy and two float32 replicas of the demo model, shared by the tests that leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.commands import Commands
from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Up to the end of the run. It must end well, too: exit codes 0 and no process or port left."""
    with Commands(tmp_path_factory.mktemp("cluster")) as running:
        yield Cluster.start(running)
