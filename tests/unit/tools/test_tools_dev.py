"""``./dev`` and its ``.venv``, in a separate checkout that needs no packages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.process import ROOT

HERE: str = getattr(sys, "_base_executable", sys.executable)
OTHER = '#!/bin/sh\ncase "$*" in *%d.%d*) echo 3.99 ;; *) exec {real} "$@" ;; esac\n'
"""An interpreter that reports another version, and otherwise works like the real one."""
QUICK = """#!/bin/sh
[ "$1 $2 $3" = "-m venv --clear" ] || exec {real} "$@"
{real} -m venv --without-pip --clear "$4" && cp -r {pip} "$4"/lib/python*/site-packages
"""
"""An interpreter whose environments have a pip that installs nothing: unpacking pip takes four seconds of CPU time."""


RUNS = """import os, sys, time
print('ran', sys.prefix, flush=True)
time.sleep(float(os.environ.get('RUNS_S', '0')))
"""
"""The stand-in for the suite: it says that it runs, and ends at once or when it is told to."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the ``.venv`` of its first run: a new one takes five seconds of processor time."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "dev", folder)
    for name in ("runtime", "test", "lint"):
        (folder / "requirements").mkdir(exist_ok=True)
        (folder / "requirements" / f"{name}.lock").write_text("# nothing\n")
    (folder / "launch").mkdir()
    (folder / "launch" / "__init__.py").touch()
    (folder / "launch" / "__main__.py").write_text(RUNS)
    first = demo(folder, HERE)
    assert first.returncode == 0, first.stderr
    assert f"ran {folder / '.venv'}" in first.stdout
    return folder


def demo(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "./dev", "demo"],
        cwd=checkout,
        env={**os.environ, "PINYON_PYTHON": python},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_another_interpreter_builds_the_venv_anew(checkout, tmp_path):
    again = demo(checkout, HERE)
    assert again.returncode == 0, again.stderr
    assert "[1/3]" not in again.stderr, "nothing is to be done"

    python = checkout / ".venv" / "bin" / "python"
    real = python.resolve()
    python.unlink()
    python.write_text(OTHER.format(real=real))
    python.chmod(0o755)
    assert "[1/3]" not in demo(checkout, "").stderr, "no version is asked for"
    pip, quick = tmp_path / "pip", tmp_path / "python"
    pip.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (pip / name).touch()
    quick.write_text(QUICK.format(real=HERE, pip=pip))
    quick.chmod(0o755)
    rebuilt = demo(checkout, str(quick))
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert ".venv is built anew" in rebuilt.stderr
    assert python.is_symlink()


def test_a_wrong_interpreter_is_refused_even_beside_a_venv(checkout):
    refused = demo(checkout, "/bin/false")
    assert refused.returncode == 1
    assert "PINYON_PYTHON=/bin/false is not a Python >= 3.11" in refused.stderr
    assert demo(checkout, "").returncode == 0


def said(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns the answer of this checkout's ``./dev``, for questions before anything is set up."""
    return subprocess.run(["sh", "./dev", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_ctrl_c_is_told_in_the_last_line(checkout: Path) -> None:
    environment = {**os.environ, "PINYON_PYTHON": HERE, "RUNS_S": "300"}
    run = subprocess.Popen(
        ["sh", "./dev", "demo"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline().startswith("ran ")
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert re.fullmatch(r"STOPPED ./dev demo: interrupted after \d+ s \(exit code 130\)", said.splitlines()[-1])
    assert run.returncode == 130


@pytest.mark.parametrize(
    ("typed", "hint"), [("upp", " (did you mean 'up'?)"), ("benhc", " (did you mean 'bench'?)"), ("xyzzy", "")]
)
def test_unknown_command_is_answered_with_the_near_one(typed, hint):
    answered = said(typed)
    assert answered.returncode == 2
    assert answered.stderr.splitlines()[-1] == f"unknown command: {typed}{hint}"


def test_unknown_suite_is_answered_with_the_near_one():
    answered = said("test", "integraton")
    assert answered.returncode == 1
    assert "there is no suite tests/integraton (did you mean 'integration'?); there are: chaos" in answered.stderr


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (("vllm", "--version", "0.1"), "--version 0.1: the connector was tried with vLLM 0."),
        (("--version=x", "vllm"), "--version x: the connector was tried with vLLM 0."),
        (("vllm", "-x", "--version"), "--version takes a version, as in: ./dev test vllm --version 0."),
        (("vllm", "nosuite", "--version", "0.24"), "there is no suite tests/nosuite"),  # the version is a good one
    ],
)
def test_an_unknown_version_of_vllm_is_refused_in_a_line(arguments, first):
    answered = said("test", *arguments)
    assert answered.returncode == 1
    line, verdict = answered.stderr.splitlines()
    assert line.startswith(first)
    assert verdict.startswith("FAILED ./dev test: exit code 1")


def test_every_command_is_in_the_help():
    branches = re.findall(r"^([a-z]+)\)", (ROOT / "dev").read_text().partition("\ncase $command in")[2], re.MULTILINE)
    shown = re.findall(r"^  ([a-z]+) {2,}\S|^  ([a-z]+) \[", said("help").stdout, re.MULTILINE)
    assert {one or other for one, other in shown} - {"help"} == {*branches}
