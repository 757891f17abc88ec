"""Tenants' shares of a pool: how much each holds, and from which of them keys may be taken (FairRide, NSDI '16).

Up to :data:`GROUPS` tenants have equal shares: nothing is taken from a tenant within its share while another holds more
than its own (max-min). With more tenants, shares would be smaller than single conversations, and enforcing them would
cost more than it is worth. Then no tenant may hold more than 1 / :data:`FLOOD` of the pool while another wants room."""

from __future__ import annotations

import math
import zlib

GROUPS = 64
"""The number of tenant groups; more tenants than that are grouped by hash."""
FLOOD = 2
KNOWN = 4
"""The least number of groups with known reuse times from which those of other groups are inferred."""
LONGEST_S = 1800.0
"""The longest reuse time that is told apart from longer ones."""
ROUND = 16
"""The number of reuses after which the estimate is renewed; before the first renewal, nothing is known."""
RARE = 0.02
"""The share of reuses that may come later than the estimate."""
LATER = 4
"""A factor on the estimate, as the latest reuses may not have been seen yet."""
SEEN_MAX = 512
"""The number of reuses after which earlier ones count half."""


class ReuseGaps:
    """The times after which a tenant reuses what it holds, counted by powers of two of seconds.

    Other tenants' uses do not count. So a tenant that floods the pool cannot make others' blocks look unused."""

    def __init__(self) -> None:
        self._counts = [0] * (math.ceil(math.log2(LONGEST_S)) + 1)
        self._seen = 0
        self.over_s: float | None = None
        """The age beyond which a key is hardly used again; None if unknown."""

    def add(self, gap_s: float) -> bool:
        """Counts a reuse, and returns whether :attr:`over_s` was renewed."""
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
    """The shares of groups of tenants; the groups are numbers below :data:`GROUPS`."""

    def __init__(self) -> None:
        self._named: dict[str, int] = {}
        self._held = [0] * GROUPS
        self._total = 0
        self._holding = 0
        """The number of groups that hold something."""
        self._many = False
        self._largest: int | None = None
        """The number of keys of the largest group; None if it has to be computed again."""
        self._gaps: dict[int, ReuseGaps] = {}
        self._usual_s = LONGEST_S
        """The seconds for which shares protect keys of a group whose own reuse times are unknown."""

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
        """Counts ``keys`` more (or fewer, if negative) that the group holds."""
        before = self._held[group]
        after = self._held[group] = before + keys
        self._total += keys
        self._holding += (after > 0) - (before > 0)
        self._largest = None

    def above(self, group: int) -> int:
        """Returns how many keys may be taken from the group now; 0 if other groups must give keys first."""
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
        """Counts a reuse by the group, ``gap_s`` seconds after the previous use."""
        gaps = self._gaps.get(group)
        if gaps is None:
            gaps = self._gaps[group] = ReuseGaps()
        if gaps.add(gap_s):
            known = sorted(each.over_s for each in self._gaps.values() if each.over_s is not None)
            self._usual_s = known[len(known) * 3 // 4] if len(known) >= KNOWN else LONGEST_S

    def protects_s(self, group: int) -> float:
        """Returns the age in seconds beyond which the group hardly uses a key again.

        If the group's own reuses are unknown, those of the other groups decide, each group counted once."""
        gaps = self._gaps.get(group)
        return self._usual_s if gaps is None or gaps.over_s is None else gaps.over_s
