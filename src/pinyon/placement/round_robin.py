"""One after the other."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pinyon.placement.at_one import at_one
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["RoundRobin"]


class RoundRobin:
    """The next one by id after the last one, which may be gone by now; of each pool in turn."""

    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        prefill = next((state for state in pool.prefills if state.info.instance_id > self._last), pool.prefills[0])
        self._last = prefill.info.instance_id
        return at_one(self.name, request, pool, match, prefill, now_s)
