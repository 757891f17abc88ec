"""``python -m launch up`` as a person uses it: endpoints to copy, Ctrl-C ends all, a kill leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch.process import ROOT

WAIT_S = 180.0
"""Time for five interpreters to import everything on a busy machine."""
SMALL = (
    "--prefill",
    "0",
    "--decode",
    "0",
    "--mixed",
    "1",
    "--http-port",
    "0",
    "--lb-port",
    "0",
    "--conductor-port",
    "0",
    "--metrics-base-port",
    "0",
)


@contextlib.contextmanager
def suite() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yields the command and its output until it was up, and always ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "up", *SMALL],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, read_until(process.stdout.fileno(), "Ctrl-C stops everything", WAIT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=WAIT_S)
        process.stdout.close()


def read_until(descriptor: int, word: str, timeout_s: float) -> str:
    text, deadline = "", time.monotonic() + timeout_s
    while word not in text:
        left = deadline - time.monotonic()
        assert left > 0, f"not in time:\n{text}"
        assert select.select([descriptor], [], [], left)[0], f"not in time:\n{text}"
        part = os.read(descriptor, 65536)
        assert part, f"it ended:\n{text}"
        text += part.decode()
    return text


def children(pid: int) -> list[int]:
    """Returns the process ids below ``pid``, from /proc."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            found += [int(entry), *children(int(entry))]
    return found


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Returns those of ``pids`` that are still there at the deadline."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if not gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # processes of others have no event to wait for
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_behind(number):
    with suite() as (process, text):
        started = children(process.pid)
        # conductor, store, worker, load balancer, Redis
        assert len(started) >= 5, text
        assert re.search(r"curl -N http://127\.0\.0\.1:\d+/v1/completions", text)
        assert re.search(r"grpcurl -plaintext 127\.0\.0\.1:\d+ list", text)
        process.send_signal(number)
        status = process.wait(timeout=WAIT_S)
        assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0)
        assert wait_gone(started, WAIT_S) == []


def test_a_wrong_option_is_a_clear_message():
    result = subprocess.run(
        [sys.executable, "-m", "launch", "up", *SMALL, "--mixed", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 2
    assert "or --mixed" in result.stdout + result.stderr


def test_a_dead_redis_is_a_clear_message():
    result = subprocess.run(
        [sys.executable, "-m", "launch", "up", *SMALL, "--redis-url", "redis://127.0.0.1:1/0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 1
    assert "no Redis answers at" in result.stdout + result.stderr
