"""Turns of tenants whose requests need different targets.

A *demand* says which targets a request may go to; requests with the same demand wait for the same targets. Start-time
fair queueing (Goyal et al., SIGCOMM '96) runs among the tenants of the demands that have room, so a demand without room
holds up no other. A tenant that could not go on for lack of room starts again at the others' virtual time. The turns
that it missed are lost, as if it had not asked for them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, KeysView

TENANTS_MAX = 8192
"""The number of tenants without waiting requests whose share is remembered."""


class WaitingRequest:
    """A request that waits; ``tokens`` is the most that it may use.

    Of one tenant and demand, the request with the earliest ``due_s`` goes first, then the lowest ``rank`` (unique)."""

    __slots__ = ("demand", "due_s", "number", "rank", "tenant", "tokens")

    def __init__(self, number: int, tenant: Tenant, tokens: int, due_s: float, rank: int, demand: int) -> None:
        self.number, self.tenant, self.tokens = number, tenant, tokens
        self.due_s, self.rank, self.demand = due_s, rank, demand


class Tenant:
    """The places of one tenant, and the virtual time (tokens) at which its next request starts."""

    __slots__ = ("lanes", "name", "reserved", "start", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, None] = {}
        self.waiting: OrderedDict[int, WaitingRequest] = OrderedDict()
        """Requests in order of arrival; a request that was put back is in front."""
        self.lanes: dict[int, list[tuple[float, int, WaitingRequest]]] = {}
        """The sorted due time, rank and request of all that wait, for each demand; no list is empty."""
        self.start = 0
        self.turn = 0
        """A tie-breaker among tenants with the same start: the lower goes first. Each turn renews it."""

    def __len__(self) -> int:
        return len(self.reserved) + len(self.waiting)


class TenantLengths:
    """Tenants by number of places. The tenant with most places is found without looking at all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[int, dict[Tenant, None]] = {}
        self.longest = 0

    def one(self) -> Tenant:
        """Returns the tenant that has been among those with most places for longest."""
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


class FairTurns:
    """The waiting requests, by demand and tenant.

    A step searches one sorted list for each demand of its tenant, and looks at every demand of any tenant."""

    def __init__(self) -> None:
        self._turns: dict[int, list[tuple[int, int, Tenant]]] = {}
        """The sorted start, turn and tenant of all that wait, for each demand; no list is empty."""
        self._now_tokens = 0
        self._last_turn = 0
        self._finished: OrderedDict[str, int] = OrderedDict()
        """The virtual times at which tenants without waiting requests would go on, the oldest first."""

    @property
    def demands(self) -> KeysView[int]:
        """Demands of waiting requests."""
        return self._turns.keys()

    def add(self, waiting: WaitingRequest) -> None:
        tenant, demand = waiting.tenant, waiting.demand
        if not tenant.lanes:
            tenant.start = max(self._now_tokens, self._finished.pop(tenant.name, 0))
            self._last_turn = tenant.turn = self._last_turn + 1
        lane = tenant.lanes.get(demand)
        if lane is None:
            lane = tenant.lanes[demand] = []
            insort(self._turns.setdefault(demand, []), (tenant.start, tenant.turn, tenant))
        insort(lane, (waiting.due_s, waiting.rank, waiting))

    def next(self, closed: Collection[int]) -> WaitingRequest | None:
        """Returns the request whose turn it is, among demands that are not ``closed``. The request still waits."""
        shut = frozenset(closed)
        firsts = [turns[0] for demand, turns in self._turns.items() if demand not in shut]
        if not firsts:
            return None
        lanes = min(firsts)[2].lanes
        return min([lane[0] for demand, lane in lanes.items() if demand not in shut])[2]

    def went_on(self, waiting: WaitingRequest) -> None:
        """Charges the tenant of a request that got its slot, so its next turn is later. Call :meth:`gone` next."""
        tenant = waiting.tenant
        self._now_tokens = max(self._now_tokens, tenant.start)
        self._last_turn += 1
        self._move(tenant, self._now_tokens + waiting.tokens, self._last_turn)

    def came_back(self, tenant: Tenant, tokens: int) -> None:
        """Credits the tokens of a request that came back, even where nothing was charged because nobody waited."""
        if tenant.lanes:
            self._move(tenant, tenant.start - tokens, tenant.turn)
        elif tenant.name in self._finished:
            self._finished[tenant.name] -= tokens

    def gone(self, waiting: WaitingRequest) -> None:
        """Removes a request that waits no longer."""
        tenant, demand = waiting.tenant, waiting.demand
        lane = tenant.lanes[demand]
        del lane[bisect_left(lane, (waiting.due_s, waiting.rank))]
        if lane:
            return
        del tenant.lanes[demand]
        self._take_out(tenant, demand)
        if not self._turns[demand]:
            del self._turns[demand]
        if not self._turns:  # all start as equals when there is a queue again
            self._finished.clear()
            self._now_tokens = 0
        elif not tenant.lanes:  # also if it withdrew its last request, as it keeps the turns that it had
            self._finished[tenant.name] = tenant.start
            if len(self._finished) > TENANTS_MAX:
                self._finished.popitem(last=False)

    def _move(self, tenant: Tenant, start: int, turn: int) -> None:
        for demand in tenant.lanes:
            self._take_out(tenant, demand)
            insort(self._turns[demand], (start, turn, tenant))
        tenant.start, tenant.turn = start, turn

    def _take_out(self, tenant: Tenant, demand: int) -> None:
        turns = self._turns[demand]
        del turns[bisect_left(turns, (tenant.start, tenant.turn))]
