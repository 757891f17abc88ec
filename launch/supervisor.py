"""A supervisor that restarts processes that died or hang, after a longer pause each time, up to a limit."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from launch.process import Process
from pinyon.core.errors import PinyonError

LOOK_S = 0.2
"""The time between two looks at the processes."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
QUICK_S = 30.0
"""The time after a start within which a death counts as quick."""
QUICK_DEATHS_MAX = 8
"""The number of quick deaths in a row after which one more is the last."""
SHOWN_CHARS = 200


@dataclass(slots=True)
class Restarts:
    """The restart schedule of one process. Pure; times are in seconds by the caller's clock."""

    started_s: float
    quick_deaths: int = 0
    pause_s: float = 0.0

    def died(self, now_s: float, served: bool = True) -> float | None:
        """Returns the pause before the next start, doubled with each quick death in a row; None after too many.

        The death of a process that never served counts as quick, however long it took."""
        if not served or now_s - self.started_s < QUICK_S:
            self.quick_deaths += 1
        else:
            self.quick_deaths, self.pause_s = 0, 0.0
        if self.quick_deaths > QUICK_DEATHS_MAX:
            return None
        self.pause_s = min(MAX_PAUSE_S, 2 * self.pause_s or FIRST_PAUSE_S)
        return self.pause_s


@dataclass(slots=True)
class _WatchedProcess:
    process: Process
    restarts: Restarts
    due_s: float | None = None
    """The time of the restart of a dead process; None if no restart is planned."""
    ready_by_s: float | None = None
    """The time by which a started process must serve; None if it already does or is dead."""
    served: bool = True
    """True if the process has served since its last start."""


class Supervisor:
    """The supervisor of processes: call ``tick`` every ``LOOK_S``, from the thread that started them."""

    def __init__(self, processes: Iterable[Process], say: Callable[[str], None], started_s: float) -> None:
        """Takes the processes, which have served since ``started_s``; ``say`` receives a line about each event."""
        self._say = say
        self._watched = [_WatchedProcess(each, Restarts(started_s)) for each in processes]
        self.given_up: list[str] = []
        """The messages about processes that are not restarted any more."""

    def tick(self, now_s: float) -> None:
        """Looks at every process once; never waits until one serves."""
        for watched in list(self._watched):
            self._look(watched, watched.process, now_s)

    def _look(self, watched: _WatchedProcess, process: Process, now_s: float) -> None:
        if watched.due_s is not None:
            if now_s >= watched.due_s:
                watched.due_s = None
                watched.served = False
                watched.restarts.started_s = now_s
                try:
                    process.start_again()
                except OSError as error:
                    self._plan(watched, f"cannot be started: {error}", now_s)
                    return
                watched.ready_by_s = now_s + process.start_s
        elif not process.alive:
            watched.ready_by_s = None
            code = None if process.process is None else process.process.returncode
            lines = [line.strip() for line in process.log_end().splitlines() if line.strip()]
            last_words = f" ({lines[-1][:SHOWN_CHARS]})" if lines and code and code > 0 else ""
            self._plan(watched, _how_it_ended(code) + last_words, now_s)
        elif watched.ready_by_s is not None:
            self._await_ready(watched, process, watched.ready_by_s, now_s)
        elif process.hangs(now_s):
            self._say(f"{process} hangs: killed")
            process.kill()

    def _await_ready(self, watched: _WatchedProcess, process: Process, ready_by_s: float, now_s: float) -> None:
        try:
            ready = process.announced()
        except PinyonError:  # the process has ended, or is about to
            watched.ready_by_s = None
            return
        if ready:
            watched.ready_by_s = None
            watched.served = True
            self._say(f"{process.name} is back: {process.shown}")
        elif now_s >= ready_by_s:
            self._say(f"{process} was not ready within {process.start_s:g} s")
            process.kill()

    def _plan(self, watched: _WatchedProcess, how: str, now_s: float) -> None:
        process, restarts = watched.process, watched.restarts
        where = "" if process.log_path is None else f"; its log: {process.log_path}"
        pause_s = restarts.died(now_s, watched.served)
        if pause_s is None:
            self._watched.remove(watched)
            message = f"{process} {how}: given up after {restarts.quick_deaths} quick deaths in a row{where}"
            self.given_up.append(message)
            self._say(message)
            return
        watched.due_s = now_s + pause_s
        self._say(f"{process} {how}: started again in {pause_s:g} s{where}")


def _how_it_ended(code: int | None) -> str:
    """Describes ``code``, which is ``subprocess``'s: the exit status, or minus the signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
