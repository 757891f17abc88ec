"""Time limits, beside ``asyncio.timeout``: the same ends of the same tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from math import inf

import pytest

from pinyon.frontdoor.time_limit import TICK_S, TimeLimits

FOREVER_S = 600.0


def ours(limits: TimeLimits) -> Callable[[float], object]:
    @asynccontextmanager
    async def limit(seconds: float):
        with limits.until(time.monotonic() + seconds):
            yield

    return limit


@pytest.fixture(params=["ours", "asyncio"])
def limit(request):
    return ours(TimeLimits()) if request.param == "ours" else asyncio.timeout


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
    """Who cancelled the task waits for it to be that."""

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
    limits = TimeLimits()
    now_s = time.monotonic()
    with limits.until(inf):
        assert limits._timer is None
    with limits.until(now_s + FOREVER_S), limits.until(now_s + FOREVER_S):
        assert limits._timer is not None
    await asyncio.sleep(2 * TICK_S)  # of the same loop, whose timers go off in their order
    assert limits._timer is None
    with suppress(TimeoutError), limits.until(now_s):
        await asyncio.sleep(FOREVER_S)
