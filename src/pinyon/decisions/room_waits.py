"""The times that requests wait for KV memory at an instance, which reports them to the conductor."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

COUNTED = 16
"""The number of recent newcomers whose waits count: half of them wait no longer than is reported."""
FORGET_S = 60.0
"""Waits that ended so long ago tell nothing of those that wait now."""
LEAST_S = 1e-3
"""The least that is reported while somebody waits: 0 says that nobody does."""


class _Wait:
    __slots__ = ("since_s", "until_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.until_s = math.inf


class RoomWaits:
    """The waits of requests that came for the first time; a request that gave way and waits again is not counted.

    Room need not be given out in order of arrival, so the longest present wait says little about a newcomer's. The
    waits of requests that have got room tell of the lucky ones alone. So a waiting request is counted, too, as soon as
    it waits longer than half of those do, whatever becomes of it. Until then it tells nothing."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Wait] = {}
        self._open: OrderedDict[int, _Wait] = OrderedDict()
        """The waiting requests that are not counted yet, as they came."""
        self._counted: deque[_Wait] = deque(maxlen=COUNTED)
        self._turn_s = 0.0
        """The time when a request last got its room, or the first one began to wait."""

    def began(self, number: int, now_s: float) -> None:
        if not self._waiting:
            self._turn_s = now_s
        self._waiting[number] = self._open[number] = _Wait(now_s)
        self._count(now_s)

    def granted(self, number: int, now_s: float) -> None:
        """Notes that the request has its room. If it began to wait here, its wait counts."""
        wait = self._end(number, now_s)
        # A request that found room at once when nobody waited tells nothing of those that come while somebody does.
        if wait is not None and (self._waiting or now_s > wait.since_s):
            self._counted.append(wait)
        self._turn_s = now_s
        self._count(now_s)

    def left(self, number: int, now_s: float) -> None:
        self._end(number, now_s)

    def _end(self, number: int, now_s: float) -> _Wait | None:
        """Ends the request's wait. Returns it, or None if it is counted already."""
        wait = self._waiting.pop(number, None)
        if wait is not None:
            wait.until_s = now_s
        return self._open.pop(number, None)

    def _count(self, now_s: float) -> None:
        """Counts the waits that are longer than half of the others."""
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
        # Copied in one go: other threads ask, too.
        waits = [each for each in list(self._counted) if now_s - each.until_s <= FORGET_S]
        if not waits:
            return 0.0
        return sorted([min(now_s, each.until_s) - each.since_s for each in waits])[len(waits) // 2]

    def wait_s(self, now_s: float) -> float:
        """Returns how long a newcomer waits, as far as those before it tell; at least the time since a request last got
        its room, and 0 while nobody waits."""
        if not self._waiting:
            return 0.0
        return max(self._half_s(now_s), now_s - self._turn_s, LEAST_S)
