"""The suite as containers, built and started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docker.containers import ContainerSuite, NoContainers


@pytest.fixture(scope="session")
def suite() -> Iterator[ContainerSuite]:
    """The running suite with all containers healthy. A test leaves it as it found it."""
    try:
        running = ContainerSuite()
    except NoContainers as reason:
        pytest.skip(str(reason))
    try:
        try:
            running.up()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{running.logs()}") from error
        yield running
    finally:
        running.down()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the containers' logs to the report of a failed test."""
    report = yield
    running = item.funcargs.get("suite")
    if call.when == "call" and report.failed and running is not None:
        report.sections.append(("container logs", running.logs()))
    return report
