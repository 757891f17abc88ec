"""A radix tree over block keys, as SGLang keeps one of what is cached (FEATHER §2.9).

An edge is a run of keys where nobody branches off. Keys are compared one after the other, as a radix tree over tokens
does it: that a block's key tells all that comes before it, which saves the chunked hash tree the comparing, is not made
use of. What this costs is part of what the policies over it are compared for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final, NamedTuple

from pinyon.core.block_keys import BlockKey

KEPT_SHARE: Final = 0.875
"""Of the limit, after it was passed: each time all leaves are looked at."""


class RadixNode:
    """The keys behind its parent's."""

    __slots__ = ("children", "keys", "parent", "used")

    def __init__(self, parent: RadixNode | None, keys: Sequence[BlockKey], used: int) -> None:
        self.parent = parent
        self.keys = keys
        self.children: dict[BlockKey, RadixNode] = {}
        """By their first key."""
        self.used = used
        """When it was last passed, counted in look-ups and insertions."""


class Match(NamedTuple):
    keys: int
    """Leading ones that are here."""
    node: RadixNode
    """Where the last of them is."""
    inside: int
    """Of the node's keys, those up to there."""


class RadixTree:
    """Keeps ``limit`` keys at most: leaves that nobody has passed for longest go first. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a tree holds at least one key, not {limit}")
        self._limit = limit
        self._keys = 0
        self._clock = 0
        self.root = RadixNode(None, (), 0)

    def __len__(self) -> int:
        """Keys."""
        return self._keys

    def nodes(self) -> list[RadixNode]:
        """All, each behind its parent. O(nodes)."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """The longest beginning that is here. O(keys)."""
        self._clock += 1
        node, known, inside = self.root, 0, 0
        while known < len(keys):
            child = node.children.get(keys[known])
            if child is None:
                break
            child.used = self._clock
            inside = _common(child.keys, keys, known)
            node, known = child, known + inside
            if inside < len(child.keys):
                break
        return Match(known, node, inside)

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """All of its beginnings are here from now on; of more than the limit, the first ones. O(keys)."""
        keys = keys[: self._limit]
        known, node, inside = self.match(keys)
        if inside < len(node.keys):
            node = self._split(node, inside)
        if known == len(keys):
            return
        self._clock += 1  # what was just split was passed before
        leaf = RadixNode(node, keys[known:], self._clock)
        node.children[keys[known]] = leaf
        self._keys += len(leaf.keys)
        if self._keys > self._limit:
            self._drop()

    def _split(self, lower: RadixNode, count: int) -> RadixNode:
        """A node above ``lower`` with its first ``count`` keys."""
        parent = lower.parent
        assert parent is not None
        upper = RadixNode(parent, lower.keys[:count], lower.used)
        parent.children[upper.keys[0]] = upper
        lower.keys = lower.keys[count:]
        lower.parent = upper
        upper.children[lower.keys[0]] = lower
        return upper

    def _drop(self) -> None:
        """The newest leaf stays: nobody was passed later."""
        nodes = self.nodes()
        leaves = [(node.used, place, node) for place, node in enumerate(nodes) if not node.children]
        heapq.heapify(leaves)
        place = len(nodes)
        while self._keys > KEPT_SHARE * self._limit and len(leaves) > 1:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[0]]
            self._keys -= len(node.keys)
            if not parent.children and parent is not self.root:
                place += 1
                heapq.heappush(leaves, (parent.used, place, parent))


def _common(ours: Sequence[BlockKey], theirs: Sequence[BlockKey], start: int) -> int:
    """Keys of ``ours`` that ``theirs`` has from ``start`` on."""
    count = min(len(ours), len(theirs) - start)
    place = 0
    while place < count and ours[place] == theirs[start + place]:
        place += 1
    return place
