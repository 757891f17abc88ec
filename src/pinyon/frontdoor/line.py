"""Those who have a place in the queue, as futures; who goes on is :class:`RequestQueue`'s decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from pinyon.core.clock import Clock
from pinyon.core.errors import ResourceExhausted
from pinyon.frontdoor.demands import Hold
from pinyon.frontdoor.rate_limits import NO_LEVELS, Levels


class Turn:
    """One request's turn, as the request loop takes and leaves it: with this one it has come."""

    __slots__ = ()

    @property
    def levels(self) -> Levels:
        """What is left of its tenant's limits."""
        return NO_LEVELS

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        """Whether it is now, and it is to be said at once where the request goes; if not, :meth:`wait` for it."""
        return True

    async def wait(self) -> None:
        """Until it is."""

    def release(self) -> None:
        """It is known now where the request goes: the room that was kept for it is anybody's."""

    async def again(self, demand: int) -> bool:
        """Where it went there was no room after all: waits where it did before. Returns whether it could."""
        return False

    def leave(self, used_tokens: int = 0) -> None:
        """The request has ended, and has used so many."""


class Place(Turn):
    """One request's place: taken before the request is prepared, left when it has ended (``with``, or ``leave``)."""

    __slots__ = (
        "_error", "_held", "_line", "_turn", "demand", "entered_s", "has_slot",
        "number", "priority", "tenant", "tokens",
    )  # fmt: skip

    def __init__(self, line: Line, tenant: str) -> None:
        """Raises :class:`ResourceExhausted` when the queue is full."""
        self._line = line
        self.has_slot = False
        """Its turn has come, also where it was cancelled before it learned of that."""
        self._held: Hold | None = None
        self._error: ResourceExhausted | None = None
        self._turn: asyncio.Future[None] | None = None
        self.tenant = tenant
        self.tokens = self.priority = self.demand = 0
        self.entered_s = 0.0
        self.number = line.taken(self)
        """0: it has left."""

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        """Whether there is a slot, and room for this ``demand``, at once: where it goes is to be said before anything
        else happens, for none is kept for it. If not, :meth:`wait` for it. ``tokens`` is what the request may take.
        ``room``: there is some, as who asks has just seen. Raises :class:`ResourceExhausted` when the place was given
        to another tenant."""
        self._check()
        self.tokens, self.priority, self.demand = tokens, priority, demand
        return self._line.enter(self, room)

    async def wait(self) -> None:
        """For a slot, and for room, that is kept for it until it is known where it goes. Raises as :meth:`enter`."""
        if not self.has_slot and self._error is None:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        self._check()

    async def again(self, demand: int) -> bool:
        """Where the request went, it was refused: give the slot back and wait for one at the old place in the line. The
        loop turns at least once. ``demand``: its number now.

        Raises as :meth:`enter`, and :class:`ValueError` if it has no slot.
        """
        if not self.has_slot:
            raise ValueError("it has no slot")
        self.release()
        self.demand = demand
        self.has_slot = False
        self._turn = asyncio.get_running_loop().create_future()
        self._line.put_back(self)
        await self._turn
        await asyncio.sleep(0)
        self._check()
        return True

    def _check(self) -> None:
        if self._error is not None:
            raise self.displaced(self._error)

    def displaced(self, error: ResourceExhausted) -> ResourceExhausted:
        """The place was given to another tenant. Returns what the request is told of that."""
        return error

    def release(self) -> None:
        """Calling it twice is fine."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def spare(self) -> Place | None:
        """One more slot for the same request, if nobody waits for one; see :meth:`Line.spare`."""
        return self._line.spare(self.tenant, self.demand)

    def leave(self, used_tokens: int = 0) -> None:
        """Give the slot to the next in line, or the place back. Calling it twice is fine."""
        if self._held is not None:
            self.release()
        if self._error is None and self.number:
            number, self.number = self.number, 0
            self._line.left(number, self.has_slot)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # -- the line's part

    def granted(self, held: Hold | None) -> None:
        """It has its slot, whether or not its task learns of it before it is cancelled."""
        self.has_slot, self._held = True, held
        if self._turn is not None:
            self._wake()

    def lost(self, error: ResourceExhausted) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


GRANTS_MAX = 64
"""At once: what so many begin with is done before further ones do, and whoever else is served from this loop is
between."""


class Line:
    """All on one event loop.

    ``is_open`` says whether there is room for a demand now, and ``on_grant`` is told at once of each request of it that
    has got a slot, so that ``is_open`` counts it when it is asked for the next; it may give what is kept for that one
    until it has left, or :meth:`Place.release`. Neither may raise. Whenever there may
    be room for more, :meth:`availability_changed` is to be called: without it, only who comes or leaves finds it.

    ``queue`` is a :class:`pinyon.routing.queue.RequestQueue`, or what writes its calls into a journal, which compiled
    code would refuse under that type.
    """

    def __init__(
        self,
        queue: Any,
        clock: Clock = time.monotonic,
        is_open: Callable[[int], bool] = lambda _: True,
        on_grant: Callable[[int], Hold | None] = lambda _: None,
    ) -> None:
        self.is_open, self.on_grant = is_open, on_grant
        self.on_put_back: Callable[[], None] = lambda: None
        """What changed while nobody waited may be room for who waits again."""
        self._queue: Any = queue
        self._clock = clock
        self._places: dict[int, Place] = {}
        self._last = 0
        self._goes_on = False
        """There were more than could have their slots at once."""

    @property
    def in_flight(self) -> int:
        number: int = self._queue.in_flight
        return number

    @property
    def queued(self) -> int:
        number: int = self._queue.queued
        return number

    @property
    def waiting_demands(self) -> Collection[int]:
        """Of those who wait."""
        demands: Collection[int] = self._queue.waiting_demands
        return demands

    def reserve(self, tenant: str) -> Place:
        """A place, before anything is done for a request. Raises :class:`ResourceExhausted` when the queue is full."""
        return Place(self, tenant)

    def taken(self, place: Place) -> int:
        """Returns the number of a new one. Raises as :meth:`reserve`."""
        self._last = number = self._last + 1
        out = self._queue.reserve(number, place.tenant, self._clock())
        if out is not None:
            self._places.pop(out).lost(self._queue.full())
        self._places[number] = place
        return number

    def spare(self, tenant: str, demand: int) -> Place | None:
        """A slot that nobody waits for, at once, with room kept for it; None if there is none, or no room."""
        if not self._queue.has_spare or demand in self._queue.waiting_demands or not self.is_open(demand):
            return None
        place = self.reserve(tenant)
        place.enter(1, demand=demand, room=True)
        place.granted(self.on_grant(demand))
        return place

    def check(self, tenant: str) -> None:
        """Raises as :meth:`reserve` would now."""
        self._queue.check(tenant)

    def enter(self, place: Place, room: bool) -> bool:
        """Whether it has a slot at once; no room is kept for it. ``room``: it is known that there is some."""
        place.entered_s = now_s = self._clock()
        number, demand, priority = place.number, place.demand, place.priority
        room = room or self.is_open(demand)
        if room and not demand and not priority:  # a short line of a journal
            has_slot: bool = self._queue.enter(number, place.tokens, now_s)
        else:
            has_slot = self._queue.enter(number, place.tokens, now_s, priority=priority, demand=demand, open=room)
        if has_slot:
            del self._places[number]
            place.granted(None)
        return has_slot

    def left(self, number: int, had_slot: bool) -> None:
        if not had_slot:
            del self._places[number]
            self._queue.cancel(number, self._clock())
            return
        now_s = self._clock()
        if not self._queue.queued:
            self._queue.leave(now_s)
            return
        closed = self._closed()
        if (following := self._queue.leave(now_s, closed)) is not None:
            self._grant(following)
            self._hand_on(now_s, closed)

    def put_back(self, place: Place) -> None:
        """Its slot is for who has room; it waits where it did before. Whatever was said, there is no room for it now:
        neither it nor who needs the same goes on before the next :meth:`availability_changed`."""
        self._places[place.number] = place
        self._queue.put_back(
            place.number, place.tenant, place.tokens, place.entered_s, priority=place.priority, demand=place.demand
        )
        if self._queue.can_go_on:
            closed = self._closed()
            if place.demand not in closed:
                closed.append(place.demand)
            self._hand_on(self._clock(), closed)
        self.on_put_back()

    def availability_changed(self) -> None:
        """There may be room for more, or for others: hand free slots on while somebody can go."""
        if self._queue.can_go_on:
            self._hand_on(self._clock(), self._closed())

    # -- the parts

    def _closed(self) -> list[int]:
        """Demands of those who wait that have no room now."""
        return [demand for demand in self._queue.waiting_demands if not self.is_open(demand)]

    def _hand_on(self, now_s: float, closed: list[int]) -> None:
        """Grants take room and give none: of those that were not ``closed`` before, only whose turn it is may be, and
        is looked at again."""
        queue = self._queue
        for _ in range(GRANTS_MAX):
            while (demand := queue.next_demand(closed)) is not None and not self.is_open(demand):
                closed.append(demand)
            if demand is None or (following := queue.next(now_s, closed)) is None:
                return
            self._grant(following)
        if queue.can_go_on and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self.availability_changed()

    def _grant(self, number: int) -> None:
        place = self._places.pop(number)
        place.granted(self.on_grant(place.demand))
