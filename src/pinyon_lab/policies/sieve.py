"""SIEVE: a queue, one bit per key, and a hand.

Source: Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI '24,
Algorithm 1."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.interface import Key, Traits


class _Queue(Generic[Key]):
    """A FIFO queue with one visited bit per key and a hand that moves from the tail (oldest) to the head (newest).

    A hit sets the bit and moves nothing. The hand clears the bits that it meets and stops at the first key without a
    set bit. Surviving keys keep their places, so new keys are soon told from popular ones."""

    def __init__(self) -> None:
        self._visited: dict[Key, bool] = {}
        self._passed: OrderedDict[Key, None] = OrderedDict()
        """The keys between the tail and the hand, the oldest first."""
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        """The keys from the hand to the head; empty if the next search begins at the tail."""

    def insert(self, key: Key) -> None:
        """Inserts a new key at the head, not visited."""
        self._visited[key] = False
        (self._ahead or self._passed)[key] = None

    def insert_at_hand(self, key: Key) -> None:
        """Inserts a new key just behind the hand, visited."""
        self._visited[key] = True
        self._passed[key] = None
        if not self._ahead:  # the hand is at the tail
            self._passed.move_to_end(key, last=False)

    def touch(self, key: Key) -> None:
        """Marks a hit, if the key is there."""
        if key in self._visited:
            self._visited[key] = True

    def remove(self, key: Key) -> None:
        del self._visited[key]
        del (self._passed if key in self._passed else self._ahead)[key]

    def find(self) -> Key:
        """Returns the next victim of a queue that is not empty, with the hand at it, after at most one round."""
        while True:
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            key = next(iter(self._ahead))
            if not self._visited[key]:
                return key
            self._visited[key] = False
            self._passed[self._ahead.popitem(last=False)[0]] = None


class SievePolicy(Generic[Key]):
    """An eviction policy by SIEVE; the worth of a key is minus the time since its last use.

    A pinned key keeps its place. If the hand stopped at the key meanwhile, unpinning puts the key just behind the
    hand."""

    def __init__(self) -> None:
        self._queue: _Queue[Key] = _Queue()
        self._last_s: dict[Key, float] = {}
        """The time of the last use of each held key."""
        self._pinned: set[Key] = set()
        self._parked: set[Key] = set()
        """The pinned keys at which the hand has stopped; they are out of the queue."""

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        for key in reversed(keys):
            self._queue.insert(key)
            self._last_s[key] = now_s

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        for key in keys:
            self._last_s[key] = now_s
            self._queue.touch(key)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._pinned.update(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._pinned.remove(key)
            if key in self._parked:
                self._parked.remove(key)
                self._queue.insert_at_hand(key)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            del self._last_s[key]
            self._pinned.discard(key)
            if key in self._parked:
                self._parked.remove(key)
            else:
                self._queue.remove(key)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (key := self._find()) is not None:
            self._queue.remove(key)
            del self._last_s[key]
            gone.append(key)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        key = self._find()
        return None if key is None else (self._last_s[key] - now_s, key)

    def _find(self) -> Key | None:
        """Returns the key at which the hand stops."""
        while len(self) > 0:
            key = self._queue.find()  # the queue has an evictable key
            if key not in self._pinned:
                return key
            self._queue.remove(key)
            self._parked.add(key)
        return None

    def __len__(self) -> int:
        return len(self._last_s) - len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._last_s and key not in self._pinned
