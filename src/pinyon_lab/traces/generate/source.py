"""The common parts of sources of requests: ids, and users by the shares that papers print of the busiest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol


class Ids:
    """Names and block ids, each given once."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block = 0
        self._name = 0

    def fresh(self, count: int) -> list[int]:
        first = self._block
        self._block += max(0, count)
        return list(range(first, self._block))

    def extended(self, kept: list[int], tokens: int) -> list[int]:
        """Returns ``kept`` and as many fresh blocks as a prompt of that many tokens needs beside it."""
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
    """The time at which ``then`` makes the next request."""
    then: Then | None = None


Then = Callable[[float, Random], Made]
"""A function that makes the next request at a given time."""


class Source(Protocol):
    begins_per_request: float
    """The number of series that begin for each request of the whole workload."""

    def begin(self, now_s: float, rng: Random) -> Made:
        """Returns the first request of a series that begins now."""
        ...


def weights(count: int, points: Sequence[tuple[float, float]], steepness: float) -> list[float]:
    """Returns the weights of ``count`` users, group by group, with the sum 1.

    The ``points`` are (share of the users, the busiest first; share of the requests that they send), rising to (1, 1).
    Within a group the first user sends ``steepness`` times as much as the last, geometrically between. The first of the
    next group may send more than that last one. Raises ``ValueError`` for an empty group, or an incomplete last one.
    """
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
    """Users, drawn by weight."""

    def __init__(self, of_each: Sequence[float]) -> None:
        self._until = list(accumulate(of_each))

    def pick(self, rng: Random) -> int:
        return min(bisect_right(self._until, rng.random() * self._until[-1]), len(self._until) - 1)
