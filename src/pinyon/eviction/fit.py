"""The exponential distribution that is fitted to blocks' reuse times ("KVCache cache in the wild" §3.4, §4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

SAMPLES_MIN = 32
"""The least number of reused blocks with which a category gets a fit."""
UNKNOWN = ""
"""The name that stands for all categories without an entry of their own."""


class Fit(NamedTuple):
    """The reuse of blocks: a ``share`` of them, in [0, 1], is used again, after ``mean_s`` seconds on average."""

    share: float
    mean_s: float

    def mass(self, age_s: float, life_s: float) -> float:
        """Returns the probability that a block is used again ``age_s`` to ``age_s + life_s`` after its last use."""
        rate = -1.0 / self.mean_s
        return self.share * (math.exp(age_s * rate) - math.exp((age_s + life_s) * rate))


PRIOR = Fit(0.5, 60.0)
"""The fit of every category of which nothing is known yet, so that age decides."""


class Sums(NamedTuple):
    """The sums of one category: blocks used, blocks of these used again, and the seconds until they were."""

    used: float
    again: float
    seconds: float


def fitted(samples: Mapping[str, Sums]) -> dict[str, Fit]:
    """Returns fits by maximum likelihood, with the mean of the sample; ``""`` is all categories together.

    Categories with too few samples get no fit."""
    together = Sums(*map(sum, zip(*samples.values(), strict=True))) if samples else Sums(0, 0, 0)
    found = {category: _fit(sums) for category, sums in {**samples, UNKNOWN: together}.items()}
    return {category: fit for category, fit in found.items() if fit is not None}


def _fit(sums: Sums) -> Fit | None:
    if sums.again < SAMPLES_MIN or sums.used <= 0:
        return None
    return Fit(min(1.0, sums.again / sums.used), max(1e-3, sums.seconds / sums.again))
