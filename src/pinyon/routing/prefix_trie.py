"""The prefix trie: which targets prompts with a prefix were sent to (SkyWalker §3.2).

A *record* is one prompt sent to one target. Each node knows the targets of all records whose prompts pass through it.
A child's targets are among its parent's, so a look-up ends where no available target is left. When the trie is full,
the oldest records go.

Keys are chained (:mod:`pinyon.routing.routing_keys`): a key says all that came before it. So this trie is small and
quick. One table finds the node that begins with a key, whatever its parent. And two runs of keys that agree in one
place agree in all before it, so a binary search finds where they part."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from pinyon.routing.routing_keys import KEY_BYTES

CHUNKS_MAX = 1 << 20
"""Chunks in a trie: 8 MiB of keys."""
RECORDS_MAX = 1 << 16


class Match(NamedTuple):
    """The length in chunks of the longest prefix that available targets were sent, and the bits of these targets."""

    chunks: int
    targets: int


class _TrieNode:
    """A run of keys that the same records pass through."""

    __slots__ = ("counts", "keys", "parent", "targets")

    def __init__(self, keys: bytes, parent: _TrieNode | None, counts: dict[int, int], targets: int) -> None:
        self.keys = keys
        self.parent = parent
        self.counts = counts
        """Records that pass through or end here, by the place of their target's bit."""
        self.targets = targets
        """Bits of the targets in ``counts``."""


class PrefixTrie:
    """A trie bounded by its chunks and by its records. Targets are bits, so that sets of them are one number."""

    def __init__(self, chunks_max: int = CHUNKS_MAX, records_max: int = RECORDS_MAX) -> None:
        if chunks_max < 1 or records_max < 1:
            raise ValueError("a trie has room for something")
        self._chunks_max, self._records_max = chunks_max, records_max
        self._starts: dict[bytes, _TrieNode] = {}
        """Nodes by their first key."""
        self._records: OrderedDict[tuple[_TrieNode, int], None] = OrderedDict()
        """Records as (last node, place of the target's bit), the oldest first."""
        self._places: dict[str, int] = {}
        """Bit places of present targets."""
        self.bits: dict[str, int] = {}
        """Bits of present targets, for others to read only."""
        self._free: list[int] = []
        """Places below ``_width`` that no target has."""
        self._width = 0
        self._held: list[int] = []
        """Records by place."""
        self._sizes: list[int] = []
        """Chunks by place."""
        self._left: set[int] = set()
        """Places of removed targets that still have records.

        Such a place is free only once these have gone, so that what was sent before a restart never counts after it."""
        self.chunks = 0

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self._records)

    @property
    def nodes(self) -> int:
        return len(self._starts)

    # -- targets

    def add(self, target: str) -> None:
        """Adds a target that holds nothing; does nothing if it is there."""
        if target in self._places:
            return
        if self._free:
            place = self._free.pop()
        else:
            place = self._width
            self._width += 1
            self._held.append(0)
            self._sizes.append(0)
        self._places[target] = place
        self.bits[target] = 1 << place

    def remove(self, target: str) -> None:
        """Removes a target that has gone or lost its cache. Its records are found no more, and go when oldest."""
        place = self._places.pop(target, -1)
        if place < 0:
            return
        del self.bits[target]
        if self._held[place]:
            self._left.add(place)
        else:
            self._free.append(place)

    def bit(self, target: str) -> int:
        """Returns the target's bit; 0 if it is not there."""
        return self.bits.get(target, 0)

    def size(self, target: str) -> int:
        """Returns the chunks of what the target was sent."""
        place = self._places.get(target, -1)
        return 0 if place < 0 else self._sizes[place]

    # -- prompts

    def match(self, keys: bytes, available: int) -> Match:
        """Returns the longest prefix that was sent to any ``available`` target (bits), and to which of them."""
        starts = self._starts
        at, found = 0, 0
        end = len(keys)
        while at < end:
            node = starts.get(keys[at : at + KEY_BYTES])
            if node is None:
                break
            there = node.targets & available
            if not there:
                break
            found = there
            length = len(node.keys)
            if keys.startswith(node.keys, at):
                at += length
                continue
            at += _shared(node.keys, keys, at)
            break
        return Match(at // KEY_BYTES, found)

    def insert(self, keys: bytes, target: str) -> int:
        """Records a prompt; returns how many of its chunks the target was sent before. ``KeyError`` if it is absent."""
        place = self._places[target]
        if not keys:
            return 0
        keys = keys[: self._chunks_max * KEY_BYTES]
        last = self._last(keys)
        record = (last, place)
        if record in self._records:
            self._records.move_to_end(record)
            return len(keys) // KEY_BYTES
        found = 0
        self._records[record] = None
        self._held[place] += 1
        node: _TrieNode | None = last
        while node is not None:
            counts = node.counts
            known = counts.get(place, 0)
            counts[place] = known + 1
            if known:
                found += len(node.keys)
            else:
                node.targets |= 1 << place
                self._sizes[place] += len(node.keys) // KEY_BYTES
            node = node.parent
        while self.chunks > self._chunks_max or len(self._records) > self._records_max:
            self._forget()
        return found // KEY_BYTES

    def _last(self, keys: bytes) -> _TrieNode:
        """Returns the node at which this path ends, made if need be."""
        starts = self._starts
        at, end = 0, len(keys)
        parent: _TrieNode | None = None
        while at < end:
            node = starts.get(keys[at : at + KEY_BYTES])
            if node is None:
                node = _TrieNode(keys[at:], parent, {}, 0)
                starts[keys[at : at + KEY_BYTES]] = node
                self.chunks += (end - at) // KEY_BYTES
                return node
            length = len(node.keys)
            if keys.startswith(node.keys, at):
                at += length
                parent = node
                continue
            parent = self._split(node, _shared(node.keys, keys, at))
            at += len(parent.keys)
        assert parent is not None
        return parent

    def _split(self, node: _TrieNode, length: int) -> _TrieNode:
        """Splits the front off into a node of its own; the records that end in the node still do."""
        front = _TrieNode(node.keys[:length], node.parent, node.counts.copy(), node.targets)
        node.keys, node.parent = node.keys[length:], front
        self._starts[front.keys[:KEY_BYTES]] = front
        self._starts[node.keys[:KEY_BYTES]] = node
        return front

    def _forget(self) -> None:
        """Forgets the oldest record."""
        (last, place), _ = self._records.popitem(last=False)
        self._held[place] -= 1
        node: _TrieNode | None = last
        while node is not None:
            counts = node.counts
            left = counts[place] - 1
            if left:
                counts[place] = left
            else:
                del counts[place]
                node.targets &= ~(1 << place)
                size = len(node.keys) // KEY_BYTES
                self._sizes[place] -= size
                if not counts:
                    del self._starts[node.keys[:KEY_BYTES]]
                    self.chunks -= size
            node = node.parent
        if not self._held[place] and place in self._left:
            self._left.remove(place)
            self._free.append(place)


def _shared(mine: bytes, keys: bytes, at: int) -> int:
    """Returns how many bytes (whole keys) ``mine``, equal at first but not throughout, shares with ``keys[at:]``."""
    low, high = 1, min(len(mine), len(keys) - at) // KEY_BYTES  # the first ``low`` keys are equal
    while low < high:
        middle = (low + high + 1) // 2
        where = (middle - 1) * KEY_BYTES
        if mine[where : where + KEY_BYTES] == keys[at + where : at + where + KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * KEY_BYTES
