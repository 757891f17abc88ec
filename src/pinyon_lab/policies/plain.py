"""Plain placement policies to compare with: one instance is chosen, which reuses what it happens to hold and fetches
nothing."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


class RandomChoice:
    """Each with the same chance: the baseline of Mooncake Fig. 5."""

    name: ClassVar[str] = "random"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, rng.choice(pool.prefills), now_s)


class MinTtft:
    """Least predicted TTFT without fetching: what DualMap's appendix B makes of Mooncake's scheduling, as a baseline.

    The instance with the least sum of waiting there and the time to compute what it does not hold; of equals the one
    that decodes least, then the smallest id. The appendix prints a maximum of pending less recomputed tokens; what it
    describes, and what is done here, is the minimum of their sum, in seconds.
    """

    name: ClassVar[str] = "min_ttft"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        times_s = pool.waits_s(now_s) + pool.prefills_s(request.prompt_tokens, pool.reused_tokens(request, match.soon))
        return at_one(self.name, request, pool, match, pool.lowest(times_s), now_s)
