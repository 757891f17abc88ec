"""The owner of every process that a test starts.

A process that is started and never waited for is a leak. If the garbage collector found it, its ``ResourceWarning``
would fail whichever test runs then. Here each process is held until it has been waited for:

- When a test ends and only this owner still holds the process, that test fails, by its own name.
- When the last test of a file ends (of a unit, as :mod:`tests.side_by_side` hands them out), every process that was
  started for the file must have ended too. A process left then was forgotten by a fixture of the file; the message
  names the test that was running when the process was started.

A leaked process is killed and reaped in either case. :mod:`tests.process_hooks` asks the owner at these two times."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

REAP_S = 60.0
SHOWN_CHARS = 300
HELD_BY_OWNER = 3
"""References to a process that only the owner holds, as ``sys.getrefcount`` counts them in ``_forgotten``: the record's
attribute, the local name and the argument of the call itself."""

UnownedPopen = subprocess.Popen
"""The original class, for processes that last as long as the test run, such as the fork server."""


class Process(Protocol):
    """The members of ``subprocess.Popen`` and ``tests.forks.ForkedChild`` that the owner needs."""

    pid: int
    returncode: int | None

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    process: Process
    what: str
    test: str
    """The test that ran when the process was started, its fixtures included."""
    of_loop: bool = False
    """True for a process of asyncio, which holds it until its end. It must end with its test, like the event loop."""

    def __str__(self) -> str:
        return f"process {self.process.pid} ({self.what[:SHOWN_CHARS]}), started during {self.test}"


class Owner:
    """The owner, which holds each process until it has been waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # fixtures start and restart processes in threads
        self._started: list[Started] = []
        self.failed: set[str] = set()
        """Tests that failed. Their tracebacks hold their processes, and a second failure would add nothing."""

    def add(self, process: Process, what: str, *, of_loop: bool = False) -> None:
        started = Started(process, what, current_test(), of_loop)
        with self._lock:
            self._started.append(started)

    def end_test(self, test: str) -> list[str]:
        """Ends the processes that ``test`` started and forgot; returns their descriptions."""
        with self._lock:
            self._started = [each for each in self._started if each.process.returncode is None]
            lost = [each for each in self._started if each.test == test and (each.of_loop or _forgotten(each))]
            self._started = [each for each in self._started if each not in lost]
        return self._reap(lost)

    def end_unit(self) -> list[str]:
        """Ends the processes that were not waited for; returns their descriptions, without those of failed tests."""
        with self._lock:
            lost = [each for each in self._started if each.process.returncode is None]
            self._started = []
        return self._reap(lost)

    def _reap(self, lost: list[Started]) -> list[str]:
        for each in lost:
            each.process.kill()
        for each in lost:
            each.process.wait(timeout=REAP_S)
        if any(each.of_loop for each in lost):
            _clear_away_transports()
        return [str(each) for each in lost if each.test not in self.failed]


def _forgotten(started: Started) -> bool:
    process = started.process
    return sys.getrefcount(process) <= HELD_BY_OWNER


def _clear_away_transports() -> None:
    """Drops asyncio's transports of forgotten processes, whose finalizers would otherwise fail a later test.

    asyncio's thread that awaits a process holds its transport until it has seen the end."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio-waitpid-"):
            thread.join(REAP_S)
    complain = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = complain


def current_test() -> str:
    """Returns the running test's identifier, without its phase."""
    return os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" (")[0] or "no test"


OWNER = Owner()


class OwnedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A ``subprocess.Popen`` that reports to the owner. asyncio starts its subprocesses by it as well."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        super().__init__(args, *rest, **options)
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        what = args if isinstance(args, str) else " ".join(map(str, args))
        OWNER.add(self, what, of_loop=caller.startswith("asyncio."))


def own_all() -> None:
    """Makes every later process of this interpreter one that the owner watches."""
    subprocess.Popen = OwnedPopen  # type: ignore[misc]
