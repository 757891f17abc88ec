"""A policy's findings about each prefill instance of a pool, in the pool's order, kept for explanations."""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i64


class Cost:
    """The cost of a request at one instance. ``local``: leading blocks that the instance holds, or will hold;
    ``reach``: those that it has once it has fetched. Seconds: ``room_s`` until it has KV memory, ``wait_s`` until its
    turn comes, ``transfer_s`` to fetch, ``prefill_s`` to compute. ``cost_s``: the sum, with the time that other
    requests lose."""

    __slots__ = ("cost_s", "local", "prefill_s", "reach", "room_s", "transfer_s", "wait_s")

    def __init__(
        self,
        local: int,
        reach: int,
        room_s: float,
        wait_s: float,
        transfer_s: float,
        prefill_s: float,
        cost_s: float,
    ) -> None:
        self.local, self.reach, self.room_s, self.wait_s = local, reach, room_s, wait_s
        self.transfer_s, self.prefill_s, self.cost_s = transfer_s, prefill_s, cost_s

    @property
    def fetches(self) -> bool:
        return self.reach > self.local


class CostColumns:
    """The :class:`Cost` of ``count`` instances as columns, by their places in the pool, and how one was chosen.

    ``exact``: places where the fetch was priced exactly; any other fetch is an estimate. ``cheapest``: the place of the
    instance with the least cost; another may have been chosen, for its pair or for the limit. ``in_time``: True if
    another one was chosen because the cheapest would have been late.
    """

    __slots__ = (
        *("cheapest", "cost_s", "exact", "in_time", "local", "prefill_s", "reach", "room_s", "transfer_s", "wait_s"),
    )

    def __init__(self, count: i64) -> None:
        self.exact, self.cheapest, self.in_time = set[int](), 0, False
        self.local, self.reach = vec[i64]([0] * count), vec[i64]([0] * count)
        self.room_s, self.wait_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.transfer_s, self.prefill_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.cost_s = vec[float]([0.0] * count)

    def at(self, place: int) -> Cost:
        """Returns the cost at one place, as far as it is known."""
        return Cost(
            self.local[place], self.reach[place], self.room_s[place], self.wait_s[place],
            self.transfer_s[place], self.prefill_s[place], self.cost_s[place],
        )  # fmt: skip
