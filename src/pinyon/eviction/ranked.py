"""An order by rank in which ranks change: what policies with a number per key are made of."""

from __future__ import annotations

import heapq
from typing import Any, Generic

from pinyon.eviction.policy import Key

__all__ = ["Ranked"]

STALE_MIN = 1024

Rank = tuple[Any, ...]
"""Numbers, the least goes first; no two keys have the same."""


class Ranked(Generic[Key]):
    """A heap, and entries in it that are not valid any more: at most as many as valid ones, and :data:`STALE_MIN`."""

    def __init__(self) -> None:
        self._ranks: dict[Key, Rank] = {}
        self._heap: list[tuple[Rank, Key]] = []

    def put(self, key: Key, rank: Rank) -> None:
        """It is in, with this rank, whether it was before or not. O(log n)."""
        self._ranks[key] = rank
        heap = self._heap
        heapq.heappush(heap, (rank, key))
        if len(heap) > 2 * len(self._ranks) + STALE_MIN:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def take(self, key: Key) -> Rank | None:
        """Its rank, and it is out; None if it was not in."""
        return self._ranks.pop(key, None)

    def first(self) -> tuple[Rank, Key] | None:
        """The one with the least rank."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, key = heap[0]
            if ranks.get(key) is rank:
                return rank, key
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Rank, Key] | None:
        """As :meth:`first`, and it is out."""
        found = self.first()
        if found is not None:
            heapq.heappop(self._heap)
            del self._ranks[found[1]]
        return found

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks
