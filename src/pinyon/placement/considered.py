"""What a policy found of each prefill instance of a pool, in its order, for who asks why it chose as it did."""

from __future__ import annotations

from typing import NamedTuple

from librt.vecs import vec
from mypy_extensions import i64


class Cost:
    """Of one instance: leading blocks that it holds, or will (``local``), and that it has once it has fetched
    (``reach``); seconds until it has KV memory, until its turn comes, to fetch and to compute; and what all that costs,
    with what others lose."""

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


class Columns:
    """The :class:`Cost` of so many instances, by their places in the pool."""

    __slots__ = ("cost_s", "local", "prefill_s", "reach", "room_s", "transfer_s", "wait_s")

    def __init__(self, count: i64) -> None:
        self.local, self.reach = vec[i64]([0] * count), vec[i64]([0] * count)
        self.room_s, self.wait_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.transfer_s, self.prefill_s = vec[float]([0.0] * count), vec[float]([0.0] * count)
        self.cost_s = vec[float]([0.0] * count)

    def at(self, place: int) -> Cost:
        """As far as it is known."""
        return Cost(
            self.local[place], self.reach[place], self.room_s[place], self.wait_s[place],
            self.transfer_s[place], self.prefill_s[place], self.cost_s[place],
        )  # fmt: skip


class Considered(NamedTuple):
    """What is remembered of a look at all of them: nobody changes it afterwards."""

    columns: Columns
    exact: set[int]
    """Places of those that fetch which were looked at by themselves; of the others a fetch is an estimate."""
    cheapest: int
    """The place of the one with the least cost; another one was taken for its pair, or for the limit."""
    in_time: bool
    """Another one was taken because that one would have been late."""
