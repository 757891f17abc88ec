"""Belady's optimum: what is used again latest goes first. For replays, where the future is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.eviction.policy import Key, Traits
from pinyon.eviction.ranked import Rank, RankedPolicy

__all__ = ["Belady"]


class Belady(RankedPolicy[Key]):
    """``next_use`` says when a key that is stored or used now will be used again (``inf``: never). Of what is used
    again at the same time what is deeper goes first. Worth: time to the next use, negative."""

    def __init__(self, next_use: Callable[[Key], float]) -> None:
        super().__init__()
        self._next_use = next_use

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self.used(keys, now_s, traits, offsets)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            self._rank(key, (-self._next_use(key), -offset))

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0] + now_s)
