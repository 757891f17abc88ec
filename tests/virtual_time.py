"""An event loop whose time passes only while nothing is to be done: a second of it is over in a moment, and a slow
machine makes nothing of it longer."""

from __future__ import annotations

import asyncio
import selectors

IDLE_S = 0.005
"""Of real time without anything to read: then nothing is under way between sockets of this process."""


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """If nothing comes, the time is over."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(IDLE_S)
        if not found:
            self.now_s += timeout
        return found


class VirtualTime(asyncio.SelectorEventLoop):
    """``asyncio.Runner(loop_factory=VirtualTime)``; its ``time`` is also the clock for what is given one."""

    def __init__(self) -> None:
        self._passed = _Selector()
        super().__init__(self._passed)

    def time(self) -> float:
        return self._passed.now_s
