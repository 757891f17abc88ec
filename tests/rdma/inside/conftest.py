"""Fixtures of the tests in the guest: a network that is whole when a test begins, and processes for host b."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma.inside import nics, rdma_peer


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        rdma_peer.fork_spares()


@pytest.fixture(autouse=True)
def whole_network() -> Iterator[None]:
    """A repair after each test, so that a failure while a NIC is down makes no other test fail."""
    yield
    nics.repair()
