"""Sessions over a carrier that sends at once: answers right where messages are read, and withdrawals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import PinyonError, ResourceExhausted
from pinyon.core.request import Role
from pinyon.messages.instance import info_to_proto
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor, build
from services.conductor.settings import ConductorSettings
from tests.unit.placement.conftest import info, keys

Ask = conductor_pb2.ScheduleSessionRequest
Report = conductor_pb2.ReportSessionRequest
WAIT_S = 20.0


class Carrier:
    """A stream like the event loop's own: see :class:`pinyon.runtime.http2.messages.MessageStream`."""

    def __init__(self) -> None:
        self.room = True
        self.refuses: PinyonError | None = None
        self.sent: list[Any] = []
        self.take: asyncio.Future[Callable[[Any], Awaitable[None] | None]] = asyncio.get_running_loop().create_future()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_room(self) -> bool:
        return self.room

    def push(self, message: Any) -> bool:
        if self.room and self.refuses is not None:
            raise self.refuses
        if self.room:
            self.sent.append(message)
        return self.room

    async def write(self, message: Any) -> None:
        await self.over

    async def read(self) -> Any:
        await self.over

    async def each(self, take: Callable[[Any], Awaitable[None] | None]) -> None:
        self.take.set_result(take)
        await self.over

    def peer_identities(self) -> None:
        return None

    def answers(self) -> list[Any]:
        """Returns the sent answers without the lists of instances."""
        return [each for each in self.sent if not (isinstance(each, Answer) and each.HasField("instances"))]


Answer = conductor_pb2.ScheduleSessionResponse


class World:
    def __init__(self) -> None:
        settings = ConductorSettings(listen="127.0.0.1:0", settle_ms=0)
        self.conductor: Conductor = build(settings, CollectorRegistry(), Telemetry("conductor", "c"), lambda: 100.0)

    async def open(self, method: str) -> tuple[Carrier, Callable[[Any], Awaitable[None] | None], asyncio.Task[None]]:
        carrier = Carrier()
        session = asyncio.create_task(getattr(self.conductor.servicer, method)(None, carrier))
        return carrier, await asyncio.wait_for(asyncio.shield(carrier.take), WAIT_S), session

    async def reporter(self) -> tuple[Carrier, Callable[[Any], Awaitable[None] | None], asyncio.Task[None]]:
        carrier, take, session = await self.open("ReportSession")
        snapshot = conductor_pb2.CacheSnapshot(keys=keys(1), first=True, last=True)
        assert take(Report(registration=info_to_proto(info("p0", Role.MIXED)), snapshot=snapshot)) is None
        return carrier, take, session

    @property
    def placed(self) -> int:
        return self.conductor.fleet.inflight.decodes


def ask(*names: str) -> Ask:
    request = conductor_pb2.ScheduleRequest(model="m", prompt_tokens=17, max_tokens=8)
    asked = Ask()
    for name in names:
        asked.requests.add(request_id=name).MergeFrom(request)
    return asked


@pytest.fixture
async def world() -> World:
    return World()


async def test_placements_are_answered_where_they_are_read(world):
    await world.reporter()
    carrier, take, _ = await world.open("ScheduleSession")
    assert take(ask("a", "b")) is None
    (answer,) = carrier.answers()
    assert [each.request_id for each in answer.responses if each.HasField("placement")] == ["a", "b"]
    assert take(Ask(released_request_ids=["a"])) is None
    assert world.placed == 1


async def test_a_slow_reader_has_nothing_placed_that_it_never_hears_of(world):
    await world.reporter()
    carrier, take, session = await world.open("ScheduleSession")
    carrier.room = False
    waits = take(ask("a"))
    assert waits is not None
    assert world.placed == 0, "nobody awaits it yet, and maybe nobody will"
    answering = asyncio.ensure_future(waits)
    await asyncio.sleep(0)
    assert world.placed == 1
    answering.cancel()
    await asyncio.wait({answering})
    assert (world.placed, carrier.answers()) == (0, [])
    session.cancel()
    await asyncio.wait({session})


async def test_placements_whose_answer_is_refused_are_taken_back(world):
    await world.reporter()
    carrier, take, _ = await world.open("ScheduleSession")
    carrier.refuses = ResourceExhausted("too large")
    with pytest.raises(ResourceExhausted):
        take(ask("a", "b"))
    assert world.placed == 0


async def test_reports_are_answered_where_they_are_read(world):
    carrier, take, session = await world.reporter()
    (welcome,) = carrier.sent
    assert (welcome.lease_ms, welcome.sample_every) == (3000, 4)
    assert take(Report(deltas=[conductor_pb2.CacheDelta(seq=1, stored_keys=keys(4))])) is None
    assert [each.acked_seq for each in carrier.sent] == [0, 1]
    assert take(Report()) is None
    assert len(carrier.sent) == 2, "there is nothing to say"
    assert take(Report(leaving=True)) is None
    await asyncio.wait_for(session, WAIT_S)
    assert len(world.conductor.fleet) == 0


async def test_large_reports_are_answered_when_all_is_done(world):
    carrier, take, _ = await world.reporter()
    stored = keys(*range(0, 1 << 17, 4))
    waits = take(Report(deltas=[conductor_pb2.CacheDelta(seq=1, stored_keys=stored)]))
    assert waits is not None
    assert len(carrier.sent) == 1
    await asyncio.wait_for(waits, WAIT_S)
    assert carrier.sent[-1].acked_seq == 1
