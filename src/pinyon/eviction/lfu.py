"""Least frequently used goes first: uses since it was stored, storing counted; forgotten when it goes."""

from __future__ import annotations

from pinyon.eviction.counted import Counted
from pinyon.eviction.policy import Key


class Lfu(Counted[Key]):
    """Worth: uses."""

    def _value(self, uses: int) -> float:
        return uses
