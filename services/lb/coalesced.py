"""Many calls that are worth one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Coalesced"]


class Coalesced:
    """Calls ``function`` so many seconds after the first of the calls since it was called last. To be called on an
    event loop."""

    def __init__(self, function: Callable[[], None], seconds: float) -> None:
        self._function = function
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _call(self) -> None:
        self._timer = None
        self._function()
