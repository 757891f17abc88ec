"""The queue in front of everything: fair between tenants, first come, first served within one, with a bound.

Requests are numbers, so what it was told can be written down and told again. Rules keep requests from being in the way
of others:

- **Who goes next**: start-time fair queueing (Goyal et al., SIGCOMM '96), which is the virtual token counter of
  "Fairness in serving large language models" (OSDI '24) charged when a request gets its slot. A tenant that begins to
  wait starts where the others are, so nothing can be saved up; while nobody waits, nothing is counted.
- **Who is refused**: when all places are taken, a tenant that holds at least two fewer than the longest one takes over
  that one's newest place. One tenant alone may fill the queue; it does not keep others out.
- **What there is room for** (selective pushing, SkyWalker §3.3 and §4.1): a request waits for a slot, and for room at
  one of the targets that it may go to. Its *demand* says which: who has the same one waits for the same. Whoever asks
  says which demands have no room now; they hold up no others, of the same tenant or of another.
- **Who is urgent**: of one tenant, a request of priority ``p`` goes as if it had come ``p * ageing_s`` seconds later:
  the urgent go first, and nobody waits forever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView

from pinyon.core.errors import ResourceExhausted
from pinyon.core.request import check_priority
from pinyon.routing.fair_turns import FairTurns
from pinyon.routing.waiting import Tenant, TenantLengths, Waiting

AGEING_S = 0.1
"""One level of priority is worth so much: the most urgent go before what came in the last 100 s."""
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 30.0
_SMOOTHING = 0.1
"""Of the last one, in the mean time between two that go on."""
_PUT_BACK = -(1 << 62)
"""Added to the ranks of those who are put back: they are before all that came."""


class Pace:
    """How long it takes until the next of those who wait goes on: the mean time between two that do, while others wait.
    Some that go at the same moment share the time since the moment before: room is found at once for many."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        """0: not known."""
        self._last_s = 0.0
        self._together = 0
        """How many went on at ``_last_s``; 0: nobody has since there is a queue."""

    def went_on(self, now_s: float) -> None:
        if self._together and now_s > self._last_s:
            self._gap_s = self._with(now_s)
            self._together = 0
        if not self._together:
            self._last_s = now_s
        self._together += 1

    def came_back(self) -> None:
        """Of those who went on, one did not get far."""
        if self._together > 1:
            self._together -= 1

    def stopped(self) -> None:
        """Nobody waits."""
        self._together = 0

    def gap_s(self, now_s: float | None = None) -> float:
        """Seconds. With ``now_s``: nobody may have gone for a while, so it is at least what it were if one went now."""
        if now_s is None or not self._together:
            return self._gap_s
        return max(self._gap_s, self._with(now_s))

    def _with(self, now_s: float) -> float:
        gap_s = max(0.0, now_s - self._last_s) / self._together
        weight = 1.0 - (1.0 - _SMOOTHING) ** self._together
        return self._gap_s + weight * (gap_s - self._gap_s) if self._gap_s else gap_s


class RequestQueue:
    """``slots`` requests are in flight at once, ``limit`` more have a place: they wait, or are being prepared. What is
    free of the slots are places of those who wait for room.

    ``reserve`` → ``enter`` → (wait for ``leave`` of another, or ``next``) → ``leave``; ``cancel`` gives a place back
    before that, and ``put_back`` a slot for a place.

    A slot may stay free while nobody who waits has room. Whenever there may be room for more, and after a ``leave``,
    ``next`` is to be asked until it names nobody.
    """

    def __init__(self, slots: int, limit: int, ageing_s: float = AGEING_S) -> None:
        """``ageing_s``: seconds that one level of priority is worth; 0: none. Raises :class:`ValueError`."""
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
        self._pace = Pace()
        self._last_rank = 0
        self._now_s = -math.inf
        """The latest time that was told."""
        self.in_flight = 0
        self.queued = 0
        """Requests that wait for a slot."""

    def reserve(self, number: int, tenant: str, now_s: float) -> int | None:
        """Take a place. Returns the number of the request that lost its place for it, if one did.

        Raises :class:`ResourceExhausted` when the queue is full. No two that have a place have the same number.
        """
        if number in self._places:
            raise ValueError(f"request {number} has a place already")
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
        """A slot is free, and a place that nobody would have to give up for it."""
        return self.in_flight < self._slots and self.in_flight + len(self._places) < self._room

    @property
    def can_go_on(self) -> bool:
        """A slot is free, and somebody waits: for room, if that was asked for last."""
        return self.queued > 0 and self.in_flight < self._slots

    @property
    def waiting_demands(self) -> KeysView[int]:
        """Of those who wait: whoever asks for the next needs to know of no others whether there is room."""
        return self._turns.demands

    def full(self) -> ResourceExhausted:
        """What those are told who get no place, or lose theirs."""
        # Slots are free: who waits does for room, and how long there has been none says more than how it was before.
        gap_s = self._pace.gap_s(self._now_s if self.in_flight < self._slots else None)
        wait_s = min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, len(self._places) * gap_s))
        return ResourceExhausted(
            f"The queue is full ({self._limit} requests). Please try again later.", retry_after_s=wait_s
        )

    def enter(
        self, number: int, tokens: int, now_s: float, *, priority: int = 0, demand: int = 0, open: bool = True
    ) -> bool:
        """The request of this place is ready: whether it has a slot now; otherwise it waits.

        ``tokens`` is what it may take, prompt and generation: its share is measured by that. ``open``: its demand has
        room now; it has none for who comes as long as somebody waits for the same. Raises :class:`InvalidArgument` for
        a priority that there is not.
        """
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
        self._wait(Waiting(number, tenant, max(1, tokens), due_s, rank, demand))
        return False

    def next_demand(self, closed: Collection[int] = ()) -> int | None:
        """The demand of whoever :meth:`next` would name; None if it would name nobody. Changes nothing."""
        waiting = self._turns.next(closed) if self.can_go_on else None
        return None if waiting is None else waiting.demand

    def next(self, now_s: float, closed: Collection[int] = ()) -> int | None:
        """Who has a free slot now; None if nobody has one, as all are taken or nobody waits whose demand is not one of
        the ``closed``, that have no room now."""
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
        """A request gives its slot back: the number of the one that has it now, as :meth:`next` says."""
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
        """A request that has a slot gives it back and waits where it did before: where it was to go, it was refused.

        All is as it was told to :meth:`enter`, at ``entered_s``. It goes before those who came at the same moment, and
        its tenant is not charged twice. There is always a place for it: it takes none that was not counted before.
        """
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
        self._wait(Waiting(number, held, tokens, due_s, _PUT_BACK + rank, demand))
        held.waiting.move_to_end(number, last=False)  # it is not the newest one
        self._placed(number, held)

    def cancel(self, number: int, now_s: float) -> bool:
        """Whether the request still had a place without a slot, and is gone; with a slot, it must :meth:`leave`."""
        if number not in self._places:
            return False
        self._remove(number)
        return True

    # -- the parts

    def _check_new(self, number: int) -> None:
        if number in self._places:
            raise ValueError(f"request {number} has a place already")

    def _placed(self, number: int, tenant: Tenant) -> None:
        self._places[number] = tenant
        places = len(tenant.reserved) + len(tenant.waiting)
        self._lengths.moved(tenant, places - 1, places)

    def _wait(self, waiting: Waiting) -> None:
        waiting.tenant.waiting[waiting.number] = waiting
        self.queued += 1
        self._turns.add(waiting)

    def _remove(self, number: int) -> None:
        tenant = self._places.pop(number)
        if number in tenant.reserved:
            del tenant.reserved[number]
        else:
            self._waits_no_more(tenant.waiting.pop(number))
        places = len(tenant.reserved) + len(tenant.waiting)
        self._lengths.moved(tenant, places + 1, places)
        if not places:
            del self._tenants[tenant.name]

    def _waits_no_more(self, waiting: Waiting) -> None:
        waiting.waits = False
        self.queued -= 1
        self._turns.gone(waiting)
        if not self.queued:
            self._pace.stopped()

    def check_integrity(self, closed: Collection[int] = ()) -> None:
        """Raises :class:`AssertionError` if a bound is broken or somebody waits beside a free slot whose demand is not
        one of the ``closed``: those that had no room when it was asked last."""
        assert 0 <= self.in_flight <= self._slots, f"{self.in_flight} of {self._slots} slots are taken"
        held = self.in_flight + len(self._places)
        assert held <= self._slots + self._limit, f"{held} have a place, at most {self._slots + self._limit} may"
        tenants = self._tenants.values()
        assert sum(map(len, tenants)) == len(self._places), "places and tenants differ"
        assert all(map(len, tenants)), "a tenant without a place is kept"
        everyone = [waiting for tenant in tenants for waiting in tenant.waiting.values()]
        assert len(everyone) == self.queued, "those who wait are miscounted"
        assert all(waiting.waits for waiting in everyone), "somebody waits and has gone"
        if self.in_flight < self._slots:
            held_up = {waiting.demand for waiting in everyone} - set(closed)
            assert not held_up, f"somebody waits beside a free slot, and has room: demands {held_up}"
        assert self._lengths.longest == max(map(len, tenants), default=0), "the longest queue is another one"
        self._turns.check_integrity(list(tenants))
