"""The queue in front of everything: fair between tenants, first come, first served within one, with a bound.

Requests are numbers, so calls can be recorded and replayed. These rules keep requests out of each other's way:

- **Next request**: start-time fair queueing (Goyal et al., SIGCOMM '96). That is the virtual token counter of
  "Fairness in serving large language models" (OSDI '24), charged when a request gets its slot. A tenant that begins to
  wait starts where the others are, so nothing can be saved up; while nobody waits, nothing is counted.
- **Refusal**: when all places are taken, a tenant that holds at least two fewer than the longest one takes over
  that one's newest place. One tenant alone may fill the queue, but does not keep others out.
- **Room** (selective pushing, SkyWalker §3.3 and §4.1): a request waits for a slot, and for room at one of the targets
  that it may go to. Its *demand* says which: equal demands wait for the same targets. The caller says which demands
  have no room now; they hold up no others, of the same tenant or of another.
- **Urgency**: a request of priority ``p`` goes as if it had come ``p * ageing_s`` seconds later, within its tenant. The
  urgent go first, and nobody waits forever."""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView

from pinyon.core.errors import ResourceExhausted
from pinyon.core.request import check_priority
from pinyon.routing.fair_turns import FairTurns, Tenant, TenantLengths, WaitingRequest

AGEING_S = 0.1
"""Seconds that one level of priority is worth. The most urgent go before what came in the last 100 s."""
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 30.0
_SMOOTHING = 0.1
"""Weight of the last gap in the mean time between two requests that go on."""
_PUT_BACK = -(1 << 62)
"""An offset on the ranks of requests that are put back, so that they precede all that came."""


