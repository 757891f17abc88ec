"""Places for messages: no sender takes all, none waits for a sender that left, and nothing is kept."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.runtime import first_message
from pinyon.runtime.first_message import Arrivals


class Sender:
    """A sender that asks for places and keeps those it gets."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.has = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, count: int) -> int:
        """Returns the number of held places once nothing changes any more."""
        self.tasks += [asyncio.create_task(self._keep(name)) for _ in range(count)]
        for _ in range(5):
            await asyncio.sleep(0)
        return self.has

    async def _keep(self, name: str) -> None:
        async with self.arrivals.place(name):
            self.has += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.has -= 1

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_one_sender_has_so_many_and_all_together_have_so_many(monkeypatch):
    monkeypatch.setattr(first_message, "ALL_MAX", 5)
    monkeypatch.setattr(first_message, "EACH_MAX", 2)
    arrivals = Arrivals()
    a, b, c = (Sender(arrivals) for _ in range(3))
    assert [await a.ask("a", 4), await b.ask("b", 1), await c.ask("c", 4)] == [2, 1, 2]
    assert await b.ask("b", 1) == 1, "all are taken"
    await c.leave()
    assert await b.ask("b", 0) == 2, "what it waited for came"
    assert set(arrivals._each) == {"a", "b"}
    await a.leave()
    await b.leave()
    assert not arrivals._each


async def test_what_stays_is_refused_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(first_message, "EACH_MAX", 1)
    arrivals = Arrivals()
    with arrivals.stay("watch"):
        with pytest.raises(ResourceExhausted), arrivals.stay("watch"):
            pass
        with arrivals.stay("reflect"):
            assert set(arrivals._staying) == {"watch", "reflect"}
    with arrivals.stay("watch"):
        pass
    assert not arrivals._staying
