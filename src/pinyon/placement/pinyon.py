"""pinyon's own placement: the instance where the request costs least time, its own and that of those it makes wait.

It joins what the papers have one by one. Prefixes can be fetched from wherever they are (Mooncake's global store). The
time to first token is predicted for every instance, by what is ahead of the request there in the order of service. Two
instances by the request's prefix (DualMap's pair) get it wherever that costs hardly more, so that what belongs together
is computed together before anybody holds it.

For each instance

    cost = wait + transfer + prefill + prefill * (requests there that it goes ahead of + decodes)

where the wait is for KV memory, for what is being computed, and for what is ahead. With an order of service by length,
that is the work of requests that are about as long or shorter, else all. The last term is what others lose: the
dispatching rule that goes with serving the shortest first. The reused prefix is what the instance holds, or will hold
of what was placed there before. It is a longer one if that can be fetched in less time than computing it would take.

Where a request decodes on the instance that computed it, what decodes there waits for the prefill, too. Then
``decodes`` is a quarter at the instance that decodes most, and in proportion less at the others (for up to eight
requests, a 32nd each). Without this, an instance that was measured to be a little faster than its equals would get all
requests while nobody waits there.

Where the request's own time there exceeds its limit, the cheapest of the instances that are in time is chosen, if any.

:mod:`pinyon.placement.costs` works the costs out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from pinyon.core.policies import check_bounds
from pinyon.placement.admission import is_late
from pinyon.placement.costs import Costs, CostTerms
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.pairs import SEED_MAX, Pairs
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.transfer_cost import NETWORK


@dataclass(frozen=True, slots=True)
class PinyonSettings:
    """The options. ``others``: how much the time of others counts, against the request's own. ``decodes``: the share of
    a prefill's time that it costs more at the instance that decodes most. ``key_tokens``, ``virtual_nodes``, ``seed``:
    options of the pairs, as DualMap's."""

    others: float = 1.0
    decodes: float = 0.25
    key_tokens: int = 512
    virtual_nodes: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, others=(0, 1e3), decodes=(0, 1e3), key_tokens=(1, 1 << 20))
        check_bounds(self, virtual_nodes=(1, 4096), seed=(0, SEED_MAX))


class Pinyon:
    """The policy that the module describes. ``terms``: the terms of its costs; by default all of them."""

    name: ClassVar[str] = "pinyon"

    def __init__(self, settings: PinyonSettings = PinyonSettings(), terms: CostTerms | None = None) -> None:
        self._terms = terms or CostTerms(settings.others, decodes=settings.decodes)
        self._pairs = Pairs(HotnessSettings(), settings.virtual_nodes, settings.seed, settings.key_tokens)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        costs = Costs(self._terms, request, pool, match, now_s)
        place = costs.cheapest()
        if len(pool.prefills) > 1:
            place = self._of_pair(costs, place)
        decision = self._at(costs, place)
        if not is_late(request, decision):
            return decision
        sooner = self._in_time(costs, decision)
        return decision if sooner is None else sooner

    def _in_time(self, costs: Costs, late: PlacementDecision) -> PlacementDecision | None:
        """Returns the cheapest decision that admission would not refuse, as it would refuse ``late``; or None.
        Admission judges the request's own time; the time of others was to decide among decisions in time."""
        decode, decodes, elsewhere_s = late.decode, -1, 0.0
        if decode is not late.prefill:
            elsewhere_s = decode.load.room_wait_ms * 1e-3
            decodes = costs.pool.place_of.get(decode.info.instance_id, -1)
        place = costs.cheapest_in_time(elsewhere_s, decodes)
        if place is None:
            return None
        sooner = self._at(costs, place)
        if is_late(costs.request, sooner):
            return None
        costs.columns.in_time = True
        return sooner

    def _at(self, costs: Costs, place: int) -> PlacementDecision:
        """Returns the decision that follows from the choice of one instance."""
        decision = costs.decision(place, self.name, 1.0 if self._terms.fetch else None)
        decision.considered = costs.columns
        return decision.with_drain(costs.request, costs.pool)

    def _of_pair(self, costs: Costs, place: int) -> int:
        """Returns the place of an instance of the request's pair if it is in time and costs little more, else
        ``place``. It may cost as much more as it would take to fetch later what is computed at ``place``."""
        request, pool, columns = costs.request, costs.pool, costs.columns
        state, block_tokens = pool.prefills[place], pool.layout.block_tokens
        tokens = request.prompt_tokens - request.reused_tokens(columns.reach[place], block_tokens)
        start_s, byte_s = state.transfer_model.coefficients(NETWORK)
        most_s = columns.cost_s[place] + start_s + byte_s * tokens * state.block_bytes / block_tokens
        first, second = self._pairs.places_of(request, pool, costs.now_s)
        if place in (first, second):
            return place
        best, best_s = place, math.inf
        for other in (first, second):
            if other is None:
                continue
            if columns.fetches(other) and columns.cost_s[other] <= most_s:
                costs.correct(other)
            cost_s = columns.cost_s[other]
            if cost_s < best_s and cost_s <= most_s and not costs.late(other):
                best, best_s = other, cost_s
        return best
