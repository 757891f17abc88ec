"""Eviction policies that give each key a rank where it is stored or used: what ``workload_aware`` is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Rank, Ranked


class RankedPolicy(Generic[Key]):
    """The part of a policy that gives each key a rank where it is stored or used, and keeps it until the next time: the
    least goes first. Policies say what the ranks are, by :meth:`_rank`."""

    def __init__(self) -> None:
        self._held: dict[Key, Rank] = {}
        self._pinned: set[Key] = set()
        self._ranked: Ranked[Key] = Ranked()

    def _rank(self, key: Key, rank: Rank) -> None:
        """It has this one from now on."""
        self._held[key] = rank
        if key not in self._pinned:
            self._ranked.put(key, rank)

    def _gone(self, key: Key) -> None:
        """It is not held any more."""

    def _evicted(self, rank: Rank) -> None:
        """One of this rank was chosen."""

    def _worth(self, rank: Rank, now_s: float) -> float:
        """For :meth:`peek`."""
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
    """``fifo``: what came first goes first, however often it was used since. It comes when it is stored, or, if it is
    pinned from then on, when that ends. Worth: how long ago, negative."""

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


class Counted(RankedPolicy[Key]):
    """What lfu and gdfs share: a value by uses since a key was stored. The least value goes first, of equal ones what
    is deeper in its prompt, then what was used longer ago. Nothing is remembered of what is not held. Worth: the
    value."""

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


class Lfu(Counted[Key]):
    """``lfu``: least frequently used goes first: uses since it was stored, storing counted; forgotten when it goes.
    Worth: uses."""

    def _value(self, uses: int) -> float:
        return uses


class Gdfs(Counted[Key]):
    """``gdfs``: Greedy-Dual-Frequency-Size (Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69R1), the plain form that "KVCache cache in the wild" §4.2 gives
    as what there was before.

    Priority = clock + uses * cost / size as of the last use; the least goes first, and the clock becomes its priority,
    so that what was used often, long ago, ages. Blocks of one pool have one size, and to have one again is taken to
    cost the same for all. Worth: priority above the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def _value(self, uses: int) -> float:
        return self._clock + uses

    def _evicted(self, rank: Rank) -> None:
        self._clock = max(self._clock, rank[0])  # what was pinned for long has an old rank

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0] - self._clock)