class QueuePace:
    """The mean time between two requests that go on, while others wait: how long the next takes.

    Requests that go at the same moment share the time since the moment before, as room is found for many at once."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        """The mean; 0 means unknown."""
        self._last_s = 0.0
        self._together = 0
        """Requests that went on at ``_last_s``; 0 if none has since the queue began."""

    def went_on(self, now_s: float) -> None:
        if self._together and now_s > self._last_s:
            self._gap_s = self._with(now_s)
            self._together = 0
        if not self._together:
            self._last_s = now_s
        self._together += 1

    def came_back(self) -> None:
        """Takes back a request that went on and did not get far."""
        if self._together > 1:
            self._together -= 1

    def stopped(self) -> None:
        """Notes that nobody waits."""
        self._together = 0

    def gap_s(self, now_s: float | None = None) -> float:
        """Returns the mean gap in seconds; with ``now_s``, no less than it would be if a request went on now."""
        if now_s is None or not self._together:
            return self._gap_s
        return max(self._gap_s, self._with(now_s))

    def _with(self, now_s: float) -> float:
        gap_s = max(0.0, now_s - self._last_s) / self._together
        weight = 1.0 - (1.0 - _SMOOTHING) ** self._together
        return self._gap_s + weight * (gap_s - self._gap_s) if self._gap_s else gap_s


class RequestQueue:
    """A queue of ``slots`` requests in flight and ``limit`` more places, for requests that wait or are being prepared.

    Free slots are further places for requests that wait for room.

    ``reserve`` → ``enter`` → (wait for another's ``leave``, or ``next``) → ``leave``; ``cancel`` gives a place back
    before that, and ``put_back`` a slot for a place.

    A slot may stay free while no waiting request has room. Whenever there may be room for more, and after a ``leave``,
    call ``next`` until it returns None."""

    def __init__(self, slots: int, limit: int, ageing_s: float = AGEING_S) -> None:
        """Sets the seconds ``ageing_s`` that one level of priority is worth (0: none). Raises :class:`ValueError`."""
        if not 0.0 <= ageing_s < math.inf:
            raise ValueError(f"ageing_s must be a non-negative number, got {ageing_s}")
        self._slots = slots
        self._limit = limit
        self._room = slots + limit
        self._ageing_s = ageing_s
        self._places: dict[int, Tenant] = {}
        self._tenants: dict[str, Tenant] = {}
        self._lengths = TenantLengths()
        self._turns = FairTurns()
        self._pace = QueuePace()
        self._last_rank = 0
        self._now_s = -math.inf
        """The latest time that a caller passed."""
        self.in_flight = 0
        self.queued = 0
        """Requests that wait for a slot."""

    def reserve(self, number: int, tenant: str, now_s: float) -> int | None:
        """Takes a place. Returns the number of the request that lost its place for it, if one did.

        Raises :class:`ResourceExhausted` when the queue is full. No two requests with a place have the same number."""
        self._check_new(number)
        if now_s > self._now_s:
            self._now_s = now_s
        held, out = self._tenants.get(tenant), None
        if self.in_flight + len(self._places) >= self._room:
            self.check(tenant)
            longest = self._lengths.one()
            out = next(reversed(longest.reserved or longest.waiting))
            self._remove(out)
        if held is None:
            held = self._tenants[tenant] = Tenant(tenant)
        held.reserved[number] = None
        self._placed(number, held)
        return out

    def check(self, tenant: str) -> None:
        """Raises as :meth:`reserve` would now."""
        if self.in_flight + len(self._places) >= self._room:
            held = self._tenants.get(tenant)
            if self._lengths.longest < (len(held) if held is not None else 0) + 2:
                raise self.full()

    @property
    def has_spare(self) -> bool:
        """True if a slot is free, and a place that no request would have to give up for it."""
        return self.in_flight < self._slots and self.in_flight + len(self._places) < self._room

    @property
    def can_go_on(self) -> bool:
        """True if a slot is free while requests wait: for room, if :meth:`next` was asked last."""
        return self.queued > 0 and self.in_flight < self._slots

    @property
    def waiting_demands(self) -> KeysView[int]:
        """Demands of waiting requests, the only ones whose room matters to :meth:`next`."""
        return self._turns.demands

    def full(self) -> ResourceExhausted:
        """Returns the error for requests that get no place, or lose theirs."""
        # With free slots, requests wait for room: the time since there was some says more than the mean of the past.
        gap_s = self._pace.gap_s(self._now_s if self.in_flight < self._slots else None)
        wait_s = min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, len(self._places) * gap_s))
        return ResourceExhausted(
            f"The queue is full ({self._limit} requests). Please try again later.", retry_after_s=wait_s
        )

    def enter(
        self, number: int, tokens: int, now_s: float, *, priority: int = 0, demand: int = 0, open: bool = True
    ) -> bool:
        """Returns whether the request, which is ready and has a place, gets a slot now; otherwise it waits.

        ``tokens``, prompt and generation, measure its tenant's share. ``open``: its demand has room now, but not for a
        newcomer while another waits with the same demand. Raises :class:`InvalidArgument` for an unknown priority."""
        tenant = self._places.get(number)
        if tenant is None or number not in tenant.reserved:
            raise ValueError(f"request {number} has no reserved place")
        if priority:
            check_priority(priority, "priority")
        if now_s > self._now_s:
            self._now_s = now_s
        if open and self.in_flight < self._slots and not (self.queued and demand in self._turns.demands):
            self._remove(number)
            self.in_flight += 1
            return True
        del tenant.reserved[number]
        self._last_rank = rank = self._last_rank + 1
        due_s = now_s + priority * self._ageing_s
        self._wait(WaitingRequest(number, tenant, max(1, tokens), due_s, rank, demand))
        return False

    def next_demand(self, closed: Collection[int] = ()) -> int | None:
        """Returns the demand of the request that :meth:`next` would return, or None. Changes nothing."""
        waiting = self._turns.next(closed) if self.can_go_on else None
        return None if waiting is None else waiting.demand

    def next(self, now_s: float, closed: Collection[int] = ()) -> int | None:
        """Gives a slot to the next request whose demand is not ``closed`` (no room); returns its number or None."""
        self._now_s = max(self._now_s, now_s)
        if not self.can_go_on:
            return None
        waiting = self._turns.next(closed)
        if waiting is None:
            return None
        self._pace.went_on(now_s)
        self._turns.went_on(waiting)
        self._remove(waiting.number)
        self.in_flight += 1
        return waiting.number

    def leave(self, now_s: float, closed: Collection[int] = ()) -> int | None:
        """Takes a request's slot back. Returns the number of the request that has it now, as :meth:`next` does."""
        if not self.in_flight:
            raise ValueError("nobody has a slot")
        self.in_flight -= 1
        if self.queued:
            return self.next(now_s, closed)
        if now_s > self._now_s:
            self._now_s = now_s
        return None

    def put_back(
        self, number: int, tenant: str, tokens: int, entered_s: float, *, priority: int = 0, demand: int = 0
    ) -> None:
        """Takes back the slot of a request that its target refused, and lets it wait where it did before.

        The arguments are those of :meth:`enter`, called at ``entered_s``. The request goes before those that came at
        the same moment, and its tenant is not charged twice. It always has a place, as its slot was counted before."""
        self._check_new(number)
        check_priority(priority, "priority")
        if not self.in_flight:
            raise ValueError("nobody has a slot")
        held = self._tenants.get(tenant)
        if held is None:
            held = self._tenants[tenant] = Tenant(tenant)
        tokens = max(1, tokens)
        self.in_flight -= 1
        self._pace.came_back()
        self._turns.came_back(held, tokens)
        self._last_rank = rank = self._last_rank + 1
        due_s = entered_s + priority * self._ageing_s
        self._wait(WaitingRequest(number, held, tokens, due_s, _PUT_BACK + rank, demand))
        held.waiting.move_to_end(number, last=False)  # the newest would lose its place first
        self._placed(number, held)

    def cancel(self, number: int, now_s: float) -> bool:
        """Removes a request with a place and no slot; returns False otherwise. With a slot, it must :meth:`leave`."""
        if number not in self._places:
            return False
        self._remove(number)
        return True

    # -- helpers

    def _check_new(self, number: int) -> None:
        if number in self._places:
            raise ValueError(f"request {number} has a place already")

    def _placed(self, number: int, tenant: Tenant) -> None:
        self._places[number] = tenant
        places = len(tenant.reserved) + len(tenant.waiting)
        self._lengths.moved(tenant, places - 1, places)

    def _wait(self, waiting: WaitingRequest) -> None:
        waiting.tenant.waiting[waiting.number] = waiting
        self.queued += 1
        self._turns.add(waiting)

    def _remove(self, number: int) -> None:
        tenant = self._places.pop(number)
        if number in tenant.reserved:
            del tenant.reserved[number]
        else:
            self.queued -= 1
            self._turns.gone(tenant.waiting.pop(number))
            if not self.queued:
                self._pace.stopped()
        places = len(tenant.reserved) + len(tenant.waiting)
        self._lengths.moved(tenant, places + 1, places)
        if not places:
            del self._tenants[tenant.name]
