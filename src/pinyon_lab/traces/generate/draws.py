"""Draws from distributions by a generator's ``random()``, which is the same in every version of Python."""

from __future__ import annotations

import math
from bisect import bisect_right
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


class Quantiles:
    """A distribution by quantiles, with a linear logarithm between: values from P90 to P99 spread as long tails do."""

    def __init__(self, *points: tuple[float, float]) -> None:
        """Takes ``(share, value)``, rising in both, from share 0 to 1; values are positive. Raises ``ValueError``."""
        shares, values = [share for share, _ in points], [value for _, value in points]
        if shares[:1] != [0] or shares[-1] != 1 or shares != sorted(shares):
            raise ValueError(f"no quantiles, shares do not rise from 0 to 1: {points}")
        if values[0] <= 0 or values != sorted(values):
            raise ValueError(f"no quantiles, values do not rise from above 0: {points}")
        self._points = points
        self._shares = shares
        self._logs = [math.log(value) for value in values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantiles) and self._points == other._points

    def __hash__(self) -> int:
        return hash(self._points)

    def at(self, share: float) -> float:
        """Returns the value below which that share in [0, 1) of all lies."""
        shares, logs = self._shares, self._logs
        after = min(bisect_right(shares, share), len(shares) - 1)
        span = shares[after] - shares[after - 1]
        part = (share - shares[after - 1]) / span if span else 1.0
        return math.exp(logs[after - 1] + part * (logs[after] - logs[after - 1]))
