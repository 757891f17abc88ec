"""First in, first out: what came first goes first, however often it was used since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Ranked

__all__ = ["Fifo"]


class Fifo(Generic[Key]):
    """It comes when it is stored, or, if it is pinned from then on, when that ends. Worth: how long ago, negative."""

    def __init__(self) -> None:
        self._places: dict[Key, tuple[int, float]] = {}
        """Of all that is held: number in the order of arrival, and when."""
        self._unused: set[Key] = set()
        """Held, and not used or unpinned since it was stored."""
        self._ranked: Ranked[Key] = Ranked()
        self._number = 0

    def stored(self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        self._unused.update(keys)
        self._place(keys, now_s)

    def _place(self, keys: Sequence[Key], now_s: float) -> None:
        for key in reversed(keys):
            self._number += 1
            place = self._places[key] = (self._number, now_s)
            self._ranked.put(key, place)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._unused.difference_update(keys)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._ranked.take(key)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        fresh = [key for key in keys if key in self._unused]
        self._unused.difference_update(fresh)
        self._place(fresh, now_s)
        for key in keys:
            self._ranked.put(key, self._places[key])

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            del self._places[key]
            self._unused.discard(key)
            self._ranked.take(key)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (found := self._ranked.pop()) is not None:
            del self._places[found[1]]
            self._unused.discard(found[1])
            gone.append(found[1])
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        found = self._ranked.first()
        return None if found is None else (found[0][1] - now_s, found[1])

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: object) -> bool:
        return key in self._ranked
