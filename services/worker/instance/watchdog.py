"""The watchdog for engine steps that do not end. It has its own thread: the engine's hangs, and the event loop may."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Callable

from pinyon.runtime.logging import get_logger

LOOKS = 10
"""The number of looks within the limit: a hang is noticed at most one such part of the limit too late."""
LONGEST_PAUSE_S = 1.0

_log = get_logger("watchdog")


class Watchdog:
    """A thread that calls ``hangs(step)`` when ``step()`` has been the same for ``limit_s`` seconds, once a step.

    ``step`` returns the number of the present computation, or None. Time is counted in looks: while the whole process
    was frozen there were none, so that time does not count."""

    def __init__(self, step: Callable[[], int | None], limit_s: float, hangs: Callable[[int], None]) -> None:
        self._step = step
        self._hangs = hangs
        self._pause_s = min(LONGEST_PAUSE_S, limit_s / LOOKS)
        self._looks = max(1, round(limit_s / self._pause_s))
        self._seen: int | None = None
        self._count = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pinyon-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the looks. Blocks no longer than a look takes."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._pause_s):
            self.look()

    def look(self) -> None:
        """Takes one look, once per pause."""
        step = self._step()
        if step is None or step != self._seen:
            self._seen, self._count = step, 0
            return
        self._count += 1
        if self._count == self._looks:
            _log.error("an engine step does not end", extra={"stacks": stacks()})
            self._hangs(step)


def stacks() -> str:
    """Returns the stack of every thread."""
    with tempfile.TemporaryFile() as file:  # faulthandler writes to a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
