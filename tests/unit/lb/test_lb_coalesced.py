from __future__ import annotations

import asyncio

from pinyon.frontdoor.coalesced import PAUSE_MAX_S, SHARE_MAX, Coalesced
from pinyon.frontdoor.line import Line, Place
from pinyon.routing.queue import RequestQueue


class Loop:
    """A clock with timers that fire when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.after: list[float] = []

    def time(self) -> float:
        return self.now_s


async def test_what_takes_long_is_called_less_often(monkeypatch):
    fake, real, calls = Loop(), asyncio.get_running_loop(), []
    takes_s = iter((0.0, 0.01, 5.0, 0.0, 0.0))

    def work() -> None:
        calls.append(fake.now_s)
        fake.now_s += next(takes_s)

    def call_later(after_s, function):
        fake.after.append(after_s)
        return real.call_soon(function)

    fake.call_later = call_later
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: fake)
    coalesced = Coalesced(work, 0.002)
    for _ in range(5):
        for _ in range(3):  # three calls coalesce into one
            coalesced()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(calls) == 5
    assert fake.after == [0.002, 0.002, 0.01 / SHARE_MAX, PAUSE_MAX_S, 0.002]


async def test_what_nobody_wants_is_not_called():
    called, wanted = asyncio.Event(), False
    coalesced = Coalesced(called.set, 0.0, lambda: wanted)
    coalesced()
    assert coalesced._timer is None
    wanted = True
    coalesced()
    await asyncio.wait_for(called.wait(), 60)


async def test_a_call_made_before_anybody_waited_is_made_up_for():
    """A request that was refused elsewhere returns to the queue in the turn of the loop that reports room."""
    called = asyncio.Event()
    line = Line(RequestQueue(1, 4))
    coalesced = Coalesced(called.set, 0.0, lambda: line.queued)
    line.on_put_back = coalesced.wanted_now
    place = Place(line, "t")
    assert place.enter(1)
    coalesced()
    assert coalesced._timer is None
    waits = asyncio.ensure_future(place.again(0))
    await asyncio.wait_for(called.wait(), 60)
    place.leave()
    waits.cancel()
    coalesced.wanted_now()  # no call was missed since
    assert coalesced._timer is None
