"""The policy of SGLang's router (SkyWalker §5.1): the longest match while loads are even, else the idlest target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pinyon.core.policies import check_bounds
from pinyon.routing.plain import PlainPolicy
from pinyon.routing.prefix_trie import CHUNKS_MAX, PrefixTrie
from pinyon.routing.routing_keys import KEY_BYTES
from pinyon.routing.target import Routed, Target, least_full


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Thresholds, by default those of that router at the time; later ones are 0.3, 64 and 1.5.

    ``threshold`` is the share of the prompt that must match. The load is uneven when the busiest target has over
    ``balance_abs`` requests more than the idlest, and over ``balance_rel`` times as many."""

    threshold: float = 0.5
    balance_abs: int = 32
    balance_rel: float = 1.0001
    chunks_max: int = CHUNKS_MAX

    def __post_init__(self) -> None:
        check_bounds(self, threshold=(0, 1), chunks_max=(1, 1 << 26))
        if self.balance_abs < 0 or self.balance_rel < 1:
            raise ValueError("balance_abs must not be negative, nor balance_rel less than 1")


class CacheAware(PlainPolicy):
    """A baseline that sends without regard to what waits where."""

    name: ClassVar[str] = "cache_aware"

    def __init__(self, settings: CacheAwareSettings | None = None) -> None:
        self._settings = settings or CacheAwareSettings()
        self._trie = PrefixTrie(self._settings.chunks_max)

    def add(self, name: str) -> None:
        self._trie.add(name)

    def remove(self, name: str) -> None:
        self._trie.remove(name)

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        settings, trie = self._settings, self._trie
        idlest = busiest = available[0]
        for target in available:
            if (target.outstanding, target.name) < (idlest.outstanding, idlest.name):
                idlest = target
            if target.outstanding > busiest.outstanding:
                busiest = target
        low, high = idlest.outstanding, busiest.outstanding
        if high - low > settings.balance_abs and high > settings.balance_rel * low:
            return idlest
        bits = 0
        for target in available:
            bits |= trie.bit(target.name)
        match = trie.match(request.keys, bits)
        if match.chunks and match.chunks > settings.threshold * request.chunks:
            matching = [target for target in available if match.targets & trie.bit(target.name)]
            return self._of_equal(request.keys[: match.chunks * KEY_BYTES], matching)
        smallest = available[0]
        for target in available:
            if (trie.size(target.name), target.name) < (trie.size(smallest.name), smallest.name):
                smallest = target
        return smallest

    def _of_equal(self, prefix: bytes, matching: Sequence[Target]) -> Target:
        """Returns one of the targets that have the same prefix."""
        return least_full(matching)

    def affinity(self, request: Routed, name: str) -> int:
        match = self._trie.match(request.keys, self._trie.bit(name))
        return match.chunks if match.chunks > self._settings.threshold * request.chunks else 0

    def sent(self, request: Routed, name: str) -> None:
        if self._trie.bit(name):
            self._trie.insert(request.keys, name)
