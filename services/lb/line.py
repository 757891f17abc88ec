"""Those who have a place in the queue, as futures; who goes on is :class:`RequestQueue`'s decision."""

from __future__ import annotations

import asyncio
import time

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.routing.queue import RequestQueue

__all__ = ["Line", "Place"]


class Place:
    """One request's place: taken before the request is prepared, left when it has ended (``with``, or ``leave``)."""

    __slots__ = ("_error", "_has_slot", "_line", "_number", "_turn")

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number
        self._has_slot = False
        self._error: PinyonError | None = None
        self._turn: asyncio.Future[None] | None = None

    async def turn(self, tokens: int) -> None:
        """Wait for a slot; ``tokens`` is what the request may take. Raises :class:`ResourceExhausted` when the place
        has to be given to another tenant."""
        if self._error is None and not self._line.enter(self, tokens):
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Give the slot to the next in line, or the place back. Calling it twice is fine."""
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

    def granted(self) -> None:
        """It has its slot, whether or not its task learns of it before it is cancelled."""
        self._has_slot = True
        self._wake()

    def lost(self, error: PinyonError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


class Line:
    """All on one event loop."""

    def __init__(self, queue: RequestQueue, clock: Clock = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._places: dict[int, Place] = {}
        self._last = 0

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def queued(self) -> int:
        return self._queue.queued

    def reserve(self, tenant: str) -> Place:
        """A place, before anything is done for a request. Raises :class:`ResourceExhausted` when the queue is full."""
        self._last = number = self._last + 1
        out = self._queue.reserve(number, tenant, self._clock())
        if out is not None:
            self._places.pop(out).lost(self._queue.full())
        place = self._places[number] = Place(self, number)
        return place

    def spare(self, tenant: str) -> Place | None:
        """A slot that nobody waits for, at once; None if there is none."""
        if not self._queue.has_spare:
            return None
        place = self.reserve(tenant)
        self.enter(place, 1)
        return place

    def check(self, tenant: str) -> None:
        """Raises as :meth:`reserve` would now."""
        self._queue.check(tenant)

    def enter(self, place: Place, tokens: int) -> bool:
        """Whether it has a slot at once."""
        if not self._queue.enter(place.number, tokens, self._clock()):
            return False
        del self._places[place.number]
        place.granted()
        return True

    def left(self, number: int, had_slot: bool) -> None:
        if not had_slot:
            del self._places[number]
            self._queue.cancel(number, self._clock())
        elif (following := self._queue.leave(self._clock())) is not None:
            self._places.pop(following).granted()
