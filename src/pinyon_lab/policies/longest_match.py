"""SGLang's longest prefix match: those first of whose prompts most is cached (FEATHER §3.4, experiment 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinyon.batching.policy import BatchRequest
from pinyon_lab.policies.cached_prefix_line import CachedPrefixSettings
from pinyon_lab.policies.radix_tree import RadixTree

__all__ = ["LongestMatch", "LongestMatchSettings"]


@dataclass(frozen=True, slots=True)
class LongestMatchSettings(CachedPrefixSettings):
    """``fallback``: where more wait, they are admitted as they came, as SGLang has it; 0: never, as FEATHER has it
    (§5.3.1)."""

    fallback: int = 128

    def __post_init__(self) -> None:
        CachedPrefixSettings.__post_init__(self)
        if not 0 <= self.fallback <= 1_000_000:
            raise ValueError("fallback must be from 0 to 1000000")


class LongestMatch:
    """See :class:`pinyon_lab.policies.cached_prefix_line.PrefixOrder`. O(W · T + W log W) for W that wait and T keys of
    a prompt. Of equal matches the first to come."""

    def __init__(self, settings: LongestMatchSettings) -> None:
        self._fallback = settings.fallback

    def ordered(self, tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
        if 0 < self._fallback < len(waiting):
            return list(waiting)
        ranks = [(-tree.match(request.block_keys).keys, number) for number, request in waiting.items()]
        return [number for _, number in sorted(ranks)]
