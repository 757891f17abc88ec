"""The bugs that were planted to check the tests still fit the code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.planted_bugs import ROOT, Bug, Found, bugs, first_failure, table

BUGS = bugs()


def test_there_are_thirty_and_each_has_its_name() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_can_be_put_into_its_file(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True)
    shutil.copy2(ROOT / bug.file, copy)
    bug.put_into(tmp_path)
    compile(copy.read_text(), bug.file, "exec")
    assert copy.read_text() != (ROOT / bug.file).read_text()
    assert bug.file.startswith(bug.room)


def test_text_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, times in ("y", 0), ("x", 2):
        with pytest.raises(ValueError, match=f"{times} times"):
            Bug("one", "", "a.py", "", old, "z").put_into(tmp_path)


def test_the_first_failure_names_its_test(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "one"
    tests.mkdir(parents=True)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    (tests / "test_it.py").write_text("def test_good(): pass\n")
    assert first_failure(tmp_path, ["tests/one"]) == ""
    (tests / "test_it.py").write_text("def test_bad(): assert 0\n")
    assert first_failure(tmp_path, ["tests/one"]) == "tests/one/test_it.py::test_bad"
    with pytest.raises(RuntimeError):
        first_failure(tmp_path, ["tests/two"])


def test_the_table_has_the_score() -> None:
    bug = Bug("one", "src", "src/a.py", "", "x", "y")
    assert "nobody" in table([bug], {"one": Found("one", "", 1.0, "", "c")})
    assert table([bug], {"one": Found("one", "t", 1.0, "", "c")}).endswith(
        "1 of 1 bugs that were tried were found (1 planted)."
    )
    assert "not run" in table([bug], {})
