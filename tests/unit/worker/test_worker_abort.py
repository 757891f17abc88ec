from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import Cancelled, ResourceExhausted, Unavailable
from services.worker.orders.abort import Abort


async def test_the_first_reason_stays_and_reaches_every_waiter():
    abort = Abort()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(abort.wait(future))
    await asyncio.sleep(0)
    assert abort.fire(Cancelled("first"))
    assert not abort.fire(Unavailable("second"))
    with pytest.raises(Cancelled):
        await waiting
    with pytest.raises(Cancelled):
        await abort.wait(future)
    assert not future.done()


async def test_results_and_errors_come_through():
    abort = Abort()
    loop = asyncio.get_running_loop()
    good, bad = loop.create_future(), loop.create_future()
    loop.call_soon(good.set_result, 4)
    assert await abort.wait(good) == 4
    bad.set_exception(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await abort.wait(bad)


async def test_a_wait_has_an_end():
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(ResourceExhausted):
        await Abort().wait(future, ResourceExhausted("full"), 0.001)
