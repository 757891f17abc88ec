"""Eviction policies that rank each key when it is stored or used: the baselines of ``workload_aware``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.interface import Key, Traits
from pinyon.eviction.ranked import Rank, Ranked


class RankedPolicy(Generic[Key]):
    """A base for policies that rank each key when it is stored or used, by :meth:`_rank`; the least rank goes first."""

    def __init__(self) -> None:
        self._held: dict[Key, Rank] = {}
        self._pinned: set[Key] = set()
        self._ranked: Ranked[Key] = Ranked()

    def _rank(self, key: Key, rank: Rank) -> None:
        """Sets the rank of a key."""
        self._held[key] = rank
        if key not in self._pinned:
            self._ranked.put(key, rank)

    def _gone(self, key: Key) -> None:
        """Notes that a key is no longer held."""

    def _evicted(self, rank: Rank) -> None:
        """Notes that a key of this rank was evicted."""

    def _worth(self, rank: Rank, now_s: float) -> float:
        """Returns the worth of a key for :meth:`peek`."""
        raise NotImplementedError

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
            self._gone(key)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (found := self._ranked.pop()) is not None:
            rank, key = found
            del self._held[key]
            self._gone(key)
            self._evicted(rank)
            gone.append(key)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        found = self._ranked.first()
        return None if found is None else (self._worth(found[0], now_s), found[1])

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: object) -> bool:
        return key in self._ranked


class Fifo(RankedPolicy[Key]):
    """``fifo``, which evicts the key that arrived first, however often it was used since.

    A key arrives when it is stored or, if it is pinned from then on, when it is unpinned. The worth of a key is minus
    its age."""

    def __init__(self) -> None:
        super().__init__()
        self._unused: set[Key] = set()
        """The held keys that were neither used nor unpinned since they were stored."""
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
        self._come(fresh, now_s)  # their ranks are set before they may be evicted
        super().unpinned(keys, now_s)

    def _gone(self, key: Key) -> None:
        self._unused.discard(key)

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[1] - now_s)


class Counted(RankedPolicy[Key]):
    """A base of lfu and gdfs: a key's value depends on its uses since it was stored, and is its worth.

    The least value is evicted first; ties go to the key deepest in its prompt, then to the one used longest ago. Keys
    that are no longer held are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[Key, int] = {}
        self._number = 0
        """The number of the last call. A rank is the value, minus the offset, and this number."""

    def _value(self, uses: int) -> float:
        """Returns the value of a key that is used for the ``uses``-th time now."""
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


class Lfu(Counted[Key]):
    """``lfu``, which evicts the least frequently used key; the worth of a key is its number of uses.

    Uses count from when a key was stored, storing included, and are forgotten when the key is evicted."""

    def _value(self, uses: int) -> float:
        return uses


class Gdfs(Counted[Key]):
    """``gdfs`` in its plain form: Greedy-Dual-Frequency-Size (Cherkasova, HPL-98-69R1).

    Source: "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy"; "KVCache cache in the
    wild" §4.2 gives it as prior art. Priority = clock + uses * cost / size as of the last use. The least is evicted
    first, and the clock becomes its priority, so that keys used often, but long ago, age. Blocks of one pool have one
    size, and recomputing is assumed to cost the same for all. The worth of a key is its priority less the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def _value(self, uses: int) -> float:
        return self._clock + uses

    def _evicted(self, rank: Rank) -> None:
        self._clock = max(self._clock, rank[0])  # keys that were pinned for long have old ranks

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0] - self._clock)
