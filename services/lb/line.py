"""Those who have a place in the queue, as futures; who goes on is :class:`RequestQueue`'s decision."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, Protocol

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.routing.queue import RequestQueue

__all__ = ["ANYWHERE", "Line", "Place", "Room", "Wants"]


class Wants(NamedTuple):
    """Where a request may go (a number of :class:`Room`'s), and how urgent it is (lower goes first)."""

    demand: int = 0
    priority: int = 0


ANYWHERE = Wants()


class Held(Protocol):
    """Room that is kept for one request until it is known where that goes."""

    def release(self) -> None:
        """Calling it again is fine."""


class Room(Protocol):
    """Who knows whether there is room for another request where it may go."""

    def is_open(self, demand: int) -> bool: ...

    def granted(self, demand: int) -> Held | None:
        """One with that demand has its turn now; what is kept for it, if anything is."""
        ...


class _Plenty:
    def is_open(self, demand: int) -> bool:
        return True

    def granted(self, demand: int) -> Held | None:
        return None


class Place:
    """One request's place: taken before the request is prepared, left when it has ended (``with``, or ``leave``)."""

    __slots__ = ("_error", "_has_slot", "_held", "_line", "_number", "_turn", "entered_s", "tenant", "tokens", "wants")

    def __init__(self, line: Line, number: int, tenant: str) -> None:
        self._line = line
        self._number = number
        self._has_slot = False
        self._held: Held | None = None
        self._error: PinyonError | None = None
        self._turn: asyncio.Future[None] | None = None
        self.tenant = tenant
        self.tokens = 0
        self.wants = ANYWHERE
        self.entered_s = 0.0

    async def turn(self, tokens: int, wants: Wants = ANYWHERE) -> None:
        """Wait for a slot, and for room where it may go; ``tokens`` is what the request may take. Raises
        :class:`ResourceExhausted` when the place has to be given to another tenant."""
        if self._error is None:
            self.tokens, self.wants = tokens, wants
            if not self._line.enter(self):
                await self._wait()
        if self._error is not None:
            raise self._error

    async def again(self) -> None:
        """Where it was to go, it was refused: it gives its slot back, and waits where it did before."""
        self.release()
        self._has_slot = False
        self._line.put_back(self)
        await self._wait()
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        if self._has_slot or self._error is not None:
            return
        self._turn = asyncio.get_running_loop().create_future()
        await self._turn

    def release(self) -> None:
        """It goes where room was kept for it, or elsewhere: the room is anybody's again."""
        if self._held is not None:
            self._held.release()

    def leave(self) -> None:
        """Give the slot to the next in line, or the place back. Calling it twice is fine."""
        self.release()
        if self._error is None and self._number:
            number, self._number = self._number, 0
            self._line.left(number, self._has_slot)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # -- the line's part

    @property
    def number(self) -> int:
        return self._number

    def granted(self, held: Held | None) -> None:
        """It has its slot, whether or not its task learns of it before it is cancelled."""
        self._has_slot, self._held = True, held
        self._wake()

    def lost(self, error: PinyonError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


class Line:
    """All on one event loop. ``room`` is asked for each that could go on; :meth:`room_changed` tells that it may answer
    otherwise now."""

    def __init__(self, queue: RequestQueue, clock: Clock = time.monotonic, room: Room | None = None) -> None:
        self._queue = queue
        self._clock = clock
        self._room: Room = _Plenty() if room is None else room
        self._places: dict[int, Place] = {}
        self._last = 0
        self._handing_on = False

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def queued(self) -> int:
        return self._queue.queued

    @property
    def waiting_demands(self) -> set[int]:
        return set(self._queue.waiting_demands)

    def reserve(self, tenant: str) -> Place:
        """A place, before anything is done for a request. Raises :class:`ResourceExhausted` when the queue is full."""
        self._last = number = self._last + 1
        out = self._queue.reserve(number, tenant, self._clock())
        if out is not None:
            self._places.pop(out).lost(self._queue.full())
        place = self._places[number] = Place(self, number, tenant)
        return place

    def spare(self, tenant: str, demand: int = 0) -> Place | None:
        """A slot that nobody waits for, at once; None if there is none, or no room for it."""
        if not self._queue.has_spare or self._queue.queued or not self._room.is_open(demand):
            return None
        place = self.reserve(tenant)
        place.tokens, place.wants = 1, Wants(demand)
        self.enter(place)
        return place

    def check(self, tenant: str) -> None:
        """Raises as :meth:`reserve` would now."""
        self._queue.check(tenant)

    def enter(self, place: Place) -> bool:
        """Whether it has a slot at once."""
        now_s = place.entered_s = self._clock()
        demand, priority = place.wants
        is_open = self._room.is_open(demand)
        if not self._queue.enter(place.number, place.tokens, now_s, priority=priority, demand=demand, open=is_open):
            return False
        self._grant(place.number)
        return True

    def put_back(self, place: Place) -> None:
        demand, priority = place.wants
        self._places[place.number] = place
        self._queue.put_back(
            place.number, place.tenant, place.tokens, place.entered_s, priority=priority, demand=demand
        )
        self.room_changed()

    def left(self, number: int, had_slot: bool) -> None:
        if not had_slot:
            del self._places[number]
            self._queue.cancel(number, self._clock())
            return
        following = self._queue.leave(self._clock(), self._closed())
        if following is not None:
            self._grant(following)
        self.room_changed()

    def room_changed(self) -> None:
        """There may be room where there was none: whoever waits and has some goes on."""
        queue = self._queue
        if self._handing_on:
            return
        self._handing_on = True
        try:
            while queue.can_go_on:
                following = queue.next(self._clock(), self._closed())
                if following is None:
                    return
                self._grant(following)
        finally:
            self._handing_on = False

    def _closed(self) -> list[int]:
        return [demand for demand in self._queue.waiting_demands if not self._room.is_open(demand)]

    def _grant(self, number: int) -> None:
        place = self._places.pop(number)
        place.granted(self._room.granted(place.wants.demand))
