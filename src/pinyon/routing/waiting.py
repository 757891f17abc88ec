"""Who waits for a slot: requests, in lanes of those of one tenant that need the same."""

from __future__ import annotations

import heapq
from collections import OrderedDict

STALE_MAX = 64
"""Entries of those who have gone, besides one for each that waits: more are thrown away."""


class Waiting:
    """One request that waits. ``tokens``: what it may take; ``due_s``: who is due first in its lane goes first;
    ``rank``: another one for each, the lower goes first of those that are due at once; ``waits``: until it goes."""

    __slots__ = ("demand", "due_s", "number", "rank", "tenant", "tokens", "waits")

    def __init__(self, number: int, tenant: Tenant, tokens: int, due_s: float, rank: int, demand: int) -> None:
        self.number, self.tenant, self.tokens = number, tenant, tokens
        self.due_s, self.rank, self.demand = due_s, rank, demand
        self.waits = True


class Lane:
    """Those of one tenant that need the same, by when they are due. When its last one goes it has ended for good. Who
    waits no longer is left there until it is in front, or most of them are such.

    ``listed``: which entry of its demand's heap is its present one; see :class:`pinyon.routing.fair_turns.FairTurns`.
    """

    __slots__ = ("_entries", "count", "demand", "listed", "tenant")

    def __init__(self, tenant: Tenant, demand: int) -> None:
        self._entries: list[tuple[float, int, Waiting]] = []
        self.count = 0
        """Of those that wait."""
        self.tenant = tenant
        self.demand = demand
        self.listed = 0

    def add(self, waiting: Waiting) -> None:
        heapq.heappush(self._entries, (waiting.due_s, waiting.rank, waiting))
        self.count += 1

    def first(self) -> Waiting | None:
        """The earliest; None if nobody waits."""
        entries = self._entries
        while entries and not entries[0][2].waits:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def one_went(self) -> None:
        """One of them waits no longer."""
        self.count -= 1
        if len(self._entries) > 2 * self.count + STALE_MAX:
            self._entries = [entry for entry in self._entries if entry[2].waits]
            heapq.heapify(self._entries)

    def check_integrity(self) -> None:
        """Raises :class:`AssertionError` if one is miscounted or too many have gone."""
        assert self.count == sum(1 for entry in self._entries if entry[2].waits), "those who wait are miscounted"
        assert len(self._entries) <= 2 * self.count + STALE_MAX, "most of a heap have gone"


class Tenant:
    """The places of one tenant, and where its next request starts in virtual time (tokens)."""

    __slots__ = ("lanes", "name", "reserved", "start", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, None] = {}
        self.waiting: OrderedDict[int, Waiting] = OrderedDict()
        """As they came; who was put back is in front."""
        self.lanes: dict[int, Lane] = {}
        """By demand; none is empty."""
        self.start = 0
        self.turn = 0
        """Of tenants that start at the same time, the lower goes first; it has a new one after each."""

    def __len__(self) -> int:
        return len(self.reserved) + len(self.waiting)


class TenantLengths:
    """Tenants by the number of their places. The tenant with most places is found without looking at all."""

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
