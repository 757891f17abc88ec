"""Tenants by the number of their places."""

from __future__ import annotations

from pinyon.routing.waiting import Tenant


class TenantLengths:
    """The tenant with most places is found without looking at all."""

    def __init__(self) -> None:
        self._tenants: dict[int, dict[Tenant, None]] = {}
        self.longest = 0

    def one(self) -> Tenant:
        """Of the longest ones, the one that has been that for longest."""
        return next(iter(self._tenants[self.longest]))

    def moved(self, tenant: Tenant, before: int, after: int) -> None:
        """By one place."""
        if before:
            left = self._tenants[before]
            del left[tenant]
            if not left:
                del self._tenants[before]
        if after:
            self._tenants.setdefault(after, {})[tenant] = None
        if after > self.longest or (before == self.longest and before not in self._tenants):
            self.longest = after
