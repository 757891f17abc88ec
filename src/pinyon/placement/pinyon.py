"""pinyon's own placement: the instance where the request costs least time, its own and that of those it makes wait.

It joins what the papers have one by one. Prefixes can be fetched from wherever they are (Mooncake's global store). The
time to first token is predicted for every instance, by what is ahead of the request there in the order of service. Two
instances by the request's prefix (DualMap's pair) get it wherever that costs hardly more, so that what belongs together
is computed together before anybody holds it.

For each instance

    cost = wait + transfer + prefill + prefill * (requests there that it goes ahead of)

where the wait is for KV memory, for what is being computed, and for what is ahead. With an order of service by length,
that is the work of requests that are about as long or shorter, else all. The last term is what others lose: the
dispatching rule that goes with serving the shortest first. The reused prefix is what the instance holds, or will hold
of what was placed there before. It is a longer one if that can be fetched in less time than computing it would take.

Where the request's own time there exceeds its limit, the cheapest of the instances that are in time is chosen, if any.

:mod:`pinyon.placement.costs` works the costs out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.core.policies import check_bounds
from pinyon.placement.admission import is_late, transfer_doubt
from pinyon.placement.considered import Cost
from pinyon.placement.costs import Costs, CostTerms
from pinyon.placement.decode_selection import select_decode
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.instances import InstanceState
from pinyon.placement.pairs import SEED_MAX, Pairs
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.transfer_cost import NETWORK


@dataclass(frozen=True, slots=True)
class PinyonSettings:
    """The options. ``others``: how much the time of others counts, against the request's own. ``key_tokens``,
    ``virtual_nodes``, ``seed``: options of the pairs, as DualMap's."""

    others: float = 1.0
    key_tokens: int = 512
    virtual_nodes: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, others=(0, 1e3), key_tokens=(1, 1 << 20), virtual_nodes=(1, 4096), seed=(0, SEED_MAX))


class Pinyon:
    """The policy that the module describes. ``terms``: the terms of its costs; by default all of them."""

    name: ClassVar[str] = "pinyon"

    def __init__(self, settings: PinyonSettings = PinyonSettings(), terms: CostTerms | None = None) -> None:
        self._terms = terms or CostTerms(settings.others)
        self._pairs = Pairs(HotnessSettings(), settings.virtual_nodes, settings.seed, settings.key_tokens)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        costs = Costs(self._terms, request, pool, match, now_s)
        place = costs.cheapest()
        if len(pool.prefills) > 1:
            place = self._of_pair(request, pool, costs, place, now_s)
        decision = self._at(place, request, pool, match, costs, now_s)
        if not is_late(request, decision.with_drain(request, pool)):
            return decision
        sooner = self._in_time(decision, request, pool, match, costs, now_s)
        return decision if sooner is None else sooner

    def _in_time(
        self,
        late: PlacementDecision,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        costs: Costs,
        now_s: float,
    ) -> PlacementDecision | None:
        """Returns the cheapest decision that admission would not refuse, as it would refuse ``late``; or None.
        Admission judges the request's own time; the time of others was to decide among decisions in time."""
        decode, decodes, elsewhere_s = late.decode, -1, 0.0
        if decode is not late.prefill:
            elsewhere_s = decode.load.room_wait_ms * 1e-3
            decodes = pool.place_of.get(decode.info.instance_id, -1)
        place = costs.cheapest_in_time(elsewhere_s, decodes)
        if place is None:
            return None
        sooner = self._at(place, request, pool, match, costs, now_s)
        if is_late(request, sooner.with_drain(request, pool)):
            return None
        costs.columns.in_time = True
        return sooner

    def _at(
        self,
        place: int,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        costs: Costs,
        now_s: float,
    ) -> PlacementDecision:
        """Returns the decision that follows from the choice of one instance."""
        state, cost = pool.prefills[place], costs.columns.at(place)
        reach, transfer_s, prefill_s = cost.reach, cost.transfer_s, cost.prefill_s
        doubted = None if cost.fetches else self._doubted(request, pool, match, costs, state, cost, now_s)
        if doubted is not None:
            reach, transfer_s, prefill_s = doubted
        fetches = costs.planner.plan(state, cost.local, reach) if reach > cost.local else ()
        decode, tbt_s, shared = select_decode(request, pool, match, state, now_s)
        decision = PlacementDecision(
            state, decode, cost.local, fetches, self.name, cost.wait_s, transfer_s, prefill_s, tbt_s, shared
        )
        decision.doubts_transfer, decision.considered = doubted is not None, costs.columns
        return decision

    def _of_pair(self, request: PlacementRequest, pool: Pool, costs: Costs, place: int, now_s: float) -> int:
        """Returns the place of an instance of the request's pair if it is in time and costs little more, else
        ``place``. It may cost as much more as it would take to fetch later what is computed at ``place``."""
        chosen, state = costs.columns.at(place), pool.prefills[place]
        tokens = request.prompt_tokens - request.reused_tokens(chosen.reach, pool.layout.block_tokens)
        start_s, byte_s = state.transfer_model.coefficients(NETWORK)
        most_s = chosen.cost_s + start_s + byte_s * tokens * state.block_bytes / pool.layout.block_tokens
        first, second = self._pairs.places_of(request, pool, now_s)
        if place in (first, second):
            return place
        best, best_s = place, math.inf
        for other in (first, second):
            if other is None:
                continue
            cost = costs.columns.at(other)
            if cost.fetches and cost.cost_s <= most_s:
                costs.correct(other)
                cost = costs.columns.at(other)
            if cost.cost_s < best_s and cost.cost_s <= most_s and not costs.late(other):
                best, best_s = other, cost.cost_s
        return best

    def _doubted(
        self,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        costs: Costs,
        state: InstanceState,
        cost: Cost,
        now_s: float,
    ) -> tuple[int, float, float] | None:
        """Returns prefix, transfer and prefill times of a fetch that is predicted to be slower than computing, to
        measure it; or None. It is asked after the choice, in which an instance in doubt counts as if it computed."""
        local = cost.local
        if not self._terms.fetch or match.blocks <= local:
            return None
        doubt = transfer_doubt(state, now_s)
        if doubt >= 1:
            return None
        reach = match.extent(local, pool.asked_by(state) & ~state.bit, FETCH_SPANS_MAX)
        if reach <= local:
            return None
        fetch_s = costs.planner.fetch_s(state, local, reach)
        reused = request.reused_tokens(reach, pool.layout.block_tokens)
        short_s = state.prefill_model.predict_s(request.prompt_tokens, reused)
        waits_s = cost.wait_s + state.load.room_wait_ms * 1e-3
        if fetch_s * doubt + short_s >= cost.prefill_s:
            return None
        if waits_s + fetch_s + short_s > request.ttft_limit_s(fetch_s + short_s):
            return None
        return reach, fetch_s, short_s
