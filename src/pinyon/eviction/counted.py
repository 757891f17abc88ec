"""What lfu and gdfs share: a value by uses since a key was stored, and the order of those that may go."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Rank, RankedPolicy


class Counted(RankedPolicy[Key]):
    """The least value goes first; of equal ones what is deeper in its prompt, then what was used longer ago. Nothing is
    remembered of what is not held. Worth: the value."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[Key, int] = {}
        self._number = 0
        """Of the last call: a rank is the value then, minus the offset, and that."""

    def _value(self, uses: int) -> float:
        """Of a key that is used for the so-manieth time now."""
        raise NotImplementedError

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self.used(keys, now_s, traits, offsets)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._number += 1
        for key, offset in zip(keys, offsets, strict=True):
            uses = self._uses[key] = self._uses.get(key, 0) + 1
            self._rank(key, (self._value(uses), -offset, self._number))

    def _gone(self, key: Key) -> None:
        del self._uses[key]

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0])
