"""The cost of a request at each prefill instance of a pool, for policies and for explanations.

A first pass assumes what holds for most instances: that they can fetch every block that any source holds, over the
fastest path that such fetches take. For ``pinyon``, the instance that seems cheapest is then examined exactly. If it
turns out dearer, the next cheapest is examined. Instances on a source's host are marked: their path is mostly faster.

The pass is a loop over unboxed numbers. For a thousand instances, it takes a tenth of a millisecond when compiled, and
some milliseconds in Python."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Final

from mypy_extensions import i64

from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.placement.admission import transfer_doubt
from pinyon.placement.considered import CostColumns
from pinyon.placement.decode_selection import decode_blocks, least_loaded, select_decode
from pinyon.placement.fetch_plan import FetchPlanner
from pinyon.placement.fetch_time import fetch_s as seconds_to_fetch
from pinyon.placement.load_table import COEFFICIENTS, PREFILL_US_MAX, Loads, size_class
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.transfer_cost import HOST, NETWORK, PATH_KINDS, SSD, STORE, PathKind

NANO_S: Final = 1e-9
"""Costs that differ by less count as equal: they are sums, and rounding errors must not decide."""
EXAMINED_MAX: Final = 8
"""The maximum number of instances that are examined exactly."""
NEVER_S: Final = 1e6
"""The time to hand over KV that nobody may reuse."""
DECODES_MIN: Final = 8
"""The number of decoding requests for which the whole share is added, if no instance of the pool decodes more."""
NEAR_MAX: Final = 16
"""The maximum number of sources of a span whose hosts are looked at: most hosts have a source of a hot prefix."""
SPANS_MAX: Final = 16
"""The maximum number of spans of a plan that are searched for sources and their hosts."""
_SSD: Final = int(SSD)
_HOST: Final = int(HOST)
_STORE: Final = int(STORE)
_AT_STORE: Final = 1
_AT_HOST: Final = 2


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The terms of a cost. ``others``: the weight of other requests' time against the request's own. ``fetch``: whether
    prefixes are fetched. ``order``: whether the order of service is considered. ``near``: whether readers on a source's
    host are told apart. ``decodes``: the share of a prefill's time that it costs more at the instance that decodes
    most, and in proportion at the others, if requests decode where they were computed. If there are instances that
    decode nothing, it is the share for each request that decodes, as there is a better place for the prefill."""

    others: float
    fetch: bool = True
    order: bool = True
    near: bool = True
    decodes: float = 0.0


OWN_TIME: Final = CostTerms(0.0, fetch=False, order=False)
"""The terms of a request's own time, if nothing is fetched and prompts are computed in order of arrival."""


