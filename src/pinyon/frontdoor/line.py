"""The requests that have a place in the queue, as futures. :class:`RequestQueue` decides which goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any, Self

from pinyon.core.clock import Clock
from pinyon.core.errors import ResourceExhausted
from pinyon.routing.layer import Layer


class Place:
    """The place of one request, taken before the request is prepared and left at its end (``with``, or ``leave``)."""

    __slots__ = (
        "_error", "_held", "_line", "_turn", "demand", "entered_s", "has_slot",
        "number", "priority", "tenant", "tokens",
    )  # fmt: skip

    def __init__(self, line: Line, tenant: str) -> None:
        """Raises :class:`ResourceExhausted` when the queue is full."""
        self._line = line
        self.has_slot = False
        """True once the turn has come, even if the request was cancelled before it learned of that."""
        self._held: Layer | None = None
        self._error: ResourceExhausted | None = None
        self._turn: asyncio.Future[None] | None = None
        self.tenant = tenant
        self.tokens = self.priority = self.demand = 0
        self.entered_s = 0.0
        self.number = line.taken(self)
        """The number of the place; 0 after it has been left."""

    @property
    def rate_fields(self) -> bytes:
        """The lines of the answer's head about the tenant's limits per minute; empty if it has none."""
        return b""

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        """Returns whether there is a slot, and room for the ``demand``, at once. No room is kept then, so the caller
        must choose the target before anything else happens. Otherwise, call :meth:`wait`. ``tokens`` is the most that
        the request may take. ``room``: the caller has just seen some. Raises :class:`ResourceExhausted` when the place
        was given to another tenant."""
        self._check()
        self.tokens, self.priority, self.demand = tokens, priority, demand
        return self._line.enter(self, room)

    async def wait(self) -> None:
        """Waits for a slot and for room, which is kept until the request's target is known. Raises as :meth:`enter`."""
        if not self.has_slot and self._error is None:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        self._check()

    async def again(self, demand: int) -> None:
        """Gives the slot back after the target refused the request, and waits for one at its old place in the line,
        with its present ``demand``. The event loop turns at least once.

        Raises as :meth:`enter`, and :class:`ValueError` if it has no slot."""
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

    def _check(self) -> None:
        if self._error is not None:
            raise self.displaced(self._error)

    def displaced(self, error: ResourceExhausted) -> ResourceExhausted:
        """Returns what the request is told when its place was given to another tenant."""
        return error

    def release(self) -> None:
        """Releases the kept room; may be called twice."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def spare(self) -> Place | None:
        """Returns another slot for the same request if no request waits for one; see :meth:`Line.spare`."""
        return self._line.spare(self.tenant, self.demand)

    def leave(self, used_tokens: int = 0) -> None:
        """Gives the slot to the next request in line, or gives the place back, of a request that has used so many
        tokens; may be called twice."""
        if self._held is not None:
            self.release()
        if self._error is None and self.number:
            number, self.number = self.number, 0
            self._line.left(number, self.has_slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # -- called by the line

    def granted(self, held: Layer | None) -> None:
        """Records that the place has its slot, whether or not its task learns of it before it is cancelled."""
        self.has_slot, self._held = True, held
        if self._turn is not None:
            self._wake()

    def lost(self, error: ResourceExhausted) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


LOOK_S = 0.002
"""The time for which the targets' many reports are collected before waiting requests learn of them."""
LOOK_SHARE_MAX = 0.25
"""The share of the event loop's time that looking for room may take; while it is slow, it is done less often."""
LOOK_PAUSE_MAX_S = 0.25
GRANTS_MAX = 64
"""The maximum number of slots that are granted at once. What these requests start is done before more are granted, and
other work of the event loop runs in between."""


