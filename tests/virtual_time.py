"""An event loop whose virtual time passes only while nothing is to be done, so tests depend on no machine's speed."""

from __future__ import annotations

import asyncio
import selectors

IDLE_S = 0.005
"""Seconds of real time without anything to read, after which nothing is under way between this process's sockets."""


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns the events that are ready; if there are none, advances the virtual time by the timeout."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(IDLE_S)
        if not found:
            self.now_s += timeout
        return found


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop for ``asyncio.Runner(loop_factory=VirtualTime)``; its ``time`` is also the clock in tests."""

    def __init__(self) -> None:
        self._passed = _Selector()
        super().__init__(self._passed)

    def time(self) -> float:
        return self._passed.now_s
