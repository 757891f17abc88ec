"""What the tests in the guest share: a network that is whole when a test begins, and processes for host b."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma.inside import nics, rdma_peer


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        rdma_peer.fork_spares()


@pytest.fixture(autouse=True)
def whole_network() -> Iterator[None]:
    """One test that fails while a NIC is down makes no other fail."""
    yield
    nics.repair()
