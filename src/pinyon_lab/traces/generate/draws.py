"""Draws from distributions by what a generator's ``random()`` gives, which is the same in every version of Python."""

from __future__ import annotations

import math
from random import Random

__all__ = ["exponential", "log_normal"]


def exponential(rng: Random, mean: float) -> float:
    """Of that mean."""
    return -mean * math.log(1.0 - rng.random())


def log_normal(rng: Random, sigma: float) -> float:
    """Of mean 1, ``sigma`` that of the logarithm; nothing is drawn where that is 0."""
    if not sigma:
        return 1.0
    # Box-Muller
    normal = math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(2 * math.pi * rng.random())
    return math.exp(sigma * normal - sigma * sigma / 2)
