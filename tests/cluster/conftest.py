"""A cluster of separate processes, with real Redis, real sockets and the built-in transformer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.cluster import LocalCluster
from tests.cluster.reference import Reference
from tests.cluster.specs import CHUNKS, cluster_spec
from tests.forks import forked
from tests.side_by_side import CLUSTER, unit_of
from tests.small_model import small_card

RUNNING = pytest.StashKey[LocalCluster]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Stops the shared cluster after its last file; idle until the session's end, it took a twentieth of a core."""
    yield
    if unit_of(item.nodeid) == CLUSTER and (nextitem is None or unit_of(nextitem.nodeid) != CLUSTER):
        running = item.config.stash.get(RUNNING, None)
        if running is not None:
            running.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """A shared cluster of 2 prefill, 2 decode, 1 store node, conductor, load balancer. Tests must not change it."""
    with LocalCluster(cluster_spec(extra=CHUNKS), tmp_path_factory.mktemp("cluster-logs"), forked) as running:
        pytestconfig.stash[RUNNING] = running
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def small_reference() -> Reference:
    """The expected tokens of clusters that serve the smaller model (``forked.with_small_model``)."""
    return Reference(small_card())
