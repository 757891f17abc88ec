"""Many calls that are worth one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHARE_MAX = 0.25
"""Of the loop's time that the function may take: where it takes long, it is called less often."""
PAUSE_MAX_S = 0.25


class Coalesced:
    """Calls ``function`` so many seconds after the first of the calls since it was called last, or later. To be called
    on an event loop."""

    def __init__(
        self, function: Callable[[], None], seconds: float, wanted: Callable[[], object] = lambda: True
    ) -> None:
        """A call while it is not ``wanted`` waits until it is :meth:`wanted_now`."""
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
        """What was called for while nobody wanted it is worth something again."""
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
