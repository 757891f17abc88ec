"""SIEVE: the choice of the object to evict when room is needed. Pure.

Source: Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI '24,
Algorithm 1; Mooncake §3.2.3 names it for the eviction of endpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: K, older: _Node[K] | None) -> None:
        self.key = key
        self.newer: _Node[K] | None = None
        self.older = older
        self.visited = False


class Sieve(Generic[K]):
    """A FIFO queue with one visited bit per object and a hand that moves from the tail (oldest) to the head (newest).

    A hit sets the bit and moves nothing. The hand clears the bits it meets and evicts the first object without one.
    Survivors keep their place, so new objects are told from popular ones quickly.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._head: _Node[K] | None = None
        self._tail: _Node[K] | None = None
        self._hand: _Node[K] | None = None
        """The hand's position; ``None`` if the next eviction begins at the tail."""

    def insert(self, key: K) -> None:
        """Inserts a new object at the head, not visited. Raises ``ValueError`` if it is there already. O(1)."""
        if key in self._nodes:
            raise ValueError(f"{key!r} is in the queue already")
        node = self._nodes[key] = _Node(key, self._head)
        if self._head is None:
            self._tail = node
        else:
            self._head.newer = node
        self._head = node

    def touch(self, key: K) -> None:
        """Marks a hit. Raises ``KeyError`` if the object is not there. O(1)."""
        self._nodes[key].visited = True

    def remove(self, key: K) -> None:
        """Removes an object for a reason other than eviction. Raises ``KeyError`` if it is not there. O(1)."""
        self._unlink(self._nodes.pop(key))

    def evict(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        """Removes and returns the object to evict, or returns ``None``, with nothing changed, if none is evictable.

        Objects that are not ``evictable`` (because they are in use) are passed over and keep their bits. It takes at
        most two rounds: the first one clears the bits of all evictable objects.
        """
        node = self._hand
        any_evictable = False
        for step in range(2 * len(self._nodes)):
            if step == len(self._nodes) and not any_evictable:
                return None
            node = node or self._tail
            assert node is not None  # the queue is not empty
            if not evictable(node.key):
                pass
            elif node.visited:
                node.visited = False
                any_evictable = True
            else:
                self._hand = node
                del self._nodes[node.key]
                self._unlink(node)
                return node.key
            node = node.newer
        return None

    def _unlink(self, node: _Node[K]) -> None:
        if self._hand is node:
            self._hand = node.newer
        if node.newer is None:
            self._head = node.older
        else:
            node.newer.older = node.older
        if node.older is None:
            self._tail = node.newer
        else:
            node.older.newer = node.newer

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[K]:
        """Yields the keys from the head (newest) to the tail (oldest)."""
        node = self._head
        while node is not None:
            yield node.key
            node = node.older