class Costs:
    """The costs at the instances, indexed by their places in the pool."""

    def __init__(
        self,
        terms: CostTerms,
        request: PlacementRequest,
        pool: Pool,
        match: PrefixMatch,
        now_s: float,
        loads: Loads | None = None,
    ) -> None:
        """Fills the columns by a first pass. ``loads``: past loads, for terms without the order of service."""
        self.planner = FetchPlanner(pool, match)
        self.terms, self.request, self.pool, self.match, self.now_s = terms, request, pool, match, now_s
        self._elsewhere_s, self._decodes = 0.0, -1
        self._each_decode = self._share_of_each()
        self._hand_over_s = self._time_to_hand_over() if len(pool.hands_over) else 0.0
        count: i64 = len(pool.prefills)
        self._count = count
        self.columns = CostColumns(count)
        self._look(loads or pool.prefills[0].loads)
        self._ranked_s = self.columns.cost_s
        """A copy of the costs, infinite for instances that are left out."""

    def _share_of_each(self) -> float:
        """Returns the share of a prefill's time that it costs more for each request that decodes at the instance."""
        pool, batch = self.pool, self.pool.prefills[0].loads.batch
        if not pool.together:
            return 0.0
        if len(pool.hands_over):
            return self.terms.decodes
        most: i64 = DECODES_MIN
        for row in pool.row_numbers:
            most = max(most, batch[row])
        return self.terms.decodes / float(most)

    def _time_to_hand_over(self) -> float:
        """Returns the seconds from the end of a prompt's computation, at an instance that decodes nothing, to the end
        of the step after the one that decodes has its KV."""
        request, pool, block_tokens = self.request, self.pool, self.pool.layout.block_tokens
        if request.no_reuse:
            return NEVER_S
        sender = next(state for state in pool.prefills if not state.info.role.decodes)
        blocks = decode_blocks(request, block_tokens)
        reader = pool.decodes[least_loaded(request, pool, self.match, sender, self.now_s, blocks)]
        missing = max(0, request.prompt_tokens // block_tokens - self.match.held_by(reader))
        moving_s = seconds_to_fetch(reader, [(sender, missing * sender.block_bytes)]) if missing else 0.0
        return moving_s + reader.decode_s(request.prompt_tokens)

    def _look(self, loads: Loads) -> None:
        pool, match, columns = self.pool, self.match, self.columns
        if match.soon.blocks:
            rows, held, local = pool.row_numbers, match.soon.held_by_row(pool.last_row + 1), columns.local
            for place in range(self._count):
                local[place] = held[rows[place]]
        most = 0
        """The leading blocks that an instance can fetch if it holds none and no source has failed it."""
        if self.terms.fetch and match.blocks:
            most = match.extent(0, pool.asked, FETCH_SPANS_MAX)
        if most and self.terms.near and (pool.sources.near or pool.sources.on_ssd):
            far, ssd, alone = self._paths(most)
            self._fill(loads, most, int(far), ssd, alone)
        else:
            self._fill(loads, most, int(NETWORK), False, False)

    def _fill(self, loads: Loads, most: i64, far: i64, ssd: bool, alone: bool) -> None:
        """Fills the columns: times to fetch and to compute, the turn as in :meth:`LoadTable.turn`, and the cost.

        An instance fetches the first ``most`` blocks where that seems faster than computing them. ``far``, ``ssd``,
        ``alone``: see :meth:`_paths`, which has marked in the column ``reach`` the readers on a source's host."""
        pool, request, terms, now_s = self.pool, self.request, self.terms, self.now_s
        table = pool.prefills[0].loads
        rows, coefficients, transfer, room_s = pool.row_numbers, loads.coefficients, loads.transfer, loads.room_s
        queued_us, ends_s, reported_s = loads.queued_us, loads.ends_s, loads.reported_s
        short_first, ahead_us, behind = table.short_first, table.ahead_us, table.behind
        columns = self.columns
        locals_, reach, rooms_s, waits_s = columns.local, columns.reach, columns.room_s, columns.wait_s
        transfers_s, prefills_s, costs_s = columns.transfer_s, columns.prefill_s, columns.cost_s
        order, others, each_decode, batch = terms.order, terms.others, self._each_decode, table.batch
        hands_over, hand_over_s, apart = pool.hands_over, self._hand_over_s, len(pool.hands_over) > 0
        tokens, block_tokens = float(request.prompt_tokens), pool.layout.block_tokens
        block_bytes = float(pool.prefills[0].block_bytes)
        capacity: i64 = len(queued_us)
        reused_most = reused = rest = missing_bytes = 0.0
        if most:
            reused_most = float(request.reused_tokens(most, block_tokens))
        rest_most = tokens - reused_most
        last: i64 = -1
        size: i64 = 0
        for place in range(self._count):
            row, local = rows[place], locals_[place]
            if local != last:  # most instances hold equally much: nothing
                last, reused = local, 0.0
                if local:
                    reused = float(request.reused_tokens(local, block_tokens))
                rest, missing_bytes = tokens - reused, float(most - local) * block_bytes
            at = row * COEFFICIENTS
            k0, k1, k2 = coefficients[at], coefficients[at + 1], coefficients[at + 2]
            prefill_s = k0 + k1 * rest + k2 * rest * (tokens + reused)
            transfer_s = 0.0
            near = reach[place]
            reach[place] = local
            if most > local:
                short_s = k0 + k1 * rest_most + k2 * rest_most * (tokens + reused_most)
                way = (row * PATH_KINDS + far) * 2
                fetch_s = transfer[way] + transfer[way + 1] * missing_bytes
                if ssd:
                    way = (row * PATH_KINDS + _SSD) * 2
                    fetch_s = min(fetch_s, transfer[way] + transfer[way + 1] * missing_bytes)
                elif near and alone:
                    fetch_s = inf
                if near & _AT_STORE:
                    way = (row * PATH_KINDS + _STORE) * 2
                    fetch_s = min(fetch_s, transfer[way] + transfer[way + 1] * missing_bytes)
                if near & _AT_HOST:
                    way = (row * PATH_KINDS + _HOST) * 2
                    fetch_s = min(fetch_s, transfer[way] + transfer[way + 1] * missing_bytes)
                if fetch_s + short_s < prefill_s:
                    transfer_s, prefill_s = fetch_s, short_s
                    reach[place] = most
            if apart and hands_over[place]:
                transfer_s += hand_over_s
            queued_s = float(queued_us[row]) * 1e-6
            wait_s = max(reported_s[row], queued_s + max(ends_s[row] - now_s, 0.0))
            before = 0.0
            if order and short_first[row]:
                size = size_class(i64(min(prefill_s * 1e6, PREFILL_US_MAX) + 0.5), size)
                turn = size * capacity + row
                before = float(behind[turn])
                wait_s = float(ahead_us[turn]) * 1e-6 + (wait_s - queued_s)
            waiting_s = room_s[row]
            rooms_s[place], waits_s[place] = waiting_s, wait_s
            transfers_s[place], prefills_s[place] = transfer_s, prefill_s
            # The fixed part is that of any step, and the decodes beside it need one anyway.
            slowed_s = prefill_s
            if apart:
                slowed_s = 0.0 if hands_over[place] else prefill_s - k0
            lost_s = others * before * prefill_s + each_decode * float(batch[row]) * slowed_s
            costs_s[place] = wait_s + waiting_s + transfer_s + prefill_s + lost_s

    def _lowest(self, among: Collection[int] | None = None) -> int:
        """Returns the place with the least cost. Ties go to the instance that decodes least, then to the first by id.
        With ``among``, instances that fetch count only if their places are in it."""
        costs_s, reach, local = self._ranked_s, self.columns.reach, self.columns.local
        least_s, near_s = inf, NANO_S
        for place in range(self._count):
            if costs_s[place] < least_s and (among is None or reach[place] == local[place] or place in among):
                least_s = costs_s[place]
        near_s += least_s
        rows, decoding = self.pool.row_numbers, self.pool.prefills[0].loads.decoding
        chosen: i64 = -1
        for place in range(self._count):
            if costs_s[place] <= near_s:
                if among is not None and reach[place] != local[place] and place not in among:
                    continue
                if chosen < 0 or decoding[rows[place]] < decoding[rows[chosen]]:
                    chosen = place
        return max(0, chosen)

    def _paths(self, most: int) -> tuple[PathKind, bool, bool]:
        """Returns the kind of path by which any reader fetches ``most`` leading blocks, whether SSDs are a second path,
        and whether readers on a source's host have no other source. It marks these readers in the column ``reach``.

        Sources are chosen as in :class:`FetchPlanner`. The paths are those of two readers: one that holds no block, and
        one that holds all blocks before the last change of holders."""
        pool, match, told_apart = self.pool, self.match, self.columns.reach
        sources, asked = pool.sources, pool.asked
        spans = match.spans(0, most, asked, SPANS_MAX)
        found = [holders & sources.stores or holders for _, _, holders in spans]
        # a reader that holds a part needs only the end, and more sources may hold the end than the whole
        ending = match.holders_of(most - 1) & asked
        if ending != spans[-1][2]:
            found.append(ending & sources.stores if spans[0][2] & sources.stores else ending)
        memory = spans[-1][1] < most
        ssd = at_store = at_host = False
        for holders in found:
            if sources.on_ssd:
                ssd = ssd or holders & sources.on_ssd != 0
                memory = memory or holders & ~sources.on_ssd != 0
            else:
                memory = True
            near = holders & sources.near
            left = NEAR_MAX
            while near and left:
                bit = near & -near
                near ^= bit
                left -= 1
                mark: i64 = _AT_STORE if bit & sources.stores else _AT_HOST
                for place in pool.places_near(bit):
                    told_apart[place] |= mark
                    at_store, at_host = at_store or mark == _AT_STORE, at_host or mark == _AT_HOST
        alone = len(found) == 1 and not ssd and at_store != at_host
        return NETWORK if memory else SSD, ssd and memory, alone

    def cheapest(self) -> int:
        """Returns the place of the instance with the least cost, after examining those that seem to have it."""
        place = self._lowest()
        examined = self.columns.exact
        while place not in examined and len(examined) < EXAMINED_MAX and self.columns.fetches(place):
            if self.correct(place):
                place = self._lowest()
        if place not in examined and self.columns.fetches(place):
            place = self._lowest(examined)
        self.columns.cheapest = place
        return place

    def late(self, place: int) -> bool:
        """Returns whether the first token would miss the request's limit, according to the columns."""
        request, columns, state = self.request, self.columns, self.pool.prefills[place]
        if request.ttft_slo_s <= 0:
            return False
        wait_s, own_s = columns.wait_s[place], columns.transfer_s[place] + columns.prefill_s[place]
        if state.info.stages > 1:
            reused = request.reused_tokens(columns.reach[place], self.pool.layout.block_tokens)
            own_s += state.drain_s(request.prompt_tokens, reused, wait_s)
        if own_s >= NEVER_S:
            return True
        elsewhere_s = 0.0 if place == self._decodes else self._elsewhere_s
        return wait_s + columns.room_s[place] + elsewhere_s + own_s > request.ttft_limit_s(own_s)

    def cheapest_in_time(self, elsewhere_s: float, decodes: int) -> int | None:
        """Returns the place of the cheapest instance whose first token is in time, or None if none is known. If the
        decode instance is not at the place ``decodes``, ``elsewhere_s`` is the seconds until it has KV memory."""
        self._elsewhere_s, self._decodes = elsewhere_s, decodes
        self._ranked_s = self.columns.cost_s[:]
        for place in range(self._count):
            if self.late(place):
                self._ranked_s[place] = inf
        examined = self.columns.exact
        most = len(examined) + EXAMINED_MAX
        place = self._lowest()
        while self._ranked_s[place] < inf:
            if place in examined or not self.columns.fetches(place):
                return place
            if len(examined) >= most:
                place = self._lowest(examined)
                return None if self._ranked_s[place] == inf else place
            self.correct(place)
            if self.late(place):
                self._ranked_s[place] = inf
            place = self._lowest()
        return None

    def correct(self, place: int) -> bool:
        """Examines an instance that seems to fetch, and stores its exact cost. Returns whether that is higher."""
        columns, state = self.columns, self.pool.prefills[place]
        columns.exact.add(place)
        local, reach = columns.local[place], self.reach_of(place)
        transfer_s, prefill_s = 0.0, self.short_s(place, local)
        if reach > local:
            fetch_s, short_s = self.planner.fetch_s(state, local, reach), self.short_s(place, reach)
            if fetch_s + short_s < prefill_s:
                transfer_s, prefill_s = fetch_s, short_s
            else:
                reach = local
        if len(self.pool.hands_over) and self.pool.hands_over[place]:
            transfer_s += self._hand_over_s
        wait_s, behind = state.prefill_queue_s(self.now_s), 0
        if self.terms.order and state.info.short_first:
            wait_s, behind = state.loads.turn(state.row, prefill_s, self.now_s)
        seemed_s = columns.cost_s[place]
        slowed_s = prefill_s
        if len(self.pool.hands_over):
            slowed_s = 0.0 if self.pool.hands_over[place] else prefill_s - state.prefill_model.coefficients[0]
        lost_s = self.terms.others * behind * prefill_s
        lost_s += self._each_decode * float(state.loads.batch[state.row]) * slowed_s
        cost_s = wait_s + columns.room_s[place] + transfer_s + prefill_s + lost_s
        columns.reach[place], columns.wait_s[place] = reach, wait_s
        columns.transfer_s[place], columns.prefill_s[place] = transfer_s, prefill_s
        columns.cost_s[place] = self._ranked_s[place] = cost_s
        return cost_s > seemed_s

    def reach_of(self, place: int) -> int:
        """Returns how many leading blocks the instance will have after fetching all that it can."""
        state = self.pool.prefills[place]
        return self.match.extent(self.columns.local[place], self.pool.asked_by(state) & ~state.bit, FETCH_SPANS_MAX)

    def short_s(self, place: int, reach: int) -> float:
        """Returns the seconds to compute the rest of the prompt once the first ``reach`` blocks are there."""
        reused = self.request.reused_tokens(reach, self.pool.layout.block_tokens)
        return self.pool.prefills[place].prefill_model.predict_s(self.request.prompt_tokens, reused)

    def decision(self, place: int, policy: str, doubt_beyond: float | None = None) -> PlacementDecision:
        """Returns the decision to compute the prompt at this place. With ``doubt_beyond``, it may contain a doubted
        fetch (:meth:`_doubted`) of a prefix that is more than so many times as long as the local one."""
        columns, state = self.columns, self.pool.prefills[place]
        local, reach = columns.local[place], columns.reach[place]
        transfer_s, prefill_s = columns.transfer_s[place], columns.prefill_s[place]
        doubted = None if reach > local or doubt_beyond is None else self._doubted(place, doubt_beyond)
        if doubted is not None:
            reach, transfer_s, prefill_s = doubted
        fetches = self.planner.plan(state, local, reach) if reach > local else ()
        decode, tbt_s, shared = select_decode(self.request, self.pool, self.match, state, self.now_s)
        decision = PlacementDecision(
            state, decode, local, fetches, policy, columns.wait_s[place], transfer_s, prefill_s, tbt_s, shared
        )
        decision.doubts_transfer = doubted is not None
        return decision

    def _doubted(self, place: int, beyond: float) -> tuple[int, float, float] | None:
        """Returns prefix, transfer and prefill times of a fetch to be measured though predicted to be slower than
        computing; or None. Called after the choice, in which an instance with such a fetch counts as if it computed."""
        columns, state = self.columns, self.pool.prefills[place]
        local: int = columns.local[place]
        longer = local * beyond
        if self.match.blocks <= longer:
            return None
        doubt = transfer_doubt(state, self.now_s)
        if doubt >= 1:
            return None
        reach = self.reach_of(place)
        if reach <= longer:
            return None
        fetch_s, short_s = self.planner.fetch_s(state, local, reach), self.short_s(place, reach)
        if len(self.pool.hands_over) and self.pool.hands_over[place]:
            return None  # the request waits for another transfer already
        if fetch_s * doubt + short_s >= columns.prefill_s[place]:
            return None
        waits_s = columns.wait_s[place] + state.load.room_wait_ms * 1e-3
        if waits_s + fetch_s + short_s > self.request.ttft_limit_s(fetch_s + short_s):
            return None
        return reach, fetch_s, short_s
