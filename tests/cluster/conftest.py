"""A real cluster: separate processes, real Redis, real sockets, the built-in transformer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.cluster import LocalCluster
from tests.cluster.reference import Reference
from tests.cluster.specs import cluster_spec


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """2 prefill, 2 decode, 1 store node, conductor, load balancer. Shared: a test leaves it as it found it."""
    with LocalCluster(cluster_spec(), tmp_path_factory.mktemp("cluster-logs")) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What the tokens must be."""
    return Reference()
