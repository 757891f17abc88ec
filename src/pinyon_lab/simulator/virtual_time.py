"""A virtual clock and its queue of events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count


class VirtualTime:
    """A virtual clock with an event queue. Events of the same time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Schedules ``action`` at ``when_s``, which is not before now."""
        heapq.heappush(self._heap, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float = math.inf) -> None:
        """Runs events until none is left, or until the next one is later than ``until_s``."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(heap)
            action()
