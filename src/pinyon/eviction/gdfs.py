"""Greedy-Dual-Frequency-Size (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HPL-98-69R1), the plain form that "KVCache cache in the wild" §4.2 gives as what there was before.

Priority = clock + uses * cost / size as of the last use; the least goes first, and the clock becomes its priority, so
that what was used often, long ago, ages. Blocks of one pool have one size, and to have one again is taken to cost the
same for all.
"""

from __future__ import annotations

from pinyon.eviction.counted import Counted
from pinyon.eviction.policy import Key
from pinyon.eviction.ranked import Rank


class Gdfs(Counted[Key]):
    """Worth: priority above the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def _value(self, uses: int) -> float:
        return self._clock + uses

    def _evicted(self, rank: Rank) -> None:
        self._clock = max(self._clock, rank[0])  # what was pinned for long has an old rank

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0] - self._clock)
