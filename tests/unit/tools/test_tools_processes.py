"""A process that a test leaves running fails that test, and no other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Owner

ROOT = Path(__file__).resolve().parents[3]
SLEEPS = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])'
WITH_HOOKS = """
from tests.process_hooks import *
from tests.processes import own_all
own_all()
"""


def outcomes(folder: Path, text: str) -> tuple[dict[str, str], str]:
    """Runs a file of tests with the hooks; returns the outcome of each phase that did not pass, and the output."""
    (folder / "conftest.py").write_text(WITH_HOOKS)
    (folder / "test_it.py").write_text("import asyncio, subprocess, sys\nimport pytest\n\n" + text)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    ran = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it\.py::(\w+)", ran.stdout, re.MULTILINE)
    worst: dict[str, str] = {}
    for outcome, name in found:
        if worst.get(name) in (None, "PASSED"):
            worst[name] = outcome
    return worst, ran.stdout


def test_a_forgotten_process_fails_the_test_that_started_it(tmp_path: Path) -> None:
    text = f"""
def test_forgets():
    {SLEEPS}

def test_kills_and_does_not_wait():
    {SLEEPS}.kill()

async def test_forgets_awaiting():
    await asyncio.create_subprocess_exec("sleep", "600")

def test_is_innocent():
    pass

def test_waits():
    with {SLEEPS} as process:
        process.kill()
"""
    worst, printed = outcomes(tmp_path, text)
    assert worst == {
        "test_forgets": "ERROR",
        "test_kills_and_does_not_wait": "ERROR",
        "test_forgets_awaiting": "ERROR",
        "test_is_innocent": "PASSED",
        "test_waits": "PASSED",
    }, printed
    for name in ("test_forgets", "test_kills_and_does_not_wait", "test_forgets_awaiting"):
        assert f"started during test_it.py::{name}" in printed
    for pid in re.findall(r"process (\d+) \(", printed):
        assert not Path(f"/proc/{pid}").exists()


def test_what_a_fixture_holds_ends_with_its_file(tmp_path: Path) -> None:
    text = f"""
@pytest.fixture(scope="module")
def held():
    process = {SLEEPS}
    yield process
    process.kill()
    process.wait()

@pytest.fixture(scope="module")
def forgotten():
    yield {SLEEPS}

def test_a(held): pass
def test_b(forgotten): pass
def test_c(held, forgotten): pass
"""
    worst, printed = outcomes(tmp_path, text)
    assert worst == {"test_a": "PASSED", "test_b": "PASSED", "test_c": "ERROR"}, printed
    assert "test_it.py has ended, and nobody waited for" in printed
    assert "started during test_it.py::test_b" in printed
    assert "started during test_it.py::test_a" not in printed


def test_a_failed_test_is_not_blamed_twice(tmp_path: Path) -> None:
    text = f"""
def test_fails():
    process = {SLEEPS}
    assert process is None

def test_is_innocent(): pass
"""
    worst, printed = outcomes(tmp_path, text)
    assert worst == {"test_fails": "FAILED", "test_is_innocent": "PASSED"}, printed
    assert "nobody waited" not in printed


@pytest.mark.parametrize("dead", [False, True])
def test_the_owner_reaps_what_it_finds(dead: bool) -> None:
    from tests.processes import UnownedPopen

    owner = Owner()
    process = UnownedPopen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    owner.add(process, "reads")
    assert process.stdin is not None
    if dead:
        os.kill(process.pid, signal.SIGKILL)
    assert owner.end_test("another test") == []
    assert process.returncode is None, "it is held here"
    (said,) = owner.end_unit()
    assert (process.returncode, said.startswith(f"process {process.pid} (reads)")) == (-signal.SIGKILL, True)
    process.stdin.close()
    assert owner.end_unit() == []
