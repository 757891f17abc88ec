"""The highest rate at which enough requests are in time (DualMap §4.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pinyon.core.errors import InvalidArgument

__all__ = ["goodput"]

EXACT = 1.005
"""So many times too low at most."""
FACTOR_MAX = 2.0**20

Run = TypeVar("Run")


def goodput(
    served_at: Callable[[float], Run], attained: Callable[[Run], float], share: float, start: float
) -> tuple[float, Run]:
    """The rate, and what came of it. By halving, so attainment should fall as the rate grows; where it does not,
    it is one of the rates at which it crosses ``share``. Raises :class:`InvalidArgument` if there is none."""

    def enough(rate: float) -> Run | None:
        served = served_at(rate)
        return served if attained(served) >= share else None

    good, served = start, enough(start)
    if served is None:
        bad = good
        while served is None:
            bad, good = good, good / 2
            if good < start / FACTOR_MAX:
                raise InvalidArgument(f"at no rate {share:.0%} of the requests are in time", field="goodput")
            served = enough(good)
    else:
        bad = 2 * good
        while (more := enough(bad)) is not None:
            good, bad, served = bad, 2 * bad, more
            if bad > start * FACTOR_MAX:
                raise InvalidArgument("so many are in time at any rate: there is too little load", field="goodput")
    while bad > good * EXACT:
        middle = (good * bad) ** 0.5
        if (more := enough(middle)) is not None:
            good, served = middle, more
        else:
            bad = middle
    return good, served
