"""Dynamo's cost function as DualMap's appendix B prints it: the share of the prompt that is held less the load."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["Dynamo", "DynamoSettings"]


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """``load_weight``: of the load, which is an instance's share of the longest wait there is. The appendix names
    neither weight nor unit."""

    load_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.load_weight <= 1e6:
            raise ValueError(f"load_weight must be from 0 to 1e6, got {self.load_weight}")


class Dynamo:
    """The instance with the greatest difference; of equals the one that decodes least, then the smallest id."""

    name = "dynamo"

    def __init__(self, settings: DynamoSettings = DynamoSettings()) -> None:
        self._weight = settings.load_weight

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        waits_s = pool.waits_s(now_s)
        longest_s = waits_s.max()
        loads = waits_s / longest_s if longest_s > 0 else waits_s
        score = pool.reused_tokens(request, match.soon) / request.prompt_tokens - self._weight * loads
        return at_one(self.name, request, pool, match, pool.lowest(-score), now_s)
