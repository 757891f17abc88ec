"""pinyon's own placement: the instance where the request costs least time, its own and that of those it makes wait.

It joins what the papers have one by one. Prefixes can be fetched from wherever they are (Mooncake's global store); the
time to first token is predicted for every instance, by what is ahead of the request there in the order of service; two
instances by the request's prefix (DualMap's pair) get it wherever that costs hardly more, so that what belongs together
is computed together before anybody holds it.

For each instance

    cost = wait + transfer + prefill + prefill * (requests there that it goes ahead of)

where the wait is for KV memory, for what is being computed, and for what is ahead: with an order of service by length,
the work of requests that are about as long or shorter, else all. The last term is what others lose: the dispatching
rule that goes with serving the shortest first. What is reused is the longer one of what the instance holds (or will,
of what was placed there before), and of what it can fetch in less time than it would compute it in.

All instances are looked at in arrays, with what holds for most of them (they can fetch every block that anybody can be
asked for); who seems the best is then looked at exactly, and the next best where it is not what it seemed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pinyon.core.fetch_span import FETCH_SPANS_MAX
from pinyon.placement.decode_selection import select_decode
from pinyon.placement.fetch_plan import FetchPlanner
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.pairs import Pairs
from pinyon.placement.policy import Considered, PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.probing import transfer_doubt
from pinyon.placement.transfer_cost import PathKind

__all__ = ["BatchSharing", "Pinyon", "PinyonSettings"]

EXAMINED_MAX = 8
"""Instances that are looked at exactly."""

BatchSharing = Callable[[PlacementRequest, Pool, PrefixMatch], NDArray[np.float64]]
"""Of each prefill instance of a pool, seconds that are gained where a request decodes beside others of its prefix."""


@dataclass(frozen=True, slots=True)
class PinyonSettings:
    """``others``: how much the time of others counts, against its own. ``fetch``, ``order``, ``pair``: whether prefixes
    are fetched, whether the order of service is looked at, and whether pairs are preferred: to compare without.
    ``key_tokens``, ``virtual_nodes``, ``seed``: of the pairs, as DualMap's."""

    others: float = 1.0
    fetch: bool = True
    order: bool = True
    pair: bool = True
    key_tokens: int = 512
    virtual_nodes: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("others", 0.0, 1e3),
            ("key_tokens", 1, 1 << 20),
            ("virtual_nodes", 1, 4096),
            ("seed", 0, (1 << 63) - 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least:g} to {most:g}, got {getattr(self, name)}")


class Pinyon:
    """See the module. ``sharing``: what decode batches gain, where something is known of that."""

    name: ClassVar[str] = "pinyon"

    def __init__(self, settings: PinyonSettings = PinyonSettings(), sharing: BatchSharing | None = None) -> None:
        self._settings = settings
        self._sharing = sharing
        self._pairs = Pairs(HotnessSettings(), settings.virtual_nodes, settings.seed, settings.key_tokens)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        gains_s = None if self._sharing is None else self._sharing(request, pool, match)
        costs = _Costs(self._settings, request, pool, match, now_s, gains_s)
        place = costs.cheapest()
        if self._settings.pair and len(pool.prefills) > 1:
            place = self._of_pair(request, pool, costs, place, now_s)
        state = pool.prefills[place]
        local, reach = int(costs.local[place]), int(costs.reach[place])
        transfer_s, prefill_s = float(costs.transfer_s[place]), float(costs.prefill_s[place])
        doubted = self._doubted(request, pool, match, costs, place, now_s) if reach == local else None
        if doubted is not None:
            reach, transfer_s, prefill_s = doubted
        fetches = costs.planner.plan(state, local, reach) if reach > local else ()
        decode, tbt_s = select_decode(request, pool, match, state, now_s)
        times = float(costs.wait_s[place]), transfer_s, prefill_s, tbt_s
        return PlacementDecision(
            state, decode, local, fetches, *times, self.name,
            doubts_transfer=doubted is not None, considered=costs.considered(),
        )  # fmt: skip

    def _of_pair(self, request: PlacementRequest, pool: Pool, costs: _Costs, place: int, now_s: float) -> int:
        """One of its pair instead, if it costs no more than what it computes would take to be fetched there later."""
        tokens = request.prompt_tokens - request.reused_tokens(int(costs.reach[place]), pool.layout.block_tokens)
        start_s, byte_s = pool.prefills[place].transfer_model.coefficients(PathKind.NETWORK)
        worth_s = start_s + byte_s * tokens * pool.layout.block_bytes / pool.layout.block_tokens
        most_s = float(costs.cost_s[place]) + worth_s
        pair = [pool.place_of[each.info.instance_id] for each in self._pairs.of(request, pool, now_s) if each]
        if place in pair:
            return place
        for other in pair:
            if costs.fetches(other) and costs.cost_s[other] <= most_s:
                costs.correct(other)
        best = min(pair, key=lambda other: float(costs.cost_s[other]))
        return best if costs.cost_s[best] <= most_s else place

    def _doubted(
        self,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        costs: _Costs,
        place: int,
        now_s: float,
    ) -> tuple[int, float, float] | None:
        """A fetch that is said to be slower than computing, to learn whether it is: prefix, transfer and prefill times.
        Only now: an instance in doubt is no slower than it would be by computing."""
        state, local = pool.prefills[place], int(costs.local[place])
        if not self._settings.fetch or match.blocks <= local:
            return None
        doubt = transfer_doubt(state, now_s)
        if doubt >= 1:
            return None
        reach = match.extent_for(state, local, pool.sources_for(state), FETCH_SPANS_MAX)
        if reach <= local:
            return None
        fetch_s = costs.planner.fetch_s(state, local, reach)
        reused = request.reused_tokens(reach, pool.layout.block_tokens)
        short_s = state.prefill_model.predict_s(request.prompt_tokens, reused)
        waits_s = float(costs.wait_s[place]) + state.load.room_wait_ms * 1e-3
        if fetch_s * doubt + short_s >= float(costs.prefill_s[place]):
            return None
        if waits_s + fetch_s + short_s > request.ttft_limit_s(fetch_s + short_s):
            return None
        return reach, fetch_s, short_s


