"""The restart times of a process that ended: later each time, and not for ever."""

from __future__ import annotations

import signal

from pinyon.core.avoidance import Avoidance

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
QUICK_S = 30.0
"""The time after a start within which a death counts as quick."""
QUICK_DEATHS_MAX = 8


class Restarts:
    """The restart schedule of one process. Pure; times are in seconds by the caller's clock."""

    def __init__(self, started_s: float, quick_deaths_max: int = QUICK_DEATHS_MAX) -> None:
        """Takes ``quick_deaths_max``, the number of quick deaths in a row after which one more is the last."""
        self._started_s = started_s
        self._quick_max = quick_deaths_max
        self._quick = 0
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)

    def started(self, now_s: float) -> None:
        self._started_s = now_s

    def died(self, now_s: float, served: bool = True) -> float | None:
        """Returns the pause before the next start, doubled with each quick death in a row; None after too many.

        A process that never served died quickly, however long it took.
        """
        if not served or now_s - self._started_s < QUICK_S:
            self._quick += 1
        else:
            self._quick = 0
            self._pauses.succeeded("it")
        if self._quick > self._quick_max:
            return None
        self._pauses.failed("it", now_s)
        return self._pauses.left_s("it", now_s)


def how_it_ended(code: int | None) -> str:
    """Describes ``code`` as ``subprocess`` has it: the exit status, or minus the signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
