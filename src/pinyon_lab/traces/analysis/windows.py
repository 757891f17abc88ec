"""A trace's time in windows of equal length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon.core.errors import InvalidArgument
from pinyon_lab.pictures import clock

WINDOWS_MAX = 2048
"""More are neither drawn nor read; five days of ten minutes are 720."""
DAY_S = 86400


class Windows:
    """Aligned to multiples of ``length_s`` since the trace's zero: with dates, to the clock (UTC)."""

    def __init__(self, time_s: NDArray[np.float64], length_s: float) -> None:
        """Raises :class:`InvalidArgument` if there are too many. ``time_s`` ascends."""
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
        """Where each begins; the day in front where there are several."""
        days = np.floor(self.starts_s / DAY_S)
        several = days[0] != days[-1]
        return [
            (f"day {day - days[0] + 1:.0f} " if several else "") + clock(start)
            for day, start in zip(days, self.starts_s.tolist(), strict=True)
        ]
