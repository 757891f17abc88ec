"""First in, first out: what came first goes first, however often it was used since."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Rank, RankedPolicy


class Fifo(RankedPolicy[Key]):
    """It comes when it is stored, or, if it is pinned from then on, when that ends. Worth: how long ago, negative."""

    def __init__(self) -> None:
        super().__init__()
        self._unused: set[Key] = set()
        """Held, and not used or unpinned since it was stored."""
        self._number = 0

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self._unused.update(keys)
        self._come(keys, now_s)

    def _come(self, keys: Sequence[Key], now_s: float) -> None:
        for key in reversed(keys):
            self._number += 1
            self._rank(key, (self._number, now_s))

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._unused.difference_update(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        fresh = [key for key in keys if key in self._unused]
        self._unused.difference_update(fresh)
        self._come(fresh, now_s)  # before they may go: their ranks are new then
        super().unpinned(keys, now_s)

    def _gone(self, key: Key) -> None:
        self._unused.discard(key)

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[1] - now_s)
