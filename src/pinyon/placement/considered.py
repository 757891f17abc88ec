"""A policy's findings about each prefill instance of a pool, in the pool's order, kept for explanations."""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i64


class CostColumns:
    """The costs of a request at each of ``count`` instances, by their places in the pool, and how one was chosen.

    ``local``: leading blocks that the instance holds, or will hold; ``reach``: those that it has once it has fetched.
    Seconds: ``room_s`` until it has KV memory, ``wait_s`` until its turn comes, ``transfer_s`` to fetch, ``prefill_s``
    to compute. ``cost_s``: the sum, with the time that other requests lose.

    ``exact``: places where the fetch was priced exactly; any other fetch is an estimate. ``cheapest``: the place of the
    instance with the least cost; another may have been chosen, for its pair or for the limit. ``in_time``: True if
    another one was chosen because the cheapest would have been late."""

    __slots__ = (
        *("cheapest", "cost_s", "exact", "in_time", "local", "prefill_s", "reach", "room_s", "transfer_s", "wait_s"),
    )

    def __init__(self, count: i64) -> None:
        self.exact, self.cheapest, self.in_time = set[int](), 0, False
        self.local, self.reach = vec[i64]([0] * count), vec[i64]([0] * count)
        self.room_s, self.wait_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.transfer_s, self.prefill_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.cost_s = vec[float]([0.0] * count)

    def fetches(self, place: i64) -> bool:
        return self.reach[place] > self.local[place]
