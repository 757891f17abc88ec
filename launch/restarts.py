"""When a process that ended is started again: later each time, and not for ever."""

from __future__ import annotations

import signal

from pinyon.core.avoidance import Avoidance

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
QUICK_S = 30.0
"""Who dies sooner after its start died quickly."""
QUICK_DEATHS_MAX = 8


class Restarts:
    """When one process is started again. Pure; the times are by the caller's clock, in seconds."""

    def __init__(self, started_s: float, quick_deaths_max: int = QUICK_DEATHS_MAX) -> None:
        """After so many quick deaths in a row one more is the last."""
        self._started_s = started_s
        self._quick_max = quick_deaths_max
        self._quick = 0
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=1)

    def started(self, now_s: float) -> None:
        self._started_s = now_s

    def died(self, now_s: float, served: bool = True) -> float | None:
        """The pause before its next start: it doubles with every quick death in a row. None: there were too many.

        Who had not come to serve died quickly, however long that took.
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
    """``code`` as of ``subprocess``: the exit status, or minus the signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