class Line:
    """The queue of requests, all on one event loop.

    The callback ``is_open`` returns whether there is room for a demand now. The callback ``on_grant`` gets the demand
    of each request that gets a slot after waiting, or a spare one, so that ``is_open`` counts it from then on. (One
    that gets a slot in :meth:`Place.enter` must choose its target at once.) It may return a layer at which a
    place is held until the request leaves or calls :meth:`Place.release`. Neither may raise.

    Whenever there may be room for more, :meth:`availability_changed` or :meth:`look` must be called; otherwise only
    requests that come or leave find it. The ``queue`` is a :class:`pinyon.routing.queue.RequestQueue`, or an object
    that writes its calls into a journal, which compiled code would refuse under that type."""

    def __init__(
        self,
        queue: Any,
        clock: Clock = time.monotonic,
        is_open: Callable[[int], bool] = lambda _: True,
        on_grant: Callable[[int], Layer | None] = lambda _: None,
    ) -> None:
        self.is_open, self.on_grant = is_open, on_grant
        self._queue: Any = queue
        self._clock = clock
        self._places: dict[int, Place] = {}
        self._last = 0
        self._pause_s = LOOK_S
        self._timer: asyncio.TimerHandle | None = None
        self._missed = False
        """True if :meth:`look` was called while no request waited: that may have been about room for the next one."""
        self._goes_on = False
        """True while a further turn of the event loop is due, for slots beyond ``GRANTS_MAX``."""

    @property
    def in_flight(self) -> int:
        return int(self._queue.in_flight)

    @property
    def queued(self) -> int:
        return int(self._queue.queued)

    @property
    def waiting_demands(self) -> Collection[int]:
        """The demands of the waiting requests."""
        demands: Collection[int] = self._queue.waiting_demands
        return demands

    def taken(self, place: Place) -> int:
        """Returns the number of a new place. Raises :class:`ResourceExhausted` when the queue is full."""
        self._last = number = self._last + 1
        out = self._queue.reserve(number, place.tenant, self._clock())
        if out is not None:
            self._places.pop(out).lost(self._queue.full())
        self._places[number] = place
        return number

    def spare(self, tenant: str, demand: int) -> Place | None:
        """Returns a slot that no request waits for, with room kept for it; None if there is no slot or no room."""
        if not self._queue.has_spare or demand in self._queue.waiting_demands or not self.is_open(demand):
            return None
        place = Place(self, tenant)
        place.enter(1, demand=demand, room=True)
        place.granted(self.on_grant(demand))
        return place

    def check(self, tenant: str) -> None:
        """Raises the error that :meth:`taken` would raise now."""
        self._queue.check(tenant)

    def enter(self, place: Place, room: bool) -> bool:
        """Returns whether the place has a slot at once; no room is kept for it. ``room``: there is known to be some."""
        place.entered_s = now_s = self._clock()
        number, demand, priority = place.number, place.demand, place.priority
        room = room or self.is_open(demand)
        if room and not demand and not priority:  # keeps the line in a journal short
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
        """Takes the slot of a refused request, which waits at its old place, and hands it on. The request's demand
        counts as having no room, so no request of that demand goes on before the next :meth:`availability_changed`."""
        self._places[place.number] = place
        self._queue.put_back(
            place.number, place.tenant, place.tokens, place.entered_s, priority=place.priority, demand=place.demand
        )
        if self._queue.can_go_on:
            closed = self._closed()
            if place.demand not in closed:
                closed.append(place.demand)
            self._hand_on(self._clock(), closed)
        if self._missed:
            self.look()

    def look(self) -> None:
        """Calls :meth:`availability_changed` once for all calls of the next while, or not at all while no request
        waits: later requests look for room themselves. It must be called on an event loop."""
        if self._timer is None:
            if self._queue.queued:
                self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)
            else:
                self._missed = True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def availability_changed(self) -> None:
        """Hands free slots on to waiting requests, as there may be room for more requests, or for other ones."""
        if self._queue.can_go_on:
            self._hand_on(self._clock(), self._closed())

    # -- internals

    def _look(self) -> None:
        self._timer, self._missed = None, False
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self.availability_changed()
        finally:
            self._pause_s = max(LOOK_S, min(LOOK_PAUSE_MAX_S, (loop.time() - began_s) / LOOK_SHARE_MAX))

    def _closed(self) -> list[int]:
        """Returns the demands of waiting requests that have no room now."""
        return [demand for demand in self._queue.waiting_demands if not self.is_open(demand)]

    def _hand_on(self, now_s: float, closed: list[int]) -> None:
        """Grants free slots. Grants take room and free none, so only the demand whose turn it is, if it is not
        ``closed``, is checked again."""
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
