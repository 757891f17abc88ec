"""First in, first out: what came first goes first, however often it was read since."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from pinyon.eviction.policy import Traits, no_traits

__all__ = ["Fifo"]

Item = TypeVar("Item", bound=Hashable)

REMEMBERED_MIN = 65_536


class Fifo(Generic[Item]):
    """Order of first insertion decides; clock and traits do not matter.

    An item that is removed (it is read again) keeps its place for when it comes back. Nobody says whether it will, so
    at most as many absent items are remembered as there are present ones (and at least 65,536), the last removed ones.
    """

    def __init__(self) -> None:
        self._present: dict[Item, int] = {}  # to its place in the order of arrival
        self._absent: OrderedDict[Item, int] = OrderedDict()  # in the order of removal
        self._queue: list[tuple[int, Item]] = []  # a heap of the present ones, and of some that are not any more
        self._count = 0

    def insert(
        self, items: Iterable[Item], now_s: float = 0.0, traits_of: Callable[[Item], Traits] = no_traits
    ) -> None:
        for item in items:
            place = self._absent.pop(item, None)
            if place is None:
                place = self._count
                self._count += 1
            self._present[item] = place
            heapq.heappush(self._queue, (place, item))

    def touch(self, item: Item, now_s: float = 0.0) -> None:
        if item not in self._present:
            raise KeyError(item)

    def remove(self, items: Iterable[Item]) -> None:
        for item in items:
            self._absent[item] = self._present.pop(item)
        while len(self._absent) > max(len(self._present), REMEMBERED_MIN):
            self._absent.popitem(last=False)
        if len(self._queue) > 2 * len(self._present) + REMEMBERED_MIN:
            self._queue = [(place, item) for item, place in self._present.items()]
            heapq.heapify(self._queue)

    def victim(self, now_s: float = 0.0) -> Item | None:
        while self._queue:
            place, item = heapq.heappop(self._queue)
            if self._present.get(item) == place:
                del self._present[item]
                return item
        return None

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, item: object) -> bool:
        return item in self._present
