"""An order by rank in which ranks change: what policies with a number per key are made of."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic

from pinyon.eviction.policy import Key

STALE_MIN = 1024

Rank = tuple[Any, ...]
"""Numbers, the least goes first; no two keys have the same."""


class Ranked(Generic[Key]):
    """A heap, and entries in it that are not valid any more: at most as many as valid ones, and :data:`STALE_MIN`."""

    def __init__(self) -> None:
        self._entries: dict[Key, Rank] = {}
        """A rank and its key behind it: one tuple is compared faster than one within another."""
        self._heap: list[Rank] = []

    def put(self, key: Key, rank: Rank) -> None:
        """It is in, with this rank, whether it was before or not. O(log n)."""
        entry = self._entries[key] = (*rank, key)
        heap = self._heap
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._entries) + STALE_MIN:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def take(self, key: Key) -> bool:
        """It is out; whether it was in."""
        return self._entries.pop(key, None) is not None

    def first(self) -> tuple[Rank, Key] | None:
        """The one with the least rank."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            key = entry[-1]
            if entries.get(key) is entry:
                return entry[:-1], key
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Rank, Key] | None:
        """As :meth:`first`, and it is out."""
        found = self.first()
        if found is not None:
            heapq.heappop(self._heap)
            del self._entries[found[1]]
        return found

    def __iter__(self) -> Iterator[Key]:
        """In no order."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries
