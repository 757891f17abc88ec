"""What sources of requests have in common: ids, and users by the shares that papers print of the busiest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol


class Ids:
    """Names and block ids, none twice."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block = 0
        self._name = 0

    def fresh(self, count: int) -> list[int]:
        first = self._block
        self._block += max(0, count)
        return list(range(first, self._block))

    def extended(self, kept: list[int], tokens: int) -> list[int]:
        """``kept`` and as many fresh ones as a prompt of that many tokens has beyond it."""
        return kept + self.fresh(-(-tokens // self.block_tokens) - len(kept))

    def name(self) -> str:
        self._name += 1
        return str(self._name)


class Made(NamedTuple):
    """A request, and what follows it."""

    input_tokens: int
    output_tokens: int
    blocks: list[int]
    kind: str
    turn: int
    chat: str
    parent: str
    user: int
    then_s: float = 0.0
    """When ``then`` makes the next one."""
    then: Then | None = None


Then = Callable[[float, Random], Made]
"""What goes on: makes a request at the time it is given."""


class Source(Protocol):
    begins_per_request: float
    """How many beginnings there are for each request of the whole workload."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """The first request of a series that begins now."""
        ...


def weights(count: int, points: Sequence[tuple[float, float]], steepness: float) -> list[float]:
    """Of ``count`` users, group by group, in all 1. ``points``: (share of the users, the busiest first; share of the
    requests that they send), rising, the last one (1, 1). Within a group the first sends ``steepness`` times what the
    last one does, geometrically between; the first of the next group may send more than that last one. Raises
    ``ValueError``."""
    result: list[float] = []
    last_share, last_sent = 0.0, 0.0
    for share, sent in points:
        members = max(1, round(share * count) - len(result)) if share < 1 else count - len(result)
        if members <= 0:
            raise ValueError(f"{count} users are too few for {points}")
        ratio = steepness ** (-1.0 / members)
        group = [ratio**rank for rank in range(members)]
        scale = (sent - last_sent) / sum(group)
        result.extend(scale * each for each in group)
        last_share, last_sent = share, sent
    if (last_share, last_sent) != (1, 1):
        raise ValueError(f"the last group is not all users: {points}")
    return result


class Users:
    """Picked by weight."""

    def __init__(self, of_each: Sequence[float]) -> None:
        self._until = list(accumulate(of_each))

    def pick(self, rng: Random) -> int:
        return min(bisect_right(self._until, rng.random() * self._until[-1]), len(self._until) - 1)
