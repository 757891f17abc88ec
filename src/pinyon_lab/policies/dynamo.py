"""Dynamo's cost function as DualMap's appendix B prints it: the share of the prompt that is held less the load."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """``load_weight``: of the load, which is an instance's share of the longest queue there is, and its wait for KV
    memory as such a share, two at most. The appendix names neither weight nor unit."""

    load_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.load_weight <= 1e6:
            raise ValueError(f"load_weight must be from 0 to 1e6, got {self.load_weight}")


class Dynamo:
    """The instance with the greatest difference; of equals the one that decodes least, then the smallest id."""

    name: ClassVar[str] = "dynamo"
    settings_type: ClassVar[type[DynamoSettings]] = DynamoSettings

    def __init__(self, settings: DynamoSettings = DynamoSettings()) -> None:
        self._weight = settings.load_weight

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        queues_s, rooms_s = pool.queues_s(now_s), pool.rooms_s
        # By the longest queue: one instance without memory must not make the others look idle.
        longest_s = max(queues_s.max(), LEAST_S)
        loads = queues_s / longest_s + np.minimum(rooms_s / longest_s, 2.0)
        score = pool.reused_tokens(request, match.soon) / request.prompt_tokens - self._weight * loads
        return at_one(self.name, request, pool, match, pool.lowest(-score), now_s)
