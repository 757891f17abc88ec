"""Belady's optimum: what is used again latest goes first. For replays, where the future is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Ranked

__all__ = ["Belady"]


class Belady(Generic[Key]):
    """``next_use`` says when a key that is stored or used now will be used again (``inf``: never). Of what is used
    again at the same time what is deeper goes first. Worth: time to the next use, negative."""

    def __init__(self, next_use: Callable[[Key], float]) -> None:
        self._next_use = next_use
        self._held: dict[Key, tuple[float, int]] = {}
        self._pinned: set[Key] = set()
        self._ranked: Ranked[Key] = Ranked()

    def stored(self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        self.used(keys, now_s, traits, offsets)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            rank = self._held[key] = (-self._next_use(key), -offset)
            if key not in self._pinned:
                self._ranked.put(key, rank)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._pinned.add(key)
            self._ranked.take(key)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._pinned.remove(key)
            self._ranked.put(key, self._held[key])

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            del self._held[key]
            self._pinned.discard(key)
            self._ranked.take(key)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (found := self._ranked.pop()) is not None:
            del self._held[found[1]]
            gone.append(found[1])
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        found = self._ranked.first()
        return None if found is None else (found[0][0] + now_s, found[1])

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: object) -> bool:
        return key in self._ranked
