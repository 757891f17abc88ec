"""The times for which requests wait for KV memory at an instance, which reports them to the conductor."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

COUNTED = 16
"""The number of recent newcomers whose waits count: half of them wait no longer than the reported time."""
FORGET_S = 60.0
"""The age beyond which an ended wait tells nothing of present ones."""
LEAST_S = 1e-3
"""The least time that is reported while a request waits: 0 means that none does."""


class _Wait:
    __slots__ = ("since_s", "until_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.until_s = math.inf


class RoomWaits:
    """The waits of requests that came for the first time; a request that gave way and waits again is not counted.

    Room need not be given out in order of arrival, so the longest present wait says little about a newcomer's. The
    waits of requests that got room tell only of the lucky ones. So a request that still waits is counted, too, as soon
    as its wait exceeds half of the counted ones, whatever becomes of it. Until then, its wait tells nothing."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Wait] = {}
        self._open: OrderedDict[int, _Wait] = OrderedDict()
        """The waiting requests that are not counted yet, in order of arrival."""
        self._counted: deque[_Wait] = deque(maxlen=COUNTED)
        self._turn_s = 0.0
        """The time when a request last got its room, or the first one began to wait."""

    def began(self, number: int, now_s: float) -> None:
        if not self._waiting:
            self._turn_s = now_s
        self._waiting[number] = self._open[number] = _Wait(now_s)
        self._count(now_s)

    def granted(self, number: int, now_s: float) -> None:
        """Notes that the request has its room. If the request began to wait here, its wait counts."""
        wait = self._end(number, now_s)
        # A request that found room at once while none waited tells nothing of those that come while some wait.
        if wait is not None and (self._waiting or now_s > wait.since_s):
            self._counted.append(wait)
        self._turn_s = now_s
        self._count(now_s)

    def left(self, number: int, now_s: float) -> None:
        self._end(number, now_s)

    def _end(self, number: int, now_s: float) -> _Wait | None:
        """Ends the request's wait. Returns the wait, or None if it has been counted."""
        wait = self._waiting.pop(number, None)
        if wait is not None:
            wait.until_s = now_s
        return self._open.pop(number, None)

    def _count(self, now_s: float) -> None:
        """Counts the open waits that exceed half of the counted ones."""
        if not self._open:
            return
        half_s = self._half_s(now_s)
        while self._open:
            number, wait = next(iter(self._open.items()))
            if now_s - wait.since_s <= half_s:
                break
            del self._open[number]
            self._counted.append(wait)

    def _half_s(self, now_s: float) -> float:
        # Copied at once, as other threads call this, too.
        waits = [each for each in list(self._counted) if now_s - each.until_s <= FORGET_S]
        if not waits:
            return 0.0
        return sorted([min(now_s, each.until_s) - each.since_s for each in waits])[len(waits) // 2]

    def wait_s(self, now_s: float) -> float:
        """Returns a newcomer's expected wait, judged by those before it; 0 while nobody waits. Otherwise it is at least
        the time since a request last got its room."""
        if not self._waiting:
            return 0.0
        return max(self._half_s(now_s), now_s - self._turn_s, LEAST_S)
