"""Who holds how much of a pool, and who is to give (the problem of FairRide, NSDI '16).

Up to :data:`GROUPS` tenants have equal shares, and nothing is taken from one who has not more than that while another
has (max-min). With more, shares would be smaller than single conversations, and keeping to them would cost more than it
is worth: then nobody may have more than 1 / :data:`FLOOD` of the pool while another wants room.
"""

from __future__ import annotations

import math
import zlib

GROUPS = 64
"""More tenants than that are put together by hash."""
FLOOD = 2
KNOWN = 4
"""Of so many groups one has to know after how long they use things again, before that says anything of the others."""
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
    """After how long a tenant uses again what it holds. Nobody else's uses count, so that a tenant which floods the
    pool cannot make others' blocks look forgotten. Memory: one number for each power of two of seconds."""

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


class TenantShares:
    """Groups of tenants are numbers below :data:`GROUPS`."""

    def __init__(self) -> None:
        self._named: dict[str, int] = {}
        self._held = [0] * GROUPS
        self._total = 0
        self._holding = 0
        """Groups that hold something."""
        self._many = False
        self._largest: int | None = None
        """What one holds at most; None: not known since something changed."""
        self._gaps: dict[int, ReuseGaps] = {}
        self._usual_s = LONGEST_S
        """A share protects so long, of whom nothing else is known."""

    def group(self, tenant: str) -> int:
        found = self._named.get(tenant)
        if found is not None:
            return found
        if len(self._named) < GROUPS:
            return self._named.setdefault(tenant, len(self._named))
        if not self._many:
            idle = next((name for name, group in self._named.items() if not self._held[group]), None)
            if idle is not None:
                group = self._named.pop(idle)
                self._gaps.pop(group, None)
                return self._named.setdefault(tenant, group)
        self._many = True
        return zlib.crc32(tenant.encode("utf-8", "surrogatepass")) % GROUPS

    def add(self, group: int, keys: int) -> None:
        """It holds so many more (or fewer)."""
        before = self._held[group]
        after = self._held[group] = before + keys
        self._total += keys
        self._holding += (after > 0) - (before > 0)
        self._largest = None

    def above(self, group: int) -> int:
        """How many keys may be taken from it now, 0: none, while others have more."""
        held = self._held[group]
        if self._holding <= 1:
            return held
        if not self._many:
            return max(0, held - self._total // self._holding)
        most = self._total // FLOOD
        if self._largest is None:
            self._largest = max(self._held)
        return max(0, held - most) if self._largest > most else held

    def again(self, group: int, gap_s: float) -> None:
        """It used what it holds so long after the last time."""
        gaps = self._gaps.get(group)
        if gaps is None:
            gaps = self._gaps[group] = ReuseGaps()
        if gaps.add(gap_s):
            known = sorted(each.over_s for each in self._gaps.values() if each.over_s is not None)
            self._usual_s = known[len(known) * 3 // 4] if len(known) >= KNOWN else LONGEST_S

    def protects_s(self, group: int) -> float:
        """What was used longer ago is hardly used again: what this tenant does decides, else what most others do, each
        of them counted once."""
        gaps = self._gaps.get(group)
        return self._usual_s if gaps is None or gaps.over_s is None else gaps.over_s
