"""Plain placement policies for comparison: the chosen instance reuses what it happens to hold and fetches nothing."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pinyon.placement.at_one import at_one
from pinyon.placement.costs import OWN_TIME, Costs
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


class RandomChoice:
    """A uniformly random choice: the baseline of Mooncake Fig. 5."""

    name: ClassVar[str] = "random"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, rng.choice(pool.prefills), now_s)


class MinTtft:
    """Least predicted TTFT without fetching: DualMap's version of Mooncake's scheduling as a baseline (appendix B).

    It chooses the instance with the least sum of the wait there and the time to compute what the instance does not
    hold. Ties go to the instance that decodes least, then to the smallest id. The appendix prints a maximum of pending
    less recomputed tokens. But it describes the minimum of their sum, in seconds, which is what this policy takes."""

    name: ClassVar[str] = "min_ttft"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        place = Costs(OWN_TIME, request, pool, match, now_s).cheapest()
        return at_one(self.name, request, pool, match, pool.prefills[place], now_s)
