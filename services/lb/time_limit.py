"""Time limits of whole requests, all with one timer of the event loop.

``asyncio.timeout`` sets a timer of the loop for each, and takes it back: 6 to 10 µs of a request.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import TracebackType

from services.lb.timer_wheel import TimerWheel

__all__ = ["TimeLimit", "TimeLimits"]

TICK_S = 0.05
"""A request may take so much longer than it may."""


class TimeLimits:
    """All on one event loop; the timer runs while there is a limit."""

    def __init__(self) -> None:
        self._wheel: TimerWheel[TimeLimit] = TimerWheel(TICK_S)
        self._timer: asyncio.TimerHandle | None = None

    def after(self, seconds: float) -> TimeLimit:
        """``with`` it a task does something for so long at most: then it is cancelled, and :class:`TimeoutError` is
        raised, as by ``asyncio.timeout``."""
        return TimeLimit(self, seconds)

    def set(self, limit: TimeLimit, seconds: float) -> int:
        """What this returns is for :meth:`take_back`."""
        loop = asyncio.get_running_loop()
        slot = self._wheel.add(limit, loop.time() + max(0.0, seconds))
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._turn)
        return slot

    def take_back(self, limit: TimeLimit, slot: int) -> None:
        self._wheel.remove(limit, slot)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        for limit in self._wheel.turn(loop.time()):
            limit.is_over()
        self._timer = loop.call_later(TICK_S, self._turn) if self._wheel else None


class TimeLimit:
    """One; see :meth:`TimeLimits.after`."""

    __slots__ = ("_cancelling", "_limits", "_over", "_seconds", "_slot", "_task")

    def __init__(self, limits: TimeLimits, seconds: float) -> None:
        self._limits = limits
        self._seconds = seconds
        self._slot = 0
        self._over = False

    def __enter__(self) -> TimeLimit:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._seconds < inf:
            self._slot = self._limits.set(self, self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            if self._slot:
                self._limits.take_back(self, self._slot)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def is_over(self) -> None:
        """The task is cancelled."""
        self._over = True
        self._task.cancel()
