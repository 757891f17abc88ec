"""The choice of the rows that a smaller trace keeps: whole users or sessions, with their reuse and at their own times.

This is the down-scaling of "KVCache cache in the wild" §4.3, which cites TraceSplitter for keeping the temporal
pattern. Times are not stretched, so bursts and the course of the day stay; the load falls as some users are absent.
"""

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
"""The limit of rows of a trace: some 200 bytes each, for the names of chats, make 3 GiB."""


class Units:
    """The unit of each row, in order of the rows; a row that names none is a unit by itself."""

    def __init__(self, rows: Iterable[TraceRow], unit: Unit) -> None:
        """Reads the units of rows. Raises :class:`InvalidArgument` if no row names one, or there are too many rows."""
        self._of = array("i")
        self._numbers: dict[str, int] = {}
        self._unit = unit
        for row in rows:
            if len(self._of) == ROWS_MAX:
                raise InvalidArgument(f"the trace has more than {ROWS_MAX:,} rows: read fewer (--limit)", field="trace")
            self._of.append(self._number(row))
        if self._of and not self._numbers and unit != "request":
            raise InvalidArgument(f"no row names a {unit}", field="by")

    def _number(self, row: TraceRow) -> int:
        """Returns the unit's number, which is that of its first row."""
        numbers, new = self._numbers, len(self._of)
        name = row.user if self._unit == "user" else row.chat
        if self._unit == "request" or not name:
            return new
        if self._unit == "user":
            return numbers.setdefault(name, new)
        # a session has the number of its first chat, or of the chat that this one follows, perhaps before the trace
        return numbers.setdefault(name, numbers.setdefault(row.parent or name, new))

    def chosen(self, factor: float, generator: random.Random) -> array[int]:
        """Returns 1 for each row that is kept, else 0. Units are tried in a random order, and kept while the rows stay
        within ``factor`` of all, or come nearer to it. A unit with more rows than are left is skipped."""
        sizes = Counter(self._of)
        order = list(sizes)
        generator.shuffle(order)
        kept, rows, aim = set[int](), 0, factor * len(self._of)
        for unit in order:
            if rows + sizes[unit] - aim <= aim - rows:
                kept.add(unit)
                rows += sizes[unit]
        return array("b", (unit in kept for unit in self._of))
