"""A child process that runs to its end within a time limit, with all processes that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TICK_S = 15.0


class TooLate(Exception):
    """The time limit was reached; the child and the processes it started were killed."""


def run_child(
    command: Sequence[str],
    output: Path,
    limit_s: float,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    tick: Callable[[float], None] = lambda seconds: None,
) -> int:
    """Returns the exit status. Raises :class:`TooLate` at the limit.

    The child's output is appended to ``output``; ``tick`` is called regularly with the seconds gone."""
    began_s = time.monotonic()
    with output.open("ab") as file:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=None if environment is None else {**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            gone_s = time.monotonic() - began_s
            if gone_s >= limit_s:
                raise TooLate(f"not done within {limit_s:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(TICK_S, limit_s - gone_s))
            tick(time.monotonic() - began_s)
    finally:
        # After success, too: a process that a client leaves behind must not slow down the next client.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
