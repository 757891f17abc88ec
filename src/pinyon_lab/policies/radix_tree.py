"""A radix tree over block keys, like SGLang's tree of cached prefixes (FEATHER §2.9).

An edge is a run of keys without branches. Keys are compared one after another, as in a radix tree over tokens. A
block's key identifies everything before it, which saves the chunked hash tree these comparisons, but this tree makes no
use of it. Its cost is part of what comparisons of the policies over it measure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pinyon.core.block_keys import BlockKey

KEPT_SHARE: Final = 0.875
"""The share of the limit that is kept when the limit is exceeded. Each time, all leaves are looked at."""


@dataclass(eq=False, slots=True)
class RadixNode:
    """The keys of an edge, which follow those of the parent."""

    parent: RadixNode | None
    keys: Sequence[BlockKey]
    used: int
    """The time of the last visit, counted in look-ups and insertions."""
    children: dict[BlockKey, RadixNode] = field(default_factory=dict)
    """The children by their first keys."""


class RadixMatch(NamedTuple):
    keys: int
    """The number of leading keys found in the tree."""
    node: RadixNode
    """The node that holds the last of these keys."""
    inside: int
    """The number of the node's keys up to that one."""


class RadixTree:
    """A tree of at most ``limit`` keys: the leaves visited least recently are dropped first. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a tree holds at least one key, not {limit}")
        self._limit = limit
        self._keys = 0
        self._clock = 0
        self.root = RadixNode(None, (), 0)

    def nodes(self) -> list[RadixNode]:
        """Returns all nodes, each after its parent. O(nodes)."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found

    def match(self, keys: Sequence[BlockKey]) -> RadixMatch:
        """Returns the longest prefix of ``keys`` that is in the tree. O(keys)."""
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
        return RadixMatch(known, node, inside)

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """Inserts a sequence of keys, but at most its first ``limit``. O(keys)."""
        keys = keys[: self._limit]
        known, node, inside = self.match(keys)
        if inside < len(node.keys):
            node = self._split(node, inside)
        if known == len(keys):
            return
        self._clock += 1  # a node that has just been split was visited before
        leaf = RadixNode(node, keys[known:], self._clock)
        node.children[keys[known]] = leaf
        self._keys += len(leaf.keys)
        if self._keys > self._limit:
            self._drop()

    def _split(self, lower: RadixNode, count: int) -> RadixNode:
        """Returns a new node above ``lower`` that has its first ``count`` keys."""
        parent = lower.parent
        assert parent is not None
        upper = RadixNode(parent, lower.keys[:count], lower.used)
        parent.children[upper.keys[0]] = upper
        lower.keys = lower.keys[count:]
        lower.parent = upper
        upper.children[lower.keys[0]] = lower
        return upper

    def _drop(self) -> None:
        """Drops the leaves visited least recently, but never the newest leaf, which was visited last."""
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
    """Returns how many leading keys of ``ours`` equal those of ``theirs`` from ``start`` on."""
    count = min(len(ours), len(theirs) - start)
    place = 0
    while place < count and ours[place] == theirs[start + place]:
        place += 1
    return place
