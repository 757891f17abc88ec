"""Any instance: the baseline of Mooncake Fig. 5."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["RandomChoice"]


class RandomChoice:
    """Each with the same chance."""

    name: ClassVar[str] = "random"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, rng.choice(pool.prefills), now_s)
