"""Time limits of whole requests, all with one timer of the event loop.

``asyncio.timeout`` sets a timer of the loop for each, and takes it back: 6 to 10 µs of a request.
"""

from __future__ import annotations

import asyncio
import time
from math import inf
from types import TracebackType

from pinyon.core.clock import Clock
from pinyon.frontdoor.timer_wheel import TimerWheel

__all__ = ["TimeLimit", "TimeLimits"]

TICK_S = 0.05
"""A request may take so much longer than it may."""


class TimeLimits:
    """All on one event loop; the timer runs while there is a limit. ``clock``: what deadlines go by."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._wheel: TimerWheel[TimeLimit] = TimerWheel(TICK_S)
        self._timer: asyncio.TimerHandle | None = None

    def until(self, deadline_s: float) -> TimeLimit:
        """``with`` it a task does something until then at most: then it is cancelled, and :class:`TimeoutError` is
        raised, as by ``asyncio.timeout``. ``inf``: there is no limit."""
        return TimeLimit(self, deadline_s)

    def set(self, limit: TimeLimit, deadline_s: float) -> int:
        """What this returns is for :meth:`take_back`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._turn)
        return self._wheel.add(limit, deadline_s)

    def take_back(self, limit: TimeLimit, slot: int) -> None:
        self._wheel.remove(limit, slot)

    def _turn(self) -> None:
        for limit in self._wheel.turn(self._clock()):
            limit.is_over()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._turn) if self._wheel else None


class TimeLimit:
    """One; see :meth:`TimeLimits.until`."""

    __slots__ = ("_cancelling", "_deadline_s", "_limits", "_over", "_slot", "_task")

    def __init__(self, limits: TimeLimits, deadline_s: float) -> None:
        self._limits = limits
        self._deadline_s = deadline_s
        self._slot: int | None = None
        self._over = False

    def __enter__(self) -> TimeLimit:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._deadline_s < inf:
            self._slot = self._limits.set(self, self._deadline_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            if self._slot is not None:
                self._limits.take_back(self, self._slot)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def is_over(self) -> None:
        """The task is cancelled."""
        self._over = True
        self._task.cancel()
