"""The choice of the rows that a smaller trace keeps: whole users or sessions, with their reuse and at their own times.

This is the down-scaling of "KVCache cache in the wild" §4.3, which cites TraceSplitter for keeping the temporal
pattern. Times are not stretched, so bursts and the course of the day stay; the load falls as some users are absent."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces.formats import TraceRow

Unit = Literal["user", "session", "request"]
ROWS_MAX = 1 << 24
"""The maximum number of rows of a trace: some 200 bytes each, for the names of chats, make 3 GiB."""


def chosen(rows: Iterable[TraceRow], unit: Unit, factor: float, generator: random.Random) -> array[int]:
    """Returns 1 for each row that is kept, else 0. A row that names no unit is a unit by itself.

    Units are tried in a random order. A unit is kept while the rows stay within ``factor`` of all, or come nearer to
    it. A unit with more rows than are left is skipped. Raises :class:`InvalidArgument` if no row names a unit, or there
    are too many rows."""
    of = array("i")
    """The number of each row's unit, which is that of the unit's first row."""
    numbers: dict[str, int] = {}
    for row in rows:
        new = len(of)
        if new == ROWS_MAX:
            raise InvalidArgument(f"the trace has more than {ROWS_MAX:,} rows: read fewer (--limit)", field="trace")
        name = {"user": row.user, "session": row.chat, "request": ""}[unit]
        # a session has the number of its first chat, or of the one that this follows, perhaps before the trace
        first = numbers.setdefault(row.parent or name, new) if unit == "session" and name else new
        of.append(numbers.setdefault(name, first) if name else new)
    if of and not numbers and unit != "request":
        raise InvalidArgument(f"no row names a {unit}", field="by")
    sizes = Counter(of)
    order = list(sizes)
    generator.shuffle(order)
    kept, count, aim = set[int](), 0, factor * len(of)
    for each in order:
        if count + sizes[each] - aim <= aim - count:
            kept.add(each)
            count += sizes[each]
    return array("b", (each in kept for each in of))
