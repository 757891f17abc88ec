"""SIEVE (Zhang et al., NSDI '24): a queue, one bit per key, and a hand. See :class:`pinyon.core.sieve.Sieve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pinyon.core.sieve import Sieve
from pinyon.eviction.interface import Key, Traits


class _Queue(Sieve[Key]):
    """A SIEVE queue that can also show the next victim, and take back keys at the hand."""

    def insert_at_hand(self, key: Key) -> None:
        """Inserts a key just behind the hand, visited. Raises ``ValueError`` if it is there already. O(1)."""
        self.insert(key)
        self.touch(key)
        newest = self._ahead or self._passed
        del newest[key]
        self._passed[key] = None
        if not self._ahead:  # the hand is at the tail
            self._passed.move_to_end(key, last=False)

    def find(self) -> Key | None:
        """Returns the next victim, which stays, with the hand at it; None: the queue is empty. At most one round."""
        if not len(self):
            return None
        while self._visited[key := self._at_hand()]:
            self._visited[key] = False
            self._pass()
        return key


class SievePolicy(Generic[Key]):
    """An eviction policy by SIEVE; the worth of a key is the time since its last use, negated.

    A pinned key keeps its place. If the hand stopped at it meanwhile, it is put just behind the hand when it is
    unpinned.
    """

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
            if key in self._queue:
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
            key = self._queue.find()
            assert key is not None  # something evictable is in the queue
            if key not in self._pinned:
                return key
            self._queue.remove(key)
            self._parked.add(key)
        return None

    def __len__(self) -> int:
        return len(self._last_s) - len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._last_s and key not in self._pinned
