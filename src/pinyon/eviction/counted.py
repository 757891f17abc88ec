"""What lfu and gdfs share: a value by uses since a key was stored, and the order of those that may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Ranked

__all__ = ["Counted"]


class Counted(Generic[Key]):
    """The least value goes first; of equal ones what is deeper in its prompt, then what was used longer ago. Nothing is
    remembered of what is not held. Worth: the value."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[int, tuple[float, int, int]]] = {}
        """Uses, and the rank: value at the last use, minus the offset, number of that use."""
        self._ranked: Ranked[Key] = Ranked()
        self._pinned: set[Key] = set()
        self._number = 0

    def _value(self, uses: int) -> float:
        """Of a key that is used for the so-manieth time now."""
        raise NotImplementedError

    def _went(self, value: float) -> None:
        """One of this value was evicted."""

    def stored(self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        self._number += 1
        value = self._value(1)
        for key, offset in zip(keys, offsets, strict=True):
            rank = (value, -offset, self._number)
            self._held[key] = (1, rank)
            self._ranked.put(key, rank)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._number += 1
        held, pinned = self._held, self._pinned
        for key, offset in zip(keys, offsets, strict=True):
            uses = held[key][0] + 1
            rank = (self._value(uses), -offset, self._number)
            held[key] = (uses, rank)
            if key not in pinned:
                self._ranked.put(key, rank)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._pinned.add(key)
            self._ranked.take(key)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._pinned.remove(key)
            self._ranked.put(key, self._held[key][1])

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            del self._held[key]
            self._pinned.discard(key)
            self._ranked.take(key)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (found := self._ranked.pop()) is not None:
            rank, key = found
            del self._held[key]
            self._went(rank[0])
            gone.append(key)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        found = self._ranked.first()
        return None if found is None else (float(found[0][0]), found[1])

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: object) -> bool:
        return key in self._ranked
