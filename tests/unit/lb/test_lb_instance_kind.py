"""The place that is held for a request while a conductor is asked where it goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.core.compiled import compiled
from pinyon.core.errors import Internal, Unavailable
from pinyon.frontdoor.instances.kind import InstanceKind
from pinyon.routing.two_layers import Where

pytestmark = pytest.mark.skipif(compiled(), reason="fakes stand where compiled code has its own classes")


class World:
    """A region whose conductor answers when the test says so, and that counts the places held in it."""

    def __init__(self) -> None:
        self.held = 0
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        home: Any = SimpleNamespace(removed=set(), layers=lambda model: self)
        home.doubts, home.keys_fit, home.over_http = lambda model: False, lambda *_: True, lambda model: set()
        home.conductor = SimpleNamespace(place=self._place)
        clusters: Any = SimpleNamespace(home=home, get=lambda name: home)
        models: Any = SimpleNamespace(selective=True)
        nothing: Any = None
        self.kind = InstanceKind(clusters, models, nothing, nothing, nothing, nothing)
        self.request: Any = SimpleNamespace(
            model="m", failed_instances=set(), tokens=[], schedule_message=lambda *_: b"", schedule_bytes=lambda _: 0
        )

    def hold(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    async def _place(self, asked: object, size: int) -> Any:
        self.asked.set()
        return await self.answer

    async def place(self) -> asyncio.Task[Any]:
        choice: Any = SimpleNamespace(where=Where.LOCAL, target="")
        placing = asyncio.ensure_future(self.kind.place(self.request, choice))
        async with asyncio.timeout(60):
            await self.asked.wait()
        assert self.held == 1
        return placing


@pytest.mark.parametrize("error", [None, Unavailable("no"), Internal("a bug")])
async def test_a_place_is_held_until_the_conductor_answers(error: Exception | None) -> None:
    world = World()
    placing = await world.place()
    if error is None:
        world.answer.set_result("there")
    else:
        world.answer.set_exception(error)
    await asyncio.wait({placing}, timeout=60)
    assert world.held == 0
    if not isinstance(error, Internal):
        assert await placing is error
    else:
        with pytest.raises(Internal):
            await placing


async def test_the_place_of_a_client_that_left_is_given_back() -> None:
    world = World()
    placing = await world.place()
    placing.cancel()
    await asyncio.wait({placing}, timeout=60)
    assert placing.cancelled()
    assert world.held == 0
