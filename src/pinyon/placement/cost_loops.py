"""What a request costs at each prefill instance, one by one: see :mod:`pinyon.placement.costs`."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64
from numpy.typing import NDArray

from pinyon.placement.costs import FAR, Cost, Costs
from pinyon.placement.load_table import COEFFICIENTS, PREFILL_US_MAX, size_class
from pinyon.placement.policy import NANO_S, Considered
from pinyon.placement.transfer_cost import HOST, PATH_KINDS, SSD, STORE

__all__ = ["CostLoops"]

_SSD: Final = int(SSD)
_HOST: Final = int(HOST)
_STORE: Final = int(STORE)
_AT_STORE: Final = 1
_AT_HOST: Final = 2


class _InLoops:
    """Makes arrays for who asks: mostly nobody does."""

    def __init__(
        self,
        expected: vec[i64],
        reach: vec[i64],
        rooms_s: vec[float],
        queues_s: vec[float],
        transfers_s: vec[float],
        prefills_s: vec[float],
        costs_s: vec[float],
        exact: set[int],
        cheapest: int,
        in_time: bool,
    ) -> None:
        self._expected, self._reach = expected, reach
        self._rooms_s, self._queues_s, self._transfers_s, self._prefills_s = rooms_s, queues_s, transfers_s, prefills_s
        self._costs_s = costs_s
        self.exact, self.cheapest, self.in_time = exact, cheapest, in_time

    @property
    def expected(self) -> NDArray[np.int64]:
        return np.frombuffer(memoryview(self._expected), np.int64)

    @property
    def reach(self) -> NDArray[np.int64]:
        return np.frombuffer(memoryview(self._reach), np.int64)

    @property
    def rooms_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._rooms_s), np.float64)

    @property
    def queues_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._queues_s), np.float64)

    @property
    def transfers_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._transfers_s), np.float64)

    @property
    def prefills_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._prefills_s), np.float64)

    @property
    def costs_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._costs_s), np.float64)


class CostLoops(Costs):
    """Faster for few, and for any number where it is compiled."""

    def _look(self) -> None:
        pool, match = self._pool, self._match
        count: i64 = len(pool.prefills)
        self._count = count
        self._local = vec[i64]([0] * count)
        self._reach = vec[i64]([0] * count)
        self._room_s = vec[float]([0.0] * count)
        self._wait_s = vec[float]([0.0] * count)
        self._transfer_s = vec[float]([0.0] * count)
        self._prefill_s = vec[float]([0.0] * count)
        self._cost_s = vec[float]([0.0] * count)
        if match.soon.blocks:
            rows, held, places = pool.row_numbers, match.soon.held_in_loop(pool.last_row + 1), self._local
            for place in range(count):
                places[place] = held[rows[place]]
        most = self._most()
        paths = self._paths(most) if most else FAR
        told_apart = self._reach
        for places in paths.at_store:
            for place in places:
                told_apart[place] |= _AT_STORE
        for places in paths.at_host:
            for place in places:
                told_apart[place] |= _AT_HOST
        self._fill(most, self._now_s, int(paths.far), paths.ssd, paths.alone)
        self._ranked_s = self._cost_s
        if self._gains_s is not None:
            cost_s = self._cost_s
            for at, gain_s in enumerate(self._gains_s.tolist()):
                cost_s[at] -= gain_s

    def _fill(self, most: i64, now_s: float, far: i64, ssd: bool, alone: bool) -> None:
        """Of each, the times to fetch and to compute (where it seems sooner to fetch so many leading blocks, as many as
        can be asked for, that), its turn as in :meth:`LoadTable.turns`, and all that together. ``far``, ``ssd``,
        ``alone``: as of :class:`Paths`; who is on the host of a source is said where its reach will be."""
        pool, request, loads, terms = self._pool, self._request, self._pool.prefills[0].loads, self._terms
        rows, coefficients, transfer, room_s = pool.row_numbers, loads.coefficients, loads.transfer, loads.room_s
        queued_us, ends_s, reported_s = loads.queued_us, loads.ends_s, loads.reported_s
        short_first, ahead_us, behind = loads.short_first, loads.ahead_us, loads.behind
        locals_, reach, rooms_s, waits_s = self._local, self._reach, self._room_s, self._wait_s
        transfers_s, prefills_s, costs_s = self._transfer_s, self._prefill_s, self._cost_s
        order, others = terms.order, terms.others
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
            if local != last:  # most hold the same: nothing
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
            costs_s[place] = wait_s + waiting_s + transfer_s + prefill_s * (1 + others * before)

    def at(self, place: int) -> Cost:
        return Cost(
            self._local[place], self._reach[place], self._room_s[place], self._wait_s[place],
            self._transfer_s[place], self._prefill_s[place], self._cost_s[place],
        )  # fmt: skip

    def considered(self, cheapest: int, in_time: bool) -> Considered:
        return _InLoops(
            self._local, self._reach, self._room_s, self._wait_s, self._transfer_s, self._prefill_s, self._cost_s,
            self.examined, cheapest, in_time,
        )  # fmt: skip

    def _leave_out_late(self) -> None:
        self._ranked_s = self._cost_s[:]
        for place in range(self._count):
            if self.late(place):
                self._ranked_s[place] = inf

    def _leave_out(self, place: int) -> None:
        self._ranked_s[place] = inf

    def _left_out(self, place: int) -> bool:
        return self._ranked_s[place] == inf

    def _lowest(self, among: Collection[int] | None = None) -> int:
        costs_s, reach, local = self._ranked_s, self._reach, self._local
        least_s, near_s = inf, NANO_S
        for place in range(self._count):
            if costs_s[place] < least_s and (among is None or reach[place] == local[place] or place in among):
                least_s = costs_s[place]
        near_s += least_s
        rows, decoding = self._pool.row_numbers, self._pool.prefills[0].loads.decoding
        chosen: i64 = -1
        for place in range(self._count):
            if costs_s[place] <= near_s:
                if among is not None and reach[place] != local[place] and place not in among:
                    continue
                if chosen < 0 or decoding[rows[place]] < decoding[rows[chosen]]:
                    chosen = place
        return max(0, chosen)

    def _put(self, place: int, cost: Cost) -> None:
        self._reach[place], self._wait_s[place] = cost.reach, cost.wait_s
        self._transfer_s[place], self._prefill_s[place] = cost.transfer_s, cost.prefill_s
        self._cost_s[place] = self._ranked_s[place] = cost.cost_s
