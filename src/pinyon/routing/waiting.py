"""Requests that wait for a slot, in lanes of one tenant and one demand."""

from __future__ import annotations

import heapq
from collections import OrderedDict

STALE_MAX = 64
"""Entries of requests that have gone, besides one for each that waits; more are thrown away."""


class WaitingRequest:
    """A request that waits, with the ``tokens`` it may take.

    In its lane, the earliest ``due_s`` goes first, then the lowest ``rank``, which is unique. ``waits``: not gone yet.
    """

    __slots__ = ("demand", "due_s", "number", "rank", "tenant", "tokens", "waits")

    def __init__(self, number: int, tenant: Tenant, tokens: int, due_s: float, rank: int, demand: int) -> None:
        self.number, self.tenant, self.tokens = number, tenant, tokens
        self.due_s, self.rank, self.demand = due_s, rank, demand
        self.waits = True


class TenantLane:
    """The requests of one tenant with the same demand, by due time. An empty lane has ended for good.

    A request that waits no longer stays until it is in front, or until most have gone. The ``listed`` entry of its
    demand's heap is its present one; see :class:`pinyon.routing.fair_turns.FairTurns`.
    """

    __slots__ = ("_entries", "count", "demand", "listed", "tenant")

    def __init__(self, tenant: Tenant, demand: int) -> None:
        self._entries: list[tuple[float, int, WaitingRequest]] = []
        self.count = 0
        """Requests that still wait."""
        self.tenant = tenant
        self.demand = demand
        self.listed = 0

    def add(self, waiting: WaitingRequest) -> None:
        heapq.heappush(self._entries, (waiting.due_s, waiting.rank, waiting))
        self.count += 1

    def first(self) -> WaitingRequest | None:
        """Returns the earliest request, or None if none waits."""
        entries = self._entries
        while entries and not entries[0][2].waits:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def one_went(self) -> None:
        """Counts a request out that waits no longer."""
        self.count -= 1
        if len(self._entries) > 2 * self.count + STALE_MAX:
            self._entries = [entry for entry in self._entries if entry[2].waits]
            heapq.heapify(self._entries)

    def check_integrity(self) -> None:
        """Raises :class:`AssertionError` if a request is miscounted or too many have gone."""
        assert self.count == sum(1 for entry in self._entries if entry[2].waits), "those who wait are miscounted"
        assert len(self._entries) <= 2 * self.count + STALE_MAX, "most of a heap have gone"


class Tenant:
    """The places of one tenant, and where its next request starts in virtual time (tokens)."""

    __slots__ = ("lanes", "name", "reserved", "start", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, None] = {}
        self.waiting: OrderedDict[int, WaitingRequest] = OrderedDict()
        """Requests in the order they came; a request that was put back is in front."""
        self.lanes: dict[int, TenantLane] = {}
        """Lanes by demand; none is empty."""
        self.start = 0
        self.turn = 0
        """A tie-breaker among tenants that start at the same time: the lower goes first. It is new after each turn."""

    def __len__(self) -> int:
        return len(self.reserved) + len(self.waiting)


class TenantLengths:
    """Tenants by their number of places. The tenant with most places is found without looking at all."""

    def __init__(self) -> None:
        self._tenants: dict[int, dict[Tenant, None]] = {}
        self.longest = 0

    def one(self) -> Tenant:
        """Returns the tenant that has been one of the longest for longest."""
        return next(iter(self._tenants[self.longest]))

    def moved(self, tenant: Tenant, before: int, after: int) -> None:
        """Moves a tenant from ``before`` to ``after`` places, which differ by one."""
        if before:
            left = self._tenants[before]
            del left[tenant]
            if not left:
                del self._tenants[before]
        if after:
            self._tenants.setdefault(after, {})[tenant] = None
        if after > self.longest or (before == self.longest and before not in self._tenants):
            self.longest = after
