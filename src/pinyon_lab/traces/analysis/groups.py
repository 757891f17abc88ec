"""Requests in groups: windows of equal length of a trace's time, and categories, their type and turn (§3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon.core.errors import InvalidArgument
from pinyon_lab.pictures import clock
from pinyon_lab.traces.analysis.columns import TraceColumns

WINDOWS_MAX = 2048
"""The limit of windows. More can be neither drawn nor read; five days of ten minutes are 720."""
DAY_S = 86400


class Windows:
    """The windows of a trace, aligned to multiples of ``length_s`` since its zero: with dates, to the clock (UTC)."""

    def __init__(self, time_s: NDArray[np.float64], length_s: float) -> None:
        """Assigns the rows, whose ``time_s`` ascends. Raises :class:`InvalidArgument` if there are too many windows."""
        first, last = np.floor(time_s[[0, -1]] / length_s)
        if last - first >= WINDOWS_MAX:
            raise InvalidArgument(
                f"the trace takes {last - first + 1:,.0f} windows of {length_s:g} s; {WINDOWS_MAX} are allowed "
                "(--window-s)",
                field="trace",
            )
        self.of: NDArray[np.int64] = (np.floor(time_s / length_s) - first).astype(np.int64)
        """The window of each row."""
        self.starts_s = (first + np.arange(int(last - first) + 1)) * length_s

    def __len__(self) -> int:
        return len(self.starts_s)

    def labels(self) -> list[str]:
        """Returns the start of each window; with the day before it if there are several."""
        days = np.floor(self.starts_s / DAY_S)
        several = days[0] != days[-1]
        return [
            (f"day {day - days[0] + 1:.0f} " if several else "") + clock(start)
            for day, start in zip(days, self.starts_s.tolist(), strict=True)
        ]


OTHER = "other"


class Categories:
    """Categories by name, the most frequent first; the rest is ``other``."""

    def __init__(self, columns: TraceColumns, count: int) -> None:
        codes = columns.kind.astype(np.int64) << 32 | columns.turn
        values, inverse, requests = np.unique(codes, return_inverse=True, return_counts=True)
        order = np.argsort(-requests, kind="stable")[:count]
        number = np.full(len(values), len(order), np.int32)
        number[order] = np.arange(len(order), dtype=np.int32)
        self.of: NDArray[np.int32] = number[inverse]
        """The category of each row, an index into ``names``."""
        self.names = [
            f"{columns.kinds[code >> 32] or 'request'}/{code & 0xFFFFFFFF or '–'}" for code in values[order].tolist()
        ] + ([OTHER] if len(order) < len(values) else [])


def types_by_turn(columns: TraceColumns) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """Returns type, ``single`` or ``multi``, and the rows; the most frequent type first. A single-turn request is the
    first of its session, a multi-turn request a later one (§3.1); ``all`` if turns are unknown."""
    frequent = np.argsort(-np.bincount(columns.kind, minlength=len(columns.kinds)), kind="stable")
    turns = (
        {"single": columns.turn == 1, "multi": columns.turn > 1}
        if columns.has_turns
        else {"all": np.ones(len(columns), bool)}
    )
    found = [
        (columns.kinds[kind] or "request", turn, (columns.kind == kind) & rows)
        for kind in frequent.tolist()
        for turn, rows in turns.items()
    ]
    return [each for each in found if each[2].any()]
