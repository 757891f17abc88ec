"""SkyWalker's own policy: the available target that was sent the longest prefix (§3.2, Listing 1 line 21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pinyon.core.policies import check_bounds
from pinyon.routing.prefix_trie import CHUNKS_MAX, RECORDS_MAX, Match, PrefixTrie
from pinyon.routing.target import Routed, Target, near_least_full


@dataclass(frozen=True, slots=True)
class PrefixTreeSettings:
    """Bounds of the trie. If less than ``explore_below`` of a prompt matches, the least full target gets it (§5.1)."""

    explore_below: float = 0.5
    chunks_max: int = CHUNKS_MAX
    records_max: int = RECORDS_MAX

    def __post_init__(self) -> None:
        check_bounds(self, explore_below=(0, 1), chunks_max=(1, 1 << 26), records_max=(1, 1 << 24))


class LongestPrefix:
    """The target with the longest prefix; among several, the least full; among about equally full ones, the nearest.

    A full target wins if it holds at least ``explore_below`` of the prompt and no target with room does."""

    name: ClassVar[str] = "skywalker"

    def __init__(self, settings: PrefixTreeSettings | None = None) -> None:
        self._settings = settings or PrefixTreeSettings()
        self.trie = PrefixTrie(self._settings.chunks_max, self._settings.records_max)
        self.hit_chunks = 0
        """The number of chunks of sent prompts that their targets had been sent before."""
        self.asked_chunks = 0
        """The number of all chunks of these prompts."""

    def add(self, name: str) -> None:
        self.trie.add(name)

    def remove(self, name: str) -> None:
        self.trie.remove(name)

    def match(self, request: Routed, available: Sequence[Target]) -> Match:
        """Returns the longest prefix that one of the targets was sent."""
        bits, bit = 0, self.trie.bits.get
        for target in available:
            bits |= bit(target.name, 0)
        return self.trie.match(request.keys, bits)

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        match = self.match(request, available)
        if match.chunks and match.chunks >= self._settings.explore_below * request.chunks:
            return self._least_full(available, match)
        return near_least_full(available)

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        if not full or not request.chunks:
            return None
        there = self.match(request, full)
        gained = there.chunks - self.match(request, available).chunks
        if gained <= 0 or gained < self._settings.explore_below * request.chunks:
            return None
        return self._least_full(full, there)

    def _least_full(self, targets: Sequence[Target], match: Match) -> Target:
        bit, there = self.trie.bits.get, match.targets
        return near_least_full([target for target in targets if there & bit(target.name, 0)])

    def affinity(self, request: Routed, name: str) -> int:
        match = self.trie.match(request.keys, self.trie.bit(name))
        return match.chunks if match.chunks >= self._settings.explore_below * request.chunks else 0

    def sent(self, request: Routed, name: str) -> None:
        if name in self.trie.bits:
            self.hit_chunks += self.trie.insert(request.keys, name)
            self.asked_chunks += request.chunks
