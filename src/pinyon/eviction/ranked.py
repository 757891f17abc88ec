"""A set of keys ordered by ranks that may change, for policies with a number per key."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic

from pinyon.eviction.interface import Key

STALE_MIN = 1024

Rank = tuple[Any, ...]
"""Numbers that order a key: the least rank goes first, and no two keys have the same rank."""


class Ranked(Generic[Key]):
    """A heap with at most as many outdated entries as there are valid ones, plus :data:`STALE_MIN`."""

    def __init__(self) -> None:
        self._entries: dict[Key, Rank] = {}
        """Each key's tuple: its rank, then the key. A flat tuple is compared faster than a nested one."""
        self._heap: list[Rank] = []

    def put(self, key: Key, rank: Rank) -> None:
        """Adds a key or changes its rank, in O(log n)."""
        entry = self._entries[key] = (*rank, key)
        heap = self._heap
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._entries) + STALE_MIN:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def take(self, key: Key) -> bool:
        """Removes a key, and returns whether it was present."""
        return self._entries.pop(key, None) is not None

    def rank(self, key: Key) -> Rank | None:
        """Returns a key's rank; None if it is not present."""
        entry = self._entries.get(key)
        return None if entry is None else entry[:-1]

    def first(self) -> tuple[Rank, Key] | None:
        """Returns the least rank and its key."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            key = entry[-1]
            if entries.get(key) is entry:
                return entry[:-1], key
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Rank, Key] | None:
        """Removes and returns the least rank and its key."""
        found = self.first()
        if found is not None:
            heapq.heappop(self._heap)
            del self._entries[found[1]]
        return found

    def __iter__(self) -> Iterator[Key]:
        """Returns an iterator over the keys, in no particular order."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries
