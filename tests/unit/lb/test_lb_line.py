"""The queue: order, bound, and nothing left by those who leave it."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.routing.queue import RequestQueue
from services.lb.line import Line


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_come_first_served():
    line, order = Line(RequestQueue(1, 10)), []

    async def one(name: int) -> None:
        await line.enter()
        order.append(name)
        await asyncio.sleep(0)
        line.leave()

    await asyncio.gather(*(one(name) for name in range(6)))
    assert order == list(range(6))
    assert (line.queued, line.in_flight) == (0, 0)


async def test_over_the_bound_it_refuses_at_once():
    line = Line(RequestQueue(1, 1))
    await line.enter()
    waiting = asyncio.ensure_future(line.enter())
    await settle()
    with pytest.raises(ResourceExhausted) as caught:
        await line.enter()
    assert caught.value.retry_after_s
    line.leave()
    await waiting
    line.leave()
    assert (line.queued, line.in_flight) == (0, 0)


@pytest.mark.parametrize("leave_first", [False, True])
async def test_cancelled_before_and_after_the_slot_was_given(leave_first):
    line = Line(RequestQueue(1, 10))
    await line.enter()
    first, second = (asyncio.ensure_future(line.enter()) for _ in range(2))
    await settle()
    if leave_first:
        line.leave()  # the slot is the first one's, who does not know it yet
        first.cancel()
    else:
        first.cancel()
        line.leave()
    await asyncio.wait({first})
    await second
    assert first.cancelled()
    assert (line.queued, line.in_flight) == (0, 1)
    line.leave()
    assert line.in_flight == 0
