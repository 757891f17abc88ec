"""The plain policies: one instance is chosen, which reuses what it happens to hold and fetches nothing."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pinyon.placement.at_one import at_one
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch


class RoundRobin:
    """The policy that takes the pool's next instance by id after the last one, which may be gone by now."""

    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        prefill = next((state for state in pool.prefills if state.info.instance_id > self._last), pool.prefills[0])
        self._last = prefill.info.instance_id
        return at_one(self.name, request, pool, match, prefill, now_s)


class LeastLoaded:
    """The policy that takes the prefill instance with the shortest wait in seconds, without regard to caches: the
    baseline of Mooncake Fig. 5 and of DualMap §2.2."""

    name: ClassVar[str] = "least_loaded"

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return at_one(self.name, request, pool, match, _least_loaded(pool, now_s), now_s)


def _least_loaded(pool: Pool, now_s: float) -> InstanceState:
    """Returns the instance with the shortest wait; of equals the one that decodes least, then the one with the emptier
    cache, then the smaller id (the pool's order)."""
    least, chosen = -1, pool.prefills[0]
    for state in pool.prefills:
        wait_ns = int(state.wait_s(now_s) * 1e9 + 0.5)  # rounding must not choose
        if least < 0 or wait_ns < least or (wait_ns == least and _filled(state) < _filled(chosen)):
            least, chosen = wait_ns, state
    return chosen


def _filled(state: InstanceState) -> tuple[int, int]:
    return state.loads.decoding[state.row], state.load.cached_blocks
