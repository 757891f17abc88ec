"""The highest rate at which enough requests are in time (DualMap §4.1), and at which that is no deceit; the fewest
instances that are enough.

Where nothing is shed, a policy may look better by starving: who is late waits for ever, or the queue grows until the
trace ends. :class:`Bounds` of the longest waits and of the last quarter tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from pinyon.core.errors import InvalidArgument

EXACT = 1.005
"""So many times too low at most."""
FACTOR_MAX = 2.0**20

Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a report (:mod:`pinyon_lab.simulator.report`): at least ``share`` in time, the 99th percentile of the TTFTs at
    most ``p99_s``, and of the last quarter by arrival no more than ``drift`` less in time than of all."""

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
    """The rate, and what came of it. From ``start`` by factors of ``step`` until it lies between two, then by halving,
    so ``holds`` should be so up to some rate and not above it; else it is one of the rates at which that changes.
    Raises :class:`InvalidArgument` if there is none, at least ``least``; ``text`` says what should hold."""

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
    """Instances that attain ``share``: by doubling, then by halving, so attainment should grow with size; where it does
    not, it is one of the sizes at which it crosses ``share``. Asks for each size once. None: ``most`` are not
    enough."""
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
