"""Searches for the highest rate at which enough requests are in time (DualMap §4.1), and for the fewest instances.

If no request is shed, a policy may look better by starving some: late requests wait for ever, or the queue grows until
the trace ends. The :class:`Bounds` on the longest waits and on the last quarter reveal that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from pinyon.core.errors import InvalidArgument

EXACT = 1.005
"""The greatest factor by which a rate that is found may be too low."""
FACTOR_MAX = 2.0**20

Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a report (:mod:`pinyon_lab.simulator.report`): the least ``share`` of requests in time, and the
    greatest 99th percentile of TTFTs, ``p99_s``. The share of the last quarter by arrival may be lower than that of all
    by at most ``drift``."""

    share: float
    p99_s: float = inf
    drift: float = 1.0

    def hold(self, report: Mapping[str, float]) -> bool:
        attained = report["attainment"]
        if attained < self.share or report.get("p99_s", inf) > self.p99_s:
            return False
        return report.get("attainment_last_quarter", 0.0) >= attained - self.drift


def goodput(
    served_at: Callable[[float], Run],
    holds: Callable[[Run], bool],
    start: float,
    text: str = "",
    step: float = 2.0,
    least: float = 0.0,
) -> tuple[float, Run]:
    """Returns the highest rate at which ``holds`` is true, and the run at that rate.

    The search multiplies or divides ``start`` by ``step`` until the rate lies between two values, then bisects. So
    ``holds`` should be true up to some rate and false above it; otherwise, the result is one of the rates where it
    changes. Raises :class:`InvalidArgument` if no rate from ``least`` on will do, or all; ``text`` says what should."""

    def enough(rate: float) -> Run | None:
        served = served_at(rate)
        return served if holds(served) else None

    good, served = start, enough(start)
    if served is None:
        bad = good
        while served is None:
            bad, good = good, good / step
            if good < max(least, start / FACTOR_MAX):
                raise InvalidArgument(f"at no rate are {text or 'enough requests in time'}", field="goodput")
            served = enough(good)
    else:
        bad = step * good
        while (more := enough(bad)) is not None:
            good, bad, served = bad, step * bad, more
            if bad > start * FACTOR_MAX:
                raise InvalidArgument("so many are in time at any rate: there is too little load", field="goodput")
    while bad > good * EXACT:
        middle = (good * bad) ** 0.5
        if (more := enough(middle)) is not None:
            good, served = middle, more
        else:
            bad = middle
    return good, served


def fewest(attained: Callable[[int], float], share: float, most: int) -> int | None:
    """Returns the fewest instances that attain ``share``; None: ``most`` are not enough.

    The search doubles, then bisects, and tries no size twice. Attainment should grow with size; if it does not, the
    result is one of the sizes at which attainment crosses ``share``."""
    few, many = 0, 1
    while attained(many) < share:
        if many == most:
            return None
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        if attained(middle) >= share:
            many = middle
        else:
            few = middle
    return many
