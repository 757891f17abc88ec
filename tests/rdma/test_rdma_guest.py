"""The tests of ``inside``, run in the soft-RoCE guest, and tests that the guest ends at its deadline."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.rdma.guest import ROOT, SHARE, Guest, GuestLost, NoGuest, environment

pytestmark = [pytest.mark.rdma, pytest.mark.slow]


class Report(NamedTuple):
    """The result of pytest in the guest: its exit status, and the messages of every test that did not pass."""

    status: int
    outcomes: dict[str, str]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    share = tmp_path_factory.mktemp("guest")
    guest = boot(share, deadline_s=1800)  # only ends what hangs: the tests alone take three minutes
    tests = ["python", "-m", "pytest", "tests/rdma/inside", "-p", "no:cacheprovider"]
    collect(tests)
    printed: list[bytes] = []
    try:
        status = guest.run([*tests, "--durations=10", f"--junitxml={SHARE}/report.xml"], printed.append)
    finally:
        print(b"".join(printed).decode(errors="replace"))
    cases = ElementTree.parse(share / "report.xml").iter("testcase") if (share / "report.xml").exists() else ()
    return Report(status, {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases})


def collect(tests: list[str]) -> None:
    """Collects with the guest's Python on this machine, which compiles faster; the guest finds the compiled files."""
    collected = subprocess.run(
        [*tests, "--collect-only", "-q"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr


def outcome(case: ElementTree.Element) -> str:
    """Returns the messages of a test that did not pass, else an empty string."""
    return "\n".join(f"{child.tag}: {child.text or child.get('message')}" for child in case if child.tag in NOT_PASSED)


NOT_PASSED = {"failure", "error", "skipped"}


def boot(share: Path, deadline_s: float) -> Guest:
    if not os.environ.get("PINYON_TEST_RDMA"):
        pytest.skip("./dev test rdma runs these: the machine is emulated and takes a processor for minutes")
    try:
        return Guest(share, deadline_s)
    except NoGuest as reason:
        pytest.skip(str(reason))


def test_every_test_inside_the_guest_passes(report: Report, subtests: pytest.Subtests) -> None:
    for name, said in report.outcomes.items():
        with subtests.test(name):
            assert not said, said


def test_the_guest_ran_the_tests_to_their_end(report: Report) -> None:
    assert len(report.outcomes) > 0
    status = report.status
    assert status == 0


def test_a_guest_that_hangs_ends_itself(tmp_path: Path) -> None:
    guest = boot(tmp_path, deadline_s=1)
    with pytest.raises(GuestLost, match="deadline"):
        guest.run(["sleep", "1000"])
