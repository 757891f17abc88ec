"""The reuse by category and hour in a day's log, for a policy on the next day (appendix A.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import TURN_MAX, check_kind
from pinyon.eviction.day_fits import CATEGORIES_MAX, HOUR_S, HOURS, DayFits
from pinyon.eviction.fit import UNKNOWN, Sums, fitted
from pinyon_lab.traces.analysis.columns import Columns
from pinyon_lab.traces.analysis.uses import Blocks, walk

DAY_S = HOURS * HOUR_S


def day_fits(columns: Columns, begins_s: float = 0.0, progress: Callable[[int], None] = lambda _: None) -> DayFits:
    """Returns the fits of the uses in the trace's last 24 hours; ``begins_s``: the time of its zero since midnight. A
    reuse counts in the hour and for the category of the use before (as in Fig. 15); those after the trace's end are not
    seen. Each hour has the categories with most reuses, at most :data:`CATEGORIES_MAX` with that of all together."""
    codes, of_row = np.unique(columns.kind.astype(np.int64) << 32 | columns.turn, return_inverse=True)
    hours = ((columns.time_s + begins_s) // HOUR_S).astype(np.int64) % HOURS
    slots, size = of_row * HOURS + hours, len(codes) * HOURS
    lately = columns.time_s > columns.time_s[-1] - DAY_S
    used = np.bincount(slots[lately], columns.lengths[lately], size)
    again, seconds = np.zeros(size), np.zeros(size)
    for step in walk(columns, Blocks(columns.numbers, parts=False)):
        row, before, _, blocks = step.runs
        of, row, before = blocks[lately[before]], row[lately[before]], before[lately[before]]
        again += np.bincount(slots[before], of, size)
        seconds += np.bincount(slots[before], of * (columns.time_s[row] - columns.time_s[before]), size)
        progress(step.end)
    sums = np.stack([used, again, seconds], axis=1).reshape(-1, HOURS, 3)
    names = [_category(columns.kinds[code >> 32], code & 0xFFFFFFFF) for code in codes.tolist()]
    found = {}
    for hour in range(HOURS):
        samples = {UNKNOWN: Sums(0.0, 0.0, 0.0)}
        for at in np.argsort(-sums[:, hour, 1], kind="stable").tolist():
            known = samples.get(names[at], (0.0, 0.0, 0.0))
            samples[names[at]] = Sums(*map(sum, zip(known, sums[at, hour].tolist(), strict=True)))
        if fits := [*fitted(samples).items()]:
            found[hour] = dict(fits[:CATEGORIES_MAX])
    return DayFits(found)


def _category(kind: str, turn: int) -> str:
    """Returns :attr:`pinyon.core.request.RequestClass.category`, or ``""`` for a category that no service knows."""
    try:
        return f"{check_kind(kind, 'type')}/{turn}" if turn <= TURN_MAX else UNKNOWN
    except InvalidArgument:
        return UNKNOWN
