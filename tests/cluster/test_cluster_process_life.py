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
from collections.abc import Iterator, Sequence

import psutil
import pytest

from launch.process import ROOT
from tests.waiting import wait_until

WAIT_S = 180.0
"""Time for five interpreters to import everything on a busy machine."""
ANY_PORTS = ("--http-port", "0", "--lb-port", "0", "--conductor-port", "0", "--metrics-base-port", "0")
SMALL = ("--prefill", "0", "--decode", "0", "--mixed", "1", *ANY_PORTS)


@contextlib.contextmanager
def suite(
    options: Sequence[str] = SMALL, until: str = "Ctrl-C stops everything"
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yields the command and its output up to a text, by default until it is up, and always ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "up", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, read_until(process.stdout.fileno(), until, WAIT_S)
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
    """Returns the process ids below ``pid``."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(gone, pids)), "all processes have ended", WAIT_S)


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
        wait_gone(started)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [(("--mixed", "0"), 2, "or --mixed"), (("--redis-url", "redis://127.0.0.1:1/0"), 1, "no Redis answers at")],
    ids=["a wrong option", "a dead Redis"],
)
def test_what_cannot_start_says_so(options, status, said):
    result = subprocess.run(
        [sys.executable, "-m", "launch", "up", *SMALL, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == status
    assert said in result.stdout + result.stderr
