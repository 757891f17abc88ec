"""Learning beside the event loop: one fit at a time, adopted on the loop or not at all."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from pinyon.runtime.eviction import RefitThread

WAIT_S = 60.0


async def test_it_works_elsewhere_and_adopts_here() -> None:
    refits, adopted = RefitThread(), asyncio.Event()
    seen: list[int] = []

    def adopt(fit: int) -> None:
        seen.extend((fit, threading.get_ident()))
        adopted.set()

    refits(threading.get_ident, adopt)
    assert not seen, "not before the loop goes on"
    await asyncio.wait_for(adopted.wait(), WAIT_S)
    assert seen[0] != seen[1] == threading.get_ident()
    await refits.close()


async def test_one_at_a_time() -> None:
    refits, go, adopted = RefitThread(), threading.Event(), asyncio.Event()
    seen: list[str] = []

    def adopt(fit: str) -> None:
        seen.append(fit)
        adopted.set()

    refits(lambda: go.wait(WAIT_S) and "first", adopt)
    refits(lambda: "left out", adopt)
    go.set()
    await asyncio.wait_for(adopted.wait(), WAIT_S)
    adopted.clear()
    refits(lambda: "next", adopt)
    await asyncio.wait_for(adopted.wait(), WAIT_S)
    assert seen == ["first", "next"]
    await refits.close()


async def test_two_policies_do_not_keep_each_other_from_learning() -> None:
    refits, go, adopted = RefitThread(policies=2), threading.Event(), asyncio.Event()
    seen: list[str] = []

    def adopt(fit: str) -> None:
        seen.append(fit)
        if len(seen) == 2:
            adopted.set()

    refits(lambda: go.wait(WAIT_S) and "of the pool", adopt)
    refits(lambda: "of both tiers", adopt)
    refits(lambda: "left out", adopt)
    go.set()
    await asyncio.wait_for(adopted.wait(), WAIT_S)
    assert seen == ["of the pool", "of both tiers"]
    await refits.close()


async def test_after_the_end_nothing_is_adopted() -> None:
    refits, go = RefitThread(), threading.Event()
    seen: list[object] = []
    refits(lambda: go.wait(WAIT_S), seen.append)
    closing = asyncio.ensure_future(refits.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    refits(lambda: 1, seen.append)
    await asyncio.sleep(0)
    assert seen == []


async def test_a_defect_is_told_and_the_next_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    refits, adopted = RefitThread(), asyncio.Event()
    refits(lambda: 1 // 0, lambda _: None)
    (task,) = refits._tasks
    with caplog.at_level(logging.ERROR):
        await task
    assert "a refit failed" in caplog.text
    refits(lambda: 1, lambda _: adopted.set())
    await asyncio.wait_for(adopted.wait(), WAIT_S)
    await refits.close()
