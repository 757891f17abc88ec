"""What a policy found of each prefill instance of a pool, in its order, for who asks why it chose as it did."""

from __future__ import annotations

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64
from numpy.typing import NDArray


class Columns:
    """What is known of so many instances, by their places in the pool: see :class:`pinyon.placement.costs.Cost`."""

    __slots__ = ("cost_s", "local", "prefill_s", "reach", "room_s", "transfer_s", "wait_s")

    def __init__(self, count: i64) -> None:
        self.local, self.reach = vec[i64]([0] * count), vec[i64]([0] * count)
        self.room_s, self.wait_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.transfer_s, self.prefill_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.cost_s = vec[float]([0.0] * count)


class Considered:
    """What is remembered of a look at all of them: nobody changes it afterwards. Blocks are leading ones of the prompt,
    times seconds. Arrays are made for who asks: mostly nobody does.

    ``exact``: places of those that fetch which were looked at by themselves; of the others a fetch is an estimate.
    ``cheapest``: the place of the one with the least cost; another one was taken for its pair, or for the limit.
    ``in_time``: another one was taken because that one would have been late.
    """

    __slots__ = ("_columns", "cheapest", "exact", "in_time")

    def __init__(self, columns: Columns, exact: set[int], cheapest: int, in_time: bool) -> None:
        self._columns, self.exact, self.cheapest, self.in_time = columns, exact, cheapest, in_time

    @property
    def expected(self) -> NDArray[np.int64]:
        """Held there, or computed for others by then."""
        return np.frombuffer(memoryview(self._columns.local), np.int64)

    @property
    def reach(self) -> NDArray[np.int64]:
        """Had once it has fetched."""
        return np.frombuffer(memoryview(self._columns.reach), np.int64)

    @property
    def rooms_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._columns.room_s), np.float64)

    @property
    def queues_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._columns.wait_s), np.float64)

    @property
    def transfers_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._columns.transfer_s), np.float64)

    @property
    def prefills_s(self) -> NDArray[np.float64]:
        return np.frombuffer(memoryview(self._columns.prefill_s), np.float64)

    @property
    def costs_s(self) -> NDArray[np.float64]:
        """All of these times, and what others lose by it."""
        return np.frombuffer(memoryview(self._columns.cost_s), np.float64)
