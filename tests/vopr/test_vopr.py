"""The store, simulated with faults: a few seeds. ``./dev test vopr`` runs more of them, and planted bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.long import usually
from tests.vopr.planted import ROOT, bugs
from tests.vopr.runner import Report, Results


def vopr(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vopr", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return ran.stdout


def test_some_seeds_find_nothing() -> None:
    count = usually(6, long=1000)
    assert f"{count} of {count} seeds from 1 on, 0 failed" in vopr("--first", "1", "--seeds", str(count))


def test_a_seed_always_does_the_same() -> None:
    one, other = (vopr("--seed", "7").splitlines() for _ in range(2))
    assert len(one) > 300
    assert one == other


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with Results(file, 100, 4) as results:
        results.add(Report(101))
        results.add(Report(100))
    with file.open("a") as stopped:
        stopped.write('\n{"seed": 102, "fai')  # in the midst of a line
    for _ in range(2):
        with Results(file, None, 4) as results:
            left = results.left()
            results.add(Report(left[0]))
    assert left == [103]
    assert Results(file, None, 4).left() == []


def test_every_bug_can_be_planted() -> None:
    assert len({bug.name for bug in bugs()}) == len(bugs()) >= 14
    for bug in bugs():
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug.name
