"""Numbers on axes: 1, 2 and 5 times powers of ten."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["round_ticks", "rounded_up", "ticks_from_zero"]

NEARLY = 1e-9
"""What rounding may have added."""


def round_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 ... from ``low`` (above 0) to ``high``, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return [step for step in steps if low * 0.999 <= step <= high * 1.001]


def rounded_up(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``value`` (above 0)."""
    decade = 10.0 ** math.floor(math.log10(value) + NEARLY)
    return next((step * decade for step in (1, 2, 5) if step * decade >= value * (1 - NEARLY)), 10 * decade)


def ticks_from_zero(values: Sequence[float], most: int = 6) -> list[float]:
    """At most so many and 0, for a linear axis; none of the values, which are not below 0, is above the last one."""
    highest = max(values, default=0.0)
    if highest < NEARLY:
        highest = 1.0
    step = rounded_up(highest / most)
    return [number * step for number in range(math.ceil(highest / step - NEARLY) + 1)]
