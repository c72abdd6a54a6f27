"""The script of the openai package, with all it asks for, through the proxy. `make clients` runs the other clients'."""

from __future__ import annotations

from tests.clients.run import run
from tests.e2e.cluster import Cluster


def test_openai_package_is_content_with_every_call(cluster: Cluster) -> None:
    assert run("openai_client", cluster.url)
