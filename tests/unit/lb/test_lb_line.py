"""The queue: order, bound, and nothing left by those who leave it."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.queue import RequestQueue
from services.lb.line import Line, Place


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_come_first_served():
    line, order = Line(RequestQueue(1, 10)), []

    async def one(name: int) -> None:
        with line.reserve("t") as place:
            await place.turn(1)
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(name) for name in range(6)))
    assert order == list(range(6))
    assert (line.queued, line.in_flight) == (0, 0)


async def entered(line: Line) -> Place:
    place = line.reserve("t")
    await place.turn(1)
    return place


async def test_over_the_bound_it_refuses_at_once():
    line = Line(RequestQueue(1, 1))
    first = await entered(line)
    second = line.reserve("t")
    waiting = asyncio.ensure_future(second.turn(1))
    await settle()
    with pytest.raises(ResourceExhausted) as caught:
        line.reserve("t")
    assert caught.value.retry_after_s
    first.leave()
    first.leave()  # once is enough
    await waiting
    assert (line.queued, line.in_flight) == (0, 1)
    second.leave()
    assert (line.queued, line.in_flight) == (0, 0)


@pytest.mark.parametrize("leave_first", [False, True])
async def test_cancelled_before_and_after_the_slot_was_given(leave_first):
    line = Line(RequestQueue(1, 10))
    running = await entered(line)

    async def one() -> None:
        with line.reserve("t") as place:
            await place.turn(1)
            await asyncio.Event().wait()

    first, second = (asyncio.ensure_future(one()) for _ in range(2))
    await settle()
    if leave_first:
        running.leave()  # the slot is the first one's, who does not know it yet
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
        with line.reserve("t"), pytest.raises(ResourceExhausted):
            line.reserve("t")
    await entered(line)


@pytest.mark.parametrize("when", ["waiting", "reserved", "cancelled"])
async def test_another_tenant_takes_over_the_newest_place(when):
    line = Line(RequestQueue(1, 2))
    running = await entered(line)
    old = line.reserve("flood")
    newest = line.reserve("flood")
    turns = [asyncio.ensure_future(old.turn(1))]
    if when != "reserved":
        turns.append(asyncio.ensure_future(newest.turn(1)))
    await settle()
    quiet = line.reserve("quiet")
    if when == "cancelled":
        turns[1].cancel()
        await asyncio.wait({turns[1]})
        assert turns[1].cancelled()
    else:
        with pytest.raises(ResourceExhausted) as caught:
            await (newest.turn(1) if when == "reserved" else turns[1])
        assert caught.value.retry_after_s
    newest.leave()
    turn = asyncio.ensure_future(quiet.turn(1))
    await settle()
    for place, its in ((running, turns[0]), (old, turn), (quiet, None)):
        place.leave()
        if its is not None:
            await its
    assert (line.queued, line.in_flight) == (0, 0)
