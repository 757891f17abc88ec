"""Work beside the event loop: bounded, and a tenant leaves places to the others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.off_loop import OffLoop


async def test_one_tenant_leaves_places_to_others():
    go = threading.Event()
    off_loop = OffLoop(threads=1, waiting_max=7)
    running: list[asyncio.Task[bool]] = []

    async def more(name: str, count: int) -> int:
        """Returns how many of ``count`` more calls are refused."""
        began = [asyncio.ensure_future(off_loop.run(name, go.wait, 30)) for _ in range(count)]
        await asyncio.sleep(0)  # each is refused at once or not at all
        refused = [each for each in began if each.done()]
        running.extend(each for each in began if not each.done())
        for each in refused:
            assert isinstance(each.exception(), Unavailable)
        return len(refused)

    try:
        assert await more("anna", 10) == 6, "half of all"
        assert await more("bert", 10) == 8, "half of what is left"
        assert await more("", 10) == 8, "who has no name takes what there is"
        go.set()
        assert all(await asyncio.gather(*running))
        running.clear()
        go.clear()
        assert await more("anna", 10) == 6, "all came back"
        go.set()
        await asyncio.gather(*running)
    finally:
        go.set()
        off_loop.close()


async def test_what_the_work_raises_is_raised():
    off_loop = OffLoop()
    try:
        with pytest.raises(ZeroDivisionError):
            await off_loop.run("", lambda: 1 // 0)
    finally:
        off_loop.close()
