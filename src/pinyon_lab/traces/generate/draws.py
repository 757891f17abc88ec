"""Draws from distributions and of users by a generator's ``random()``, which is the same in every version of Python;
and ids."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from random import Random


def exponential(rng: Random, mean: float) -> float:
    """Draws from an exponential distribution of this mean."""
    return -mean * math.log(1.0 - rng.random())


def log_normal(rng: Random, sigma: float) -> float:
    """Draws from a log-normal distribution of mean 1; ``sigma`` is that of the logarithm. 0: nothing is drawn."""
    if not sigma:
        return 1.0
    # Box-Muller
    normal = math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(2 * math.pi * rng.random())
    return math.exp(sigma * normal - sigma * sigma / 2)


class Quantiles(tuple[tuple[float, float], ...]):
    """A distribution by quantiles, with a linear logarithm between: values from P90 to P99 spread as long tails do."""

    __slots__ = ()

    def __new__(cls, *points: tuple[float, float]) -> Quantiles:
        """Takes ``(share, value)``, rising in both, from share 0 to 1; values are positive. Raises ``ValueError``."""
        shares, values = [share for share, _ in points], [value for _, value in points]
        if shares[:1] != [0] or shares[-1] != 1 or shares != sorted(shares):
            raise ValueError(f"no quantiles, shares do not rise from 0 to 1: {points}")
        if values[0] <= 0 or values != sorted(values):
            raise ValueError(f"no quantiles, values do not rise from above 0: {points}")
        return super().__new__(cls, points)

    def at(self, share: float) -> float:
        """Returns the value below which that share in [0, 1) of all lies."""
        after = min(bisect_right(self, share, key=itemgetter(0)), len(self) - 1)
        (low, least), (high, most) = self[after - 1], self[after]
        part = (share - low) / (high - low) if high > low else 1.0
        return math.exp(math.log(least) + part * (math.log(most) - math.log(least)))


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


class Users:
    """Users, drawn by weight."""

    def __init__(self, of_each: Sequence[float]) -> None:
        self._until = list(accumulate(of_each))

    def pick(self, rng: Random) -> int:
        return min(bisect_right(self._until, rng.random() * self._until[-1]), len(self._until) - 1)
