"""The common parts of sources of requests: ids, and users by the shares that papers print of the busiest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

from pinyon_lab.traces.formats import TraceRow


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


Series = Iterator[tuple[TraceRow, float]]
"""Requests that follow each other, each with the time of the next one in s; the last one's is infinite."""


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
