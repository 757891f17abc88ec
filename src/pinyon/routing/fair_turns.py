"""Turns of tenants whose requests need different targets.

A *demand* says which targets a request may go to; requests with the same demand wait for the same. Start-time fair
queueing (Goyal et al., SIGCOMM '96) goes on among the tenants of the demands that have room: a demand that has none
holds up nobody else. A tenant that could not go on for lack of room starts again where the others are. The turns it
missed are lost, like any that were not asked for.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, KeysView

from pinyon.routing.waiting import STALE_MAX, Tenant, TenantLane, WaitingRequest

TENANTS_MAX = 8192
"""Tenants without a place whose share is remembered."""


class _Demand:
    """The lanes of all tenants with the same demand, by whose turn it is.

    A heap has one valid entry for each lane. After a tenant's turn, its entries are too early: each is put where it
    belongs when it comes to the front.
    """

    __slots__ = ("_turns", "lanes")

    def __init__(self) -> None:
        self._turns: list[tuple[int, int, int, TenantLane]] = []  # start, turn, serial of the lane's entry, lane
        self.lanes = 0

    def enlist(self, lane: TenantLane, serial: int) -> None:
        """Adds an entry with a new ``serial`` for the lane, which voids its earlier entry."""
        lane.listed = serial
        heapq.heappush(self._turns, (lane.tenant.start, lane.tenant.turn, serial, lane))
        self._tidy()

    def one_ended(self) -> None:
        """Subtracts a lane that has become empty."""
        self.lanes -= 1
        self._tidy()

    def first(self) -> TenantLane:
        """Returns the lane whose turn it is; there must be one."""
        turns = self._turns
        while True:
            start, _, serial, lane = turns[0]
            tenant = lane.tenant
            if not lane.count or lane.listed != serial:
                heapq.heappop(turns)
            elif start != tenant.start:
                heapq.heapreplace(turns, (tenant.start, tenant.turn, serial, lane))
            else:
                return lane

    def _tidy(self) -> None:
        if len(self._turns) > 2 * self.lanes + STALE_MAX:
            self._turns = self._valid()
            heapq.heapify(self._turns)

    def _valid(self) -> list[tuple[int, int, int, TenantLane]]:
        return [entry for entry in self._turns if entry[3].count and entry[3].listed == entry[2]]

    def check_integrity(self) -> None:
        valid = self._valid()
        assert len(valid) == len({id(entry[3]) for entry in valid}) == self.lanes > 0, "a turn is lost"
        assert len(self._turns) <= 2 * self.lanes + STALE_MAX, "most turns are void"
        for start, turn, _, lane in valid:
            assert (start, turn) <= (lane.tenant.start, lane.tenant.turn), "a turn comes too late"


class FairTurns:
    """The waiting requests, by demand and tenant.

    A step costs O(log n) for each demand that its tenant waits with, and a look at each demand of anybody.
    """

    def __init__(self) -> None:
        self._demands: dict[int, _Demand] = {}
        self._now_tokens = 0
        self._last_turn = 0
        self._last_serial = 0
        self._finished: OrderedDict[str, int] = OrderedDict()
        """Virtual times at which tenants that do not wait would go on, the oldest first."""

    @property
    def demands(self) -> KeysView[int]:
        """Demands of waiting requests."""
        return self._demands.keys()

    def add(self, waiting: WaitingRequest) -> None:
        tenant, demand = waiting.tenant, waiting.demand
        if not tenant.lanes:
            tenant.start = max(self._now_tokens, self._finished.pop(tenant.name, 0))
            self._last_turn = tenant.turn = self._last_turn + 1
        lane = tenant.lanes.get(demand)
        if lane is not None:
            lane.add(waiting)
            return
        lane = tenant.lanes[demand] = TenantLane(tenant, demand)
        lane.add(waiting)
        those = self._demands.get(demand)
        if those is None:
            those = self._demands[demand] = _Demand()
        those.lanes += 1
        self._enlist(those, lane)

    def next(self, closed: Collection[int]) -> WaitingRequest | None:
        """Returns the request whose turn it is, among demands that are not ``closed``. The request still waits."""
        shut = frozenset(closed)
        best: TenantLane | None = None
        for demand, those in self._demands.items():
            if demand not in shut:
                lane = those.first()
                if best is None or _before(lane.tenant, best.tenant):
                    best = lane
        if best is None:
            return None
        found = best.first()
        for demand, lane in best.tenant.lanes.items():
            if lane is not best and demand not in shut:
                other = lane.first()
                if found is None or (other is not None and _due_before(other, found)):
                    found = other
        return found

    def went_on(self, waiting: WaitingRequest) -> None:
        """Charges the tenant of a request that got its slot, so its next turn is later. Call :meth:`gone` next."""
        tenant = waiting.tenant
        self._now_tokens = max(self._now_tokens, tenant.start)
        tenant.start = self._now_tokens + waiting.tokens
        self._last_turn = tenant.turn = self._last_turn + 1

    def came_back(self, tenant: Tenant, tokens: int) -> None:
        """Credits the tokens of a request that came back, even where nothing was charged because nobody waited."""
        if tenant.lanes:
            tenant.start -= tokens
            for demand, lane in tenant.lanes.items():
                self._enlist(self._demands[demand], lane)
        elif tenant.name in self._finished:
            self._finished[tenant.name] -= tokens

    def gone(self, waiting: WaitingRequest) -> None:
        """Removes a request that waits no longer."""
        tenant = waiting.tenant
        lane = tenant.lanes[waiting.demand]
        lane.one_went()
        if lane.count:
            return
        del tenant.lanes[waiting.demand]
        those = self._demands[waiting.demand]
        those.one_ended()
        if not those.lanes:
            del self._demands[waiting.demand]
        if not self._demands:  # all start equal when there is a queue again
            self._finished.clear()
            self._now_tokens = 0
        elif not tenant.lanes:  # also if it withdrew its last request: it has had its turns
            self._finished[tenant.name] = tenant.start
            if len(self._finished) > TENANTS_MAX:
                self._finished.popitem(last=False)

    def _enlist(self, those: _Demand, lane: TenantLane) -> None:
        self._last_serial += 1
        those.enlist(lane, self._last_serial)

    def check_integrity(self, tenants: Collection[Tenant]) -> None:
        """Raises :class:`AssertionError` if a waiting request is not lined up. ``tenants``: all with a place."""
        lanes = [lane for tenant in tenants for lane in tenant.lanes.values()]
        assert all(lane.count for lane in lanes), "an empty lane is kept"
        assert sum(lane.count for lane in lanes) == sum(len(tenant.waiting) for tenant in tenants), "a lane is lost"
        for lane in lanes:
            lane.check_integrity()
        assert {lane.demand for lane in lanes} == self._demands.keys(), "a demand is lost"
        for demand, those in self._demands.items():
            assert those.lanes == sum(1 for lane in lanes if lane.demand == demand), "lanes are miscounted"
            those.check_integrity()


def _before(one: Tenant, other: Tenant) -> bool:
    return one.start < other.start or (one.start == other.start and one.turn < other.turn)


def _due_before(one: WaitingRequest, other: WaitingRequest) -> bool:
    return one.due_s < other.due_s or (one.due_s == other.due_s and one.rank < other.rank)
