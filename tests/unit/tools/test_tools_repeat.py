"""Repeated test runs: the records, the omissions, and the table."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import repeat
from tests.repeat import Result, Writer, append_line, busy_loops, read_results, run_once, table

PLAIN = ("-n", "0", "-p", "no:cacheprovider", "-c", str(repeat.ROOT / "pyproject.toml"))
TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert "1" == "2"
@pytest.mark.skip(reason="has no such device")
def test_is_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise OSError("cannot close")
def test_fails_at_its_end(broken): pass
def test_fails_in_a_group(): raise ExceptionGroup("two", [ValueError("one"), OSError("other")])
"""


def result(run: int, test: str, outcome: str, at: str = "2026-11-27T10:00:00+00:00", why: str = "") -> Result:
    return Result(run, test, outcome, 1.0, at, "abcd1234", why)


def test_each_outcome_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    results = tmp_path / "results"
    assert run_once(1, results, [], [*PLAIN, "--rootdir", str(tmp_path), str(tmp_path)]) == 1
    found, complete = read_results(results)
    assert {each.test.partition("::")[2]: (each.outcome, each.why.partition(" | ")[0]) for each in found} == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "call: AssertionError: assert '1' == '2'"),
        "test_is_skipped": ("skipped", "has no such device"),
        "test_fails_at_its_end": ("failed", "teardown: OSError: cannot close"),
        "test_fails_in_a_group": ("failed", "call: ValueError: one"),
    }
    assert (complete, {each.run for each in found}) == (set(), {1})


def test_what_is_done_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    results = tmp_path / "results"
    arguments = [*PLAIN, "--rootdir", str(tmp_path), str(tmp_path)]
    done = [f"test_it.py::{name}" for name in ("test_fails", "test_fails_at_its_end", "test_fails_in_a_group")]
    assert run_once(2, results, done, arguments) == 0
    assert [each.test for each in read_results(results)[0]] == [
        "test_it.py::test_passes",
        "test_it.py::test_is_skipped",
    ]
    everything = [*done, "test_it.py::test_passes", "test_it.py::test_is_skipped"]
    assert run_once(2, results, everything, arguments) == repeat.NOTHING_LEFT


def test_a_dead_worker_fails_the_test_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "results"
    died: Any = SimpleNamespace(
        nodeid="test_a", when="???", failed=True, skipped=False, duration=0.0, longrepr="worker 'gw0' crashed"
    )
    Writer(path, 1, "abcd").pytest_runtest_logreport(died)
    assert [(each.outcome, each.why) for each in read_results(path)[0]] == [("failed", "???: worker 'gw0' crashed")]


def test_results_survive_a_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_text('[1, "test_a", "passed", 0.1, "2026", "abcd", ""]\n1\n[2, "test_a", "pas')
    assert read_results(path) == ([Result(1, "test_a", "passed", 0.1, "2026", "abcd")], {1})
    assert read_results(tmp_path / "none") == ([], set())
    append_line(path, "2")
    append_line(path, "3")
    assert read_results(path) == ([Result(1, "test_a", "passed", 0.1, "2026", "abcd")], {1, 2, 3}), (
        "what follows it too"
    )


def test_the_table_names_what_ever_failed() -> None:
    results = [
        result(1, "tests/a.py::test_a", "passed"),
        result(1, "tests/a.py::test_b", "failed", why="call: it raced"),
        result(2, "tests/a.py::test_a", "failed", at="2026-11-27T11:30:00+00:00", why="call: late"),
        result(2, "tests/a.py::test_b", "failed", why="call: it raced again"),
        result(2, "tests/a.py::test_c", "skipped"),
    ]
    lines = table(results, 3).splitlines()
    assert lines[2].startswith("| 1 | 2 | 1 | 1 | 0 | 2026-11-27 10:00 | 2026-11-27 10:00 | abcd1234 |")
    assert lines[3].startswith("| 2 | 3 | 0 | 2 | 1 | 2026-11-27 10:00 | 2026-11-27 11:30 | abcd1234 |")
    assert "not yet" in lines[4]
    assert lines[-2:] == [
        "| 2 | 2 | `tests/a.py::test_b` | run 2, abcd1234: call: it raced again |",
        "| 1 | 2 | `tests/a.py::test_a` | run 2, abcd1234: call: late |",
    ]
    assert table(results[:1], 1).endswith("No test failed.")


def test_busy_loops_end_with_the_block_or_its_process() -> None:
    with busy_loops(2):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) >= 2
    text = (
        "import os, subprocess, sys\nfrom tests.repeat import BUSY\n"
        "loop = subprocess.Popen([sys.executable, '-S', '-c', BUSY, str(os.getpid())])\n"
        "print(loop.pid, flush=True)\nos._exit(0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, timeout=300, check=True)
    try:
        loop = os.pidfd_open(int(ran.stdout))
    except ProcessLookupError:
        return  # the process has ended already
    assert select.select([loop], [], [], 60)[0], "it outlived its parent"
    os.close(loop)


def test_a_run_of_no_tests_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repeat, "RESULTS", tmp_path)
    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    monkeypatch.setattr(repeat, "run_once", lambda *_: repeat.NOTHING_LEFT)
    monkeypatch.setattr(repeat.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        repeat.main(["3", "--loops", "0", "--fresh", "integration"])
    assert exit_.value.code == 2
    assert "no test is selected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "the run is not complete"


@pytest.mark.parametrize("arguments", [["0"], ["two"], ["1", "--loops", "-1"]])
def test_wrong_numbers_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        repeat.main(arguments)
    assert ended.value.code == 2
    assert "./dev test --repeat: error:" in capsys.readouterr().err
