"""A program that is run to its end, within a limit, with all that it started."""

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
    """The limit was over; it and what it started are killed."""


def run_child(
    command: Sequence[str],
    output: Path,
    limit_s: float,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    tick: Callable[[float], None] = lambda seconds: None,
) -> int:
    """The exit status. What it writes is appended to ``output``; ``tick`` is called now and then with the seconds gone.

    Raises :class:`TooLate`.
    """
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
        # Also after a good end: a client that leaves a process of its own behind must not slow down the next one.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
