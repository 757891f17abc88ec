"""The time by which something must have happened on a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

__all__ = ["Deadline"]


class Deadline:
    """One timer, which is only ever brought forward: most deadlines are moved on before it fires."""

    __slots__ = ("_loop", "_missed", "_timer", "_timer_at", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, missed: Callable[[], None]) -> None:
        self._loop = loop
        self._missed = missed
        self.due = self._timer_at = inf
        """May be put off, or to infinity: there is none."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: float) -> None:
        """By the loop's clock; ``inf``: there is none. ``missed`` is called when it comes."""
        self.due = due
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._fire)

    def close(self) -> None:
        self.set(inf)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._missed = _nobody  # its owner's method: they would keep each other

    def _fire(self) -> None:
        self._timer, self._timer_at = None, inf
        if self._loop.time() >= self.due:
            self.due = inf
            self._missed()
        elif self.due != inf:
            self.set(self.due)


def _nobody() -> None:
    """Nobody is told."""
