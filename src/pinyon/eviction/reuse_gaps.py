"""After how long a tenant uses again what it holds.

Nobody else's uses count, so that a tenant which floods the pool cannot make others' blocks look forgotten.
"""

from __future__ import annotations

import math

LONGEST_S = 1800.0
"""Of the times that are looked at."""
ROUND = 16
"""It is looked at again after so many reuses, and nothing is known before."""
RARE = 0.02
"""Of the reuses come later."""
LATER = 4
"""Times that, as none of the later ones may have been seen yet."""
SEEN_MAX = 512
"""Then older ones count half."""


class ReuseGaps:
    """Memory: one number for each power of two of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (math.ceil(math.log2(LONGEST_S)) + 1)
        self._seen = 0
        self.over_s: float | None = None
        """What has waited longer is hardly used again. None: not known."""

    def add(self, gap_s: float) -> bool:
        """Used again after so long. Whether :attr:`over_s` was looked at."""
        self._counts[min(len(self._counts) - 1, math.ceil(math.log2(max(1.0, gap_s))))] += 1
        self._seen += 1
        if self._seen % ROUND:
            return False
        if self._seen >= SEEN_MAX:
            self._counts = [count // 2 for count in self._counts]
            self._seen = sum(self._counts)
        later = 0
        at = len(self._counts)
        while later <= RARE * self._seen:
            at -= 1
            later += self._counts[at]
        self.over_s = min(LONGEST_S, LATER * 2.0**at)
        return True
