"""What a request costs at each prefill instance, by operations on arrays: see :mod:`pinyon.placement.costs`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinyon.placement.costs import Cost, Costs
from pinyon.placement.policy import Considered
from pinyon.placement.transfer_cost import HOST, SSD, STORE

__all__ = ["CostArrays"]


class _InArrays(NamedTuple):
    expected: NDArray[np.int64]
    reach: NDArray[np.int64]
    rooms_s: NDArray[np.float64]
    queues_s: NDArray[np.float64]
    transfers_s: NDArray[np.float64]
    prefills_s: NDArray[np.float64]
    costs_s: NDArray[np.float64]
    exact: set[int]
    cheapest: int
    in_time: bool


class CostArrays(Costs):
    """Takes as long for one as for a hundred."""

    def _look(self) -> None:
        request, pool, terms, soon = self._request, self._pool, self._terms, self._match.soon
        tokens, rows = request.prompt_tokens, pool.rows
        self._local = soon.held_by_row(pool.last_row + 1).take(rows) if soon.blocks else np.zeros(len(rows), np.int64)
        reused = request.reused_tokens_of(self._local, pool.layout.block_tokens)
        self._prefill_s = pool.prefills_s(tokens, reused)
        self._transfer_s = np.zeros(len(rows))
        self._reach = self._local
        if most := self._most():
            self._fetch(most)
        self._wait_s, before = pool.turns(self._prefill_s, self._now_s, in_order=terms.order)
        self._room_s = pool.rooms_s
        self._cost_s = self._wait_s + self._room_s + self._transfer_s + self._prefill_s * (1 + terms.others * before)
        if self._gains_s is not None:
            self._cost_s -= self._gains_s
        self._ranked_s = self._cost_s

    def _fetch(self, most: int) -> None:
        """Where it seems sooner to fetch so many leading blocks, as many as can be asked for."""
        pool, block_tokens = self._pool, self._pool.layout.block_tokens
        missing = most - self._local
        size = missing * pool.layout.block_bytes
        paths = self._paths(most)
        start_s, byte_s = pool.transfers(paths.far)
        transfer_s = start_s + byte_s * size
        if paths.ssd:
            start_s, byte_s = pool.transfers(SSD)
            transfer_s = np.minimum(transfer_s, start_s + byte_s * size)
        for kind, near in ((STORE, paths.at_store), (HOST, paths.at_host)):
            if near:
                places = np.concatenate([np.frombuffer(memoryview(each), np.int64) for each in near])
                start_s, byte_s = pool.transfers(kind)
                own_s = (start_s + byte_s * size)[places]
                transfer_s[places] = own_s if paths.alone else np.minimum(transfer_s[places], own_s)
        tokens = self._request.prompt_tokens
        prefill_s = pool.prefills_s(tokens, self._request.reused_tokens(most, block_tokens))
        sooner = (missing > 0) & (transfer_s + prefill_s < self._prefill_s)
        self._reach = np.where(sooner, most, self._local)
        self._transfer_s = np.where(sooner, transfer_s, 0.0)
        self._prefill_s = np.where(sooner, prefill_s, self._prefill_s)

    def at(self, place: int) -> Cost:
        return Cost(
            int(self._local[place]), int(self._reach[place]), float(self._room_s[place]), float(self._wait_s[place]),
            float(self._transfer_s[place]), float(self._prefill_s[place]), float(self._cost_s[place]),
        )  # fmt: skip

    def considered(self, cheapest: int, in_time: bool) -> Considered:
        return _InArrays(
            self._local, self._reach, self._room_s, self._wait_s, self._transfer_s, self._prefill_s, self._cost_s,
            self.examined, cheapest, in_time,
        )  # fmt: skip

    def _leave_out_late(self) -> None:
        owns_s = self._transfer_s + self._prefill_s
        for place in self._pool.pipelines:
            owns_s[place] += self._drain_s(place, self.at(place))
        ttfts_s = self._wait_s + self._room_s + owns_s + self._elsewhere_s
        if self._decodes >= 0:
            ttfts_s[self._decodes] -= self._elsewhere_s
        self._ranked_s = np.where(ttfts_s > self._request.ttft_limits_s(owns_s), np.inf, self._cost_s)

    def _leave_out(self, place: int) -> None:
        self._ranked_s[place] = np.inf

    def _left_out(self, place: int) -> bool:
        return bool(self._ranked_s[place] == np.inf)

    def _lowest(self, among: Collection[int] | None = None) -> int:
        if among is None:
            return self._pool.place_of_lowest(self._ranked_s)
        allowed = self._reach == self._local
        allowed[list(among)] = True
        return self._pool.place_of_lowest(np.where(allowed, self._ranked_s, np.inf))

    def _put(self, place: int, cost: Cost) -> None:
        self._reach[place], self._wait_s[place] = cost.reach, cost.wait_s
        self._transfer_s[place], self._prefill_s[place] = cost.transfer_s, cost.prefill_s
        self._cost_s[place] = self._ranked_s[place] = cost.cost_s
