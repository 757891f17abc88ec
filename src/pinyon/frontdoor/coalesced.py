"""A function whose frequent calls are combined into few."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHARE_MAX = 0.25
"""The share of the event loop's time that the function may take; a slow function is called less often."""
PAUSE_MAX_S = 0.25


class Coalesced:
    """A wrapper whose calls run ``function`` once, ``seconds`` after the first call since its last run, or later. It
    must be called on an event loop."""

    def __init__(
        self, function: Callable[[], None], seconds: float, wanted: Callable[[], object] = lambda: True
    ) -> None:
        """Takes ``wanted``, which says whether a call matters now; if not, the call waits for :meth:`wanted_now`."""
        self._function = function
        self._wanted = wanted
        self._seconds = self._pause_s = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._missed = False

    def __call__(self) -> None:
        if self._timer is None:
            if self._wanted():
                self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._call)
            else:
                self._missed = True

    def wanted_now(self) -> None:
        """Schedules the function if calls came while they were not wanted."""
        if self._missed:
            self()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _call(self) -> None:
        self._timer = None
        self._missed = False
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self._function()
        finally:
            self._pause_s = max(self._seconds, min(PAUSE_MAX_S, (loop.time() - began_s) / SHARE_MAX))
