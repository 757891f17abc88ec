"""The exponential that blocks' reuse times are fitted with ("KVCache cache in the wild" §3.4, §4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

SAMPLES_MIN = 32
"""Blocks used again; of a category with fewer nothing is said."""
UNKNOWN = ""
"""Stands for all that is not named."""


class Fit(NamedTuple):
    """Blocks used again: ``share`` of all in [0, 1], after ``mean_s`` on average."""

    share: float
    mean_s: float

    def mass(self, age_s: float, life_s: float) -> float:
        """Probability that one is used again between ``age_s`` and ``age_s + life_s`` after its last use."""
        rate = -1.0 / self.mean_s
        return self.share * (math.exp(age_s * rate) - math.exp((age_s + life_s) * rate))


PRIOR = Fit(0.5, 60.0)
"""Of what nothing is known yet: one for all, so that age decides."""


class Sums(NamedTuple):
    """Of one category: blocks used, those of them used again, the seconds these took."""

    used: float
    again: float
    seconds: float


def fitted(samples: Mapping[str, Sums]) -> dict[str, Fit]:
    """Exponentials by maximum likelihood: their mean is that of the sample. ``""`` is of all together; of a category,
    or of all, with too few samples nothing is said."""
    together = Sums(*map(sum, zip(*samples.values(), strict=True))) if samples else Sums(0, 0, 0)
    found = {category: _fit(sums) for category, sums in {**samples, UNKNOWN: together}.items()}
    return {category: fit for category, fit in found.items() if fit is not None}


def _fit(sums: Sums) -> Fit | None:
    if sums.again < SAMPLES_MIN or sums.used <= 0:
        return None
    return Fit(min(1.0, sums.again / sums.used), max(1e-3, sums.seconds / sums.again))
