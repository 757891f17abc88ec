"""SIEVE: the choice of the object to evict when room is needed. Pure.

Source: Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI '24,
Algorithm 1; Mooncake §3.2.3 names it for the eviction of endpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Sieve(Generic[K]):
    """A FIFO queue with one visited bit per object and a hand that moves from the tail (oldest) to the head (newest).

    A hit sets the bit and moves nothing. The hand clears the bits it meets and evicts the first object without one.
    Survivors keep their place, so new objects are told from popular ones quickly.
    """

    def __init__(self) -> None:
        self._visited: dict[K, bool] = {}
        self._passed: OrderedDict[K, None] = OrderedDict()
        """The objects between the tail and the hand, the oldest first."""
        self._ahead: OrderedDict[K, None] = OrderedDict()
        """The objects from the hand to the head; none if the next eviction begins at the tail."""

    def insert(self, key: K) -> None:
        """Inserts a new object at the head, not visited. Raises ``ValueError`` if it is there already. O(1)."""
        if key in self._visited:
            raise ValueError(f"{key!r} is in the queue already")
        self._visited[key] = False
        newest = self._ahead or self._passed
        newest[key] = None

    def touch(self, key: K) -> None:
        """Marks a hit. Raises ``KeyError`` if the object is not there. O(1)."""
        if key not in self._visited:
            raise KeyError(key)
        self._visited[key] = True

    def remove(self, key: K) -> None:
        """Removes an object for a reason other than eviction. Raises ``KeyError`` if it is not there. O(1)."""
        del self._visited[key]
        part = self._passed if key in self._passed else self._ahead
        del part[key]

    def evict(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        """Removes and returns the object to evict, or returns ``None``, with nothing changed, if none is evictable.

        Objects that are not ``evictable`` (because they are in use) are passed over and keep their bits. It takes at
        most two rounds: the first one clears the bits of all evictable objects.
        """
        any_evictable = False
        for step in range(2 * len(self)):
            if step == len(self) and not any_evictable:
                break
            key = self._at_hand()
            if evictable(key):
                if not self._visited[key]:
                    self.remove(key)
                    return key
                self._visited[key] = False
                any_evictable = True
            self._pass()
        return None

    def _at_hand(self) -> K:
        """Returns the object at the hand of a queue that is not empty."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
        return next(iter(self._ahead))

    def _pass(self) -> None:
        """Moves the hand past the object at it."""
        self._passed[self._ahead.popitem(last=False)[0]] = None

    def __len__(self) -> int:
        return len(self._visited)

    def __contains__(self, key: object) -> bool:
        return key in self._visited

    def __iter__(self) -> Iterator[K]:
        """Yields the keys from the head (newest) to the tail (oldest)."""
        yield from reversed(self._ahead)
        yield from reversed(self._passed)
