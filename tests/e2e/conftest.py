"""One proxy and two float32 replicas of the demo model, shared by the tests that leave them as they found them.

What uses `cluster` runs twice: over two replicas of one rank, each alone, and over a group of two with two ranks each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.commands import Commands
from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session", params=["alone", "group"])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Up to its last test. It must end well, too: exit codes 0 and no process or port left."""
    with Commands(tmp_path_factory.mktemp("cluster")) as running:
        yield Cluster.start(running) if request.param == "alone" else Cluster.start_group(running)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The reference shares the cores with the replicas, and threads that contend cost milliseconds an operation."""
    torch.set_num_threads(1)
