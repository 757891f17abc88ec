"""The queue: order, bound, room, tokens per minute, and nothing left behind by requests that leave."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from pinyon.core.errors import ResourceExhausted
from pinyon.frontdoor.admission import RateLimited, TenantAdmission
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.line import GRANTS_MAX, LOOK_PAUSE_MAX_S, LOOK_S, LOOK_SHARE_MAX, Line, Place
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.routing.queue import RequestQueue
from pinyon.routing.rates import Rates, TenantRates


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def slot_of(place: Place, demand: int = 0) -> None:
    if not place.enter(1, demand=demand):
        await place.wait()


async def test_first_come_first_served():
    line, order = Line(RequestQueue(1, 10)), []

    async def one(name: int) -> None:
        with Place(line, "t") as place:
            await slot_of(place)
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(name) for name in range(6)))
    assert order == list(range(6))
    assert (line.queued, line.in_flight) == (0, 0)


async def entered(line: Line) -> Place:
    place = Place(line, "t")
    await slot_of(place)
    return place


async def test_over_the_bound_it_refuses_at_once():
    line = Line(RequestQueue(1, 1))
    first = await entered(line)
    second = Place(line, "t")
    waiting = asyncio.ensure_future(slot_of(second))
    await settle()
    with pytest.raises(ResourceExhausted) as caught:
        Place(line, "t")
    assert caught.value.retry_after_s
    first.leave()
    first.leave()  # a second leave changes nothing
    await waiting
    assert (line.queued, line.in_flight) == (0, 1)
    second.leave()
    assert (line.queued, line.in_flight) == (0, 0)


@pytest.mark.parametrize("leave_first", [False, True])
async def test_cancelled_before_and_after_the_slot_was_given(leave_first):
    line = Line(RequestQueue(1, 10))
    running = await entered(line)

    async def one() -> None:
        with Place(line, "t") as place:
            await slot_of(place)
            await asyncio.Event().wait()

    first, second = (asyncio.ensure_future(one()) for _ in range(2))
    await settle()
    if leave_first:
        running.leave()  # the first waiter has the slot, but does not know it yet
        first.cancel()
    else:
        first.cancel()
        running.leave()
    await asyncio.wait({first})
    await settle()
    assert first.cancelled()
    assert (line.queued, line.in_flight) == (0, 1)
    second.cancel()
    await asyncio.wait({second})
    assert (line.queued, line.in_flight) == (0, 0)


async def test_a_place_that_is_left_before_its_turn_is_free_again():
    line = Line(RequestQueue(1, 0))
    for _ in range(3):
        with Place(line, "t"), pytest.raises(ResourceExhausted):
            Place(line, "t")
    await entered(line)


@pytest.mark.parametrize("when", ["waiting", "reserved", "cancelled"])
async def test_another_tenant_takes_over_the_newest_place(when):
    line = Line(RequestQueue(1, 2))
    running = await entered(line)
    old = Place(line, "flood")
    newest = Place(line, "flood")
    turns = [asyncio.ensure_future(slot_of(old))]
    if when != "reserved":
        turns.append(asyncio.ensure_future(slot_of(newest)))
    await settle()
    quiet = Place(line, "quiet")
    if when == "cancelled":
        turns[1].cancel()
        await asyncio.wait({turns[1]})
        assert turns[1].cancelled()
    else:
        with pytest.raises(ResourceExhausted) as caught:
            await (slot_of(newest) if when == "reserved" else turns[1])
        assert caught.value.retry_after_s
    newest.leave()
    turn = asyncio.ensure_future(slot_of(quiet))
    await settle()
    for place, its in ((running, turns[0]), (old, turn), (quiet, None)):
        place.leave()
        if its is not None:
            await its
    assert (line.queued, line.in_flight) == (0, 0)


# -- room


class Rooms:
    """Room for a number of requests of each demand; each request that gets a slot takes room."""

    def __init__(self, slots: int = 10, **rooms: int) -> None:
        self.left = Counter({int(name[1:]): count for name, count in rooms.items()})
        self.now_s = 0.0
        self.line = Line(RequestQueue(slots, 10), lambda: self.now_s, lambda demand: self.left[demand] > 0, self.taken)
        self.order: list[str] = []

    def taken(self, demand: int) -> None:
        assert self.left[demand] > 0, "it was told that there is none"
        self.left[demand] -= 1

    def send(self, name: str, demand: int, priority: int = 0) -> tuple[Place, asyncio.Task[None]]:
        place = Place(self.line, "t")

        async def one() -> None:
            if place.enter(1, demand=demand, priority=priority):
                self.taken(demand)
            else:
                await place.wait()
            self.order.append(name)

        return place, asyncio.get_running_loop().create_task(one())


async def test_who_finds_no_room_waits_and_holds_up_nobody():
    rooms = Rooms(d1=1, d2=2)
    sent = [rooms.send(name, demand) for name, demand in [("a", 1), ("b", 1), ("c", 2), ("d", 1), ("e", 2), ("f", 2)]]
    await settle()
    assert rooms.order == ["a", "c", "e"]
    assert (rooms.line.in_flight, rooms.line.queued) == (3, 3)
    rooms.left[1] += 1
    rooms.line.availability_changed()
    rooms.left[2] += 1
    assert rooms.left[1] == 0, "before its task has run"
    await settle()
    assert rooms.order == ["a", "c", "e", "b"]
    rooms.left[1] += 1
    sent[0][0].leave()
    await settle()
    assert rooms.order[4:] == ["d", "f"], "whoever leaves lets all go on who can"
    for place, task in sent:
        await task
        place.leave()
    assert (rooms.line.in_flight, rooms.line.queued, +rooms.left) == (0, 0, Counter())


async def test_a_spare_slot_needs_room_that_nobody_waits_for():
    rooms = Rooms(slots=3, d1=1)
    assert rooms.line.spare("t", 2) is None
    _, waiting = rooms.send("a", 2)
    await settle()
    rooms.left[2] += 2
    assert rooms.line.spare("t", 2) is None, "somebody waits for it"
    spare = rooms.line.spare("t", 1)
    assert spare is not None
    assert rooms.left[1] == 0
    spare.leave()
    await waiting
    assert rooms.order == ["a"], "who leaves hands on"


async def test_who_is_refused_waits_where_it_did():
    rooms = Rooms(d1=2)
    first, second, third = (rooms.send(name, 1) for name in "abc")
    await settle()
    again = asyncio.ensure_future(first[0].again(1))
    await settle()
    assert not again.done()
    assert (rooms.line.in_flight, rooms.line.queued) == (1, 2)
    rooms.left[1] += 1
    rooms.line.availability_changed()
    async with asyncio.timeout(60):
        await again
    assert not third[1].done()
    with pytest.raises(ValueError, match="no slot"):
        await third[0].again(1)
    for place, task in (first, second, third):
        rooms.left[1] += 1
        place.leave()
        await task
    assert (rooms.line.in_flight, rooms.line.queued) == (0, 0)


async def test_a_request_refused_despite_apparent_room_waits_for_news():
    """The request would else be tried again and again."""
    line = Line(RequestQueue(10, 10), is_open=lambda _: True)
    place, other = Place(line, "t"), Place(line, "t")
    await slot_of(place, 1)
    again = asyncio.ensure_future(place.again(1))
    behind = asyncio.ensure_future(slot_of(other, 1))
    await settle()
    assert not again.done()
    assert not behind.done(), "who needs the same comes after it"
    await slot_of(elsewhere := Place(line, "t"), 2)
    line.availability_changed()
    await asyncio.gather(again, behind)
    for each in (place, other, elsewhere):
        each.leave()
    assert (line.in_flight, line.queued) == (0, 0)


async def test_many_go_on_in_parts_and_little_is_asked_for_them():
    count, asked, turns_of_loop = 10 * GRANTS_MAX, Counter[int](), 0
    room = 0

    def is_open(demand: int) -> bool:
        asked[demand] += 1
        return room > 0

    line = Line(RequestQueue(2 * count, 2 * count), is_open=is_open)
    places = [Place(line, f"t{each % 7}") for each in range(count)]
    tasks = [asyncio.ensure_future(slot_of(place, each % 50)) for each, place in enumerate(places)]
    await settle()
    assert line.queued == count
    asked.clear()
    room = count
    line.availability_changed()
    assert line.in_flight == GRANTS_MAX
    while line.queued:
        before = line.in_flight
        await asyncio.sleep(0)
        turns_of_loop += 1
        assert line.in_flight - before <= GRANTS_MAX
    assert turns_of_loop < 20
    assert asked.total() <= count + 50 * (count // GRANTS_MAX + 1)
    await asyncio.gather(*tasks)
    for place in places:
        place.leave()
    assert (line.in_flight, line.queued) == (0, 0)


async def test_a_slot_that_is_put_back_is_for_who_has_room():
    rooms = Rooms(slots=1, d1=1, d2=1)
    first, second = rooms.send("a", 1), rooms.send("b", 2)
    await settle()
    assert rooms.order == ["a"]
    again = asyncio.ensure_future(first[0].again(1))
    await settle()
    assert rooms.order == ["a", "b"]
    again.cancel()
    await asyncio.wait({again})
    first[0].leave()
    second[0].leave()
    assert (rooms.line.in_flight, rooms.line.queued) == (0, 0)


async def test_the_urgent_go_first():
    rooms = Rooms()
    sent = [rooms.send(name, 1, priority) for name, priority in [("a", 0), ("b", -1), ("c", 3), ("d", -2)]]
    await settle()
    rooms.left[1] += 4
    rooms.line.availability_changed()
    await asyncio.wait({task for _, task in sent})
    assert rooms.order == ["d", "b", "a", "c"]


# -- looks that many reports of room ask for


class SlowLoop:
    """A clock with timers that fire in the next turn of the event loop."""

    def __init__(self) -> None:
        self.real = asyncio.get_running_loop()
        self.now_s = 0.0
        self.after: list[float] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, after_s: float, function) -> asyncio.Handle:
        self.after.append(after_s)
        return self.real.call_soon(function)


async def test_what_takes_long_is_called_less_often(monkeypatch):
    takes_s, line = [0.0, 0.01, 5.0, 0.0, 0.0], Line(RequestQueue(1, 10))
    waiting = asyncio.ensure_future(slot_of(Place(line, "t"), 1))
    line.is_open = lambda _: False
    await settle()
    assert line.queued
    loop = SlowLoop()

    def is_open(_: int) -> bool:
        loop.now_s += takes_s.pop(0)
        return False

    line.is_open = is_open
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    for _ in range(5):
        for _ in range(3):  # three calls are answered by one look
            line.look()
        await settle()
    assert loop.after == [LOOK_S, LOOK_S, 0.01 / LOOK_SHARE_MAX, LOOK_PAUSE_MAX_S, LOOK_S]
    monkeypatch.undo()
    waiting.cancel()


async def test_a_look_that_nobody_waited_for_is_made_up_for():
    """A request that was refused elsewhere returns to the queue in the turn of the loop that reports room."""
    rooms = Rooms(d1=1)
    place, first = rooms.send("a", 1)
    await first
    rooms.left[1] += 1
    rooms.line.look()
    assert rooms.line._timer is None, "nobody waits"
    async with asyncio.timeout(60):
        await place.again(1)
    rooms.line.look()
    assert rooms.line._timer is None
    place.leave()


# -- tokens per minute


async def test_who_is_refused_gives_no_tokens_back():
    line = Line(RequestQueue(10, 10))
    metrics = DoorMetrics(CollectorRegistry(), line)
    admission = TenantAdmission(line, TenantRates(), Rates(0, 100), metrics, lambda: 0.0)
    client = Client("t")
    with admission.admit(client) as first:
        assert first.enter(100)
        for _ in range(3):
            with admission.admit(client) as second, pytest.raises(RateLimited):
                second.enter(50)
        first.leave(used_tokens=70)
    with admission.admit(client) as third:
        assert third.enter(30)
        with admission.admit(client) as fourth, pytest.raises(RateLimited):
            fourth.enter(1)
