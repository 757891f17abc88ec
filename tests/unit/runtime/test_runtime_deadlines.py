"""Deadlines of one event loop, and time limits that end the same tasks in the same way as ``asyncio.timeout``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf

import pytest

from pinyon.runtime.deadlines import TICK_S, Deadline, TimeLimit, deadlines_of

FOREVER_S = 600.0


@asynccontextmanager
async def ours(seconds: float) -> AsyncIterator[None]:
    with TimeLimit(seconds):
        yield


@pytest.fixture(params=["ours", "asyncio"])
def limit(request):
    return ours if request.param == "ours" else asyncio.timeout


async def test_what_takes_too_long_is_cancelled_and_told_so(limit) -> None:
    cancelled = False

    async def run() -> None:
        nonlocal cancelled
        async with limit(0.01):
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(TimeoutError):
        await run()
    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_is_in_time_is_left_alone(limit) -> None:
    async with limit(FOREVER_S):
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="its own"):
        async with limit(FOREVER_S):
            raise ValueError("its own")


async def test_who_is_cancelled_by_others_is_not_told_that_it_was_late(limit) -> None:
    begun = asyncio.Event()

    async def run() -> None:
        async with limit(FOREVER_S):
            begun.set()
            await asyncio.sleep(FOREVER_S)

    task = asyncio.ensure_future(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_late_and_cancelled_at_once_is_cancelled(limit) -> None:
    """The task that cancelled this task waits for the cancellation."""

    async def run() -> None:
        async with limit(0.01):
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                task.cancel()
                raise

    task = asyncio.ensure_future(run())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_its_own_error_goes_before_lateness(limit) -> None:

    async def run() -> None:
        async with limit(0.01):
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                raise KeyError from None

    with pytest.raises(KeyError):
        await run()


async def test_the_timer_runs_while_there_is_a_limit_only() -> None:
    deadlines = deadlines_of(asyncio.get_running_loop())
    with TimeLimit(inf):
        assert deadlines._timer is None
    with TimeLimit(FOREVER_S), TimeLimit(FOREVER_S):
        far = deadlines._timer
        assert far is not None
    with suppress(TimeoutError), TimeLimit(0):
        assert deadlines._timer is not far  # the new deadline is sooner
        await asyncio.sleep(FOREVER_S)
    assert deadlines._timer is None
    assert not deadlines._slots


class Told:
    """An object that is told when its time is up."""

    def __init__(self) -> None:
        self.deadline = Deadline(asyncio.get_running_loop(), self.late)
        self.times = 0

    def late(self) -> None:
        self.times += 1


async def passed(seconds: float) -> None:
    """Waits by deadlines of the same loop, which expire in order."""
    with suppress(TimeoutError), TimeLimit(seconds):
        await asyncio.sleep(FOREVER_S)


async def test_a_deadline_is_put_off_and_brought_forward() -> None:
    loop, told = asyncio.get_running_loop(), Told()
    now_s = loop.time()
    told.deadline.set(now_s + TICK_S)
    told.deadline.set(now_s + FOREVER_S)
    await passed(2 * TICK_S)
    assert told.times == 0
    told.deadline.set(loop.time())
    await passed(2 * TICK_S)
    assert told.times == 1
    assert told.deadline.due == inf
    told.deadline.set(loop.time())
    told.deadline.due = inf
    await passed(2 * TICK_S)
    told.deadline.set(loop.time() + FOREVER_S)
    told.deadline.close()
    assert not deadlines_of(loop)._slots
    assert told.times == 1


async def test_who_fails_when_told_keeps_nobody_else_from_it() -> None:
    loop = asyncio.get_running_loop()
    failed: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    first, second = Told(), Told()
    first.deadline._missed = lambda: {}["no"]
    for each in (first, second):
        each.deadline.set(loop.time())
    await passed(2 * TICK_S)
    assert [type(each) for each in failed] == [KeyError]
    assert second.times == 1