class _Costs:
    """Of each prefill instance of a pool: blocks that it holds, or will (``local``); leading blocks that it has once it
    has fetched (``reach``); seconds to fetch and to compute, until its turn comes, and of all that."""

    __slots__ = (
        "_gains_s", "_match", "_now_s", "_pool", "_request", "_settings", "cost_s", "local", "planner", "prefill_s",
        "reach", "rooms_s", "transfer_s", "wait_s",
    )  # fmt: skip

    def __init__(
        self,
        settings: PinyonSettings,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        now_s: float,
        gains_s: NDArray[np.float64] | None,
    ) -> None:
        """``gains_s``: what is gained there besides."""
        self._settings, self._request, self._now_s = settings, request, now_s
        self._pool, self._match, self.planner = pool, match, FetchPlanner(pool, match)
        tokens, rows = request.prompt_tokens, pool.rows
        soon = match.soon
        self.local = soon.held_by_row(pool.last_row + 1).take(rows) if soon.blocks else np.zeros(len(rows), np.int64)
        reused = request.reused_tokens_of(self.local, pool.layout.block_tokens)
        self.prefill_s = pool.prefills_s(tokens, reused)
        self.transfer_s = np.zeros(len(rows))
        self.reach = self.local
        if settings.fetch and match.blocks:
            self._fetch(self.planner.reach(FETCH_SPANS_MAX))
        self.wait_s, before = pool.turns(self.prefill_s, now_s, in_order=settings.order)
        self.rooms_s = pool.rooms_s
        self.cost_s = self.wait_s + self.rooms_s + self.transfer_s + self.prefill_s * (1 + settings.others * before)
        self._gains_s = gains_s
        if gains_s is not None:
            self.cost_s -= gains_s

    def _fetch(self, most: int) -> None:
        """Where it seems sooner to fetch so many leading blocks, as many as can be asked for."""
        pool, block_tokens = self._pool, self._pool.layout.block_tokens
        missing = most - self.local
        start_s, byte_s = pool.transfers(PathKind.NETWORK)
        transfer_s = start_s + byte_s * (missing * pool.layout.block_bytes)
        tokens = self._request.prompt_tokens
        prefill_s = pool.prefills_s(tokens, self._request.reused_tokens(most, block_tokens))
        sooner = (missing > 0) & (transfer_s + prefill_s < self.prefill_s)
        self.reach = np.where(sooner, most, self.local)
        self.transfer_s = np.where(sooner, transfer_s, 0.0)
        self.prefill_s = np.where(sooner, prefill_s, self.prefill_s)

    def considered(self) -> Considered:
        return Considered(self.local, self.reach, self.rooms_s, self.wait_s, self.transfer_s, self.prefill_s)

    def cheapest(self) -> int:
        """The place of the instance with the least cost, exactly of those that seemed to have it."""
        place = self._pool.place_of_lowest(self.cost_s)
        examined: set[int] = set()
        while place not in examined and len(examined) < EXAMINED_MAX and self.fetches(place):
            examined.add(place)
            if self.correct(place):
                place = self._pool.place_of_lowest(self.cost_s)
        if place in examined or not self.fetches(place):
            return place
        return self._pool.place_of_lowest(self._exactly(examined))

    def _exactly(self, examined: set[int]) -> NDArray[np.float64]:
        """What it costs where nothing only seems so: it was looked at, or fetches nothing; else without end."""
        exact = self.reach == self.local
        exact[list(examined)] = True
        return np.where(exact, self.cost_s, np.inf)

    def fetches(self, place: int) -> bool:
        return bool(self.reach[place] > self.local[place])

    def correct(self, place: int) -> bool:
        """What is exactly so of an instance that seemed to fetch. Returns whether that costs more."""
        pool, request, local = self._pool, self._request, int(self.local[place])
        state, block_tokens = pool.prefills[place], pool.layout.block_tokens
        reach = self._match.extent_for(state, local, pool.sources_for(state), FETCH_SPANS_MAX)
        reused = request.reused_tokens(local, block_tokens)
        transfer_s, prefill_s = 0.0, state.prefill_model.predict_s(request.prompt_tokens, reused)
        if reach > local:
            fetch_s = self.planner.fetch_s(state, local, reach)
            reused = request.reused_tokens(reach, block_tokens)
            short_s = state.prefill_model.predict_s(request.prompt_tokens, reused)
            if fetch_s + short_s < prefill_s:
                transfer_s, prefill_s = fetch_s, short_s
            else:
                reach = local
        before = float(self.cost_s[place])
        wait_s, behind = state.turn(prefill_s, self._now_s, in_order=self._settings.order)
        cost_s = wait_s + float(self.rooms_s[place]) + transfer_s + prefill_s * (1 + self._settings.others * behind)
        if self._gains_s is not None:
            cost_s -= float(self._gains_s[place])
        self.reach[place], self.transfer_s[place], self.prefill_s[place] = reach, transfer_s, prefill_s
        self.wait_s[place], self.cost_s[place] = wait_s, cost_s
        return cost_s > before
