from __future__ import annotations

import asyncio

import pytest

from pinyon.core.request import Role
from pinyon.placement.fleet import Fleet
from services.conductor.listing import FRESH_S, Listing
from services.conductor.membership import Membership
from tests.unit.placement.conftest import info, make_fleet, member


class World:
    """A listing whose pauses end when the test says so."""

    def __init__(self, settle_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.fleet: Fleet = make_fleet()
        self.membership = Membership(self.fleet, lambda: self.now_s, 3.0, settle_s)
        self.pauses: list[asyncio.Future[None]] = []
        self.listing = Listing(self.fleet, self.membership, lambda: self.now_s, self.pause)

    async def pause(self, _: float) -> None:
        self.pauses.append(asyncio.get_running_loop().create_future())
        await self.pauses[-1]

    def resume(self) -> None:
        for pause in self.pauses:
            pause.set_result(None)
        self.pauses.clear()

    def names(self, message) -> list[str]:
        return [each.info.instance_id for each in message.instances.instances]


@pytest.fixture
def world() -> World:
    return World()


async def take(stream):
    async with asyncio.timeout(60):
        return await anext(stream)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_list_is_built_once_for_all(world):
    for number in range(3):
        world.membership.open(info(f"p{number}", Role.PREFILL))
    streams = [world.listing.lists() for _ in range(20)]
    first = [await take(stream) for stream in streams]
    assert all(message is first[0] for message in first)
    waiting = [asyncio.ensure_future(take(stream)) for stream in streams]
    await turns()
    world.resume()
    world.membership.open(info("p9", Role.PREFILL))
    second = await asyncio.gather(*waiting)
    assert all(message is second[0] for message in second)
    assert world.names(second[0]) == ["p0", "p1", "p2", "p9"]


async def test_changes_close_together_come_in_one_list(world):
    stream = world.listing.lists()
    assert world.names(await take(stream)) == []
    waiting = asyncio.ensure_future(take(stream))
    await turns()
    for number in range(5):
        world.membership.open(info(f"p{number}", Role.PREFILL))
        await turns()
    assert not waiting.done()
    world.resume()
    message = await waiting
    assert len(world.names(message)) == 5
    waiting = asyncio.ensure_future(take(stream))
    await turns()
    world.resume()
    await turns()
    assert not waiting.done(), "nothing has changed since"
    waiting.cancel()


async def test_a_newcomer_gets_loads_that_are_fresh(world):
    world.membership.open(info("p0", Role.PREFILL))
    old = await take(world.listing.lists())
    world.now_s += FRESH_S
    new = await take(world.listing.lists())
    assert new is not old
    assert new.instances.instances[0].report_age_ms == 1000 * FRESH_S


async def test_while_it_settles_those_without_a_session_are_left_out():
    world = World(settle_s=2.0)
    world.membership.open(info("p0", Role.PREFILL))
    world.membership.close(world.membership.open(info("p1", Role.PREFILL)))
    message = await take(world.listing.lists())
    assert message.instances.incomplete
    assert world.names(message) == ["p0"]
    assert len(world.listing.instances()) == 2
    world.now_s += 2.0
    world.membership.expire()
    message = await take(world.listing.lists())
    assert not message.instances.incomplete
    assert world.names(message) == ["p0", "p1"]
    assert not member(world.fleet, "p1").schedulable
