"""Hooks by which pytest asks the owner of all processes for leaks. They take effect through ``conftest.py``."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.processes import OWNER
from tests.side_by_side import unit_of


@pytest.fixture(autouse=True)
def every_process_is_reaped(request: pytest.FixtureRequest) -> Iterator[None]:
    """A check that is set up before all other fixtures of a test, so it runs after their teardown."""
    yield
    if lost := OWNER.end_test(request.node.nodeid):
        pytest.fail("nobody waited for " + "; ".join(lost), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        OWNER.failed.add(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Checks for leaks when a unit's last test, and with it the fixtures of its file, has been torn down."""
    yield
    last = nextitem is None or unit_of(item.nodeid) != unit_of(nextitem.nodeid)
    if last and (lost := OWNER.end_unit()):
        pytest.fail(f"{unit_of(item.nodeid)} has ended, and nobody waited for " + "; ".join(lost), pytrace=False)
