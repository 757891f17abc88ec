"""Placements that arrive just as the wait for them ends, without a conductor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.frontdoor.instances import conductor_session
from pinyon.frontdoor.instances.conductor_session import ConductorAway, ConductorSession
from pinyon.runtime.outgoing import MESSAGE_BYTES

REQUEST = conductor_pb2.ScheduleRequest(request_id="r")
PLACED = conductor_pb2.ScheduleSessionResponse(
    responses=[conductor_pb2.ScheduleResponse(request_id="r", placement=common_pb2.Placement(decode_instance_id="d0"))]
)


class Stream:
    """A dialed stream like :class:`~pinyon.runtime.duplex.Dialed`: it keeps what was sent, and ``say`` answers."""

    def __init__(self) -> None:
        self.ending = self.has_room = False
        self.sent: list[Any] = []
        self.changed = asyncio.Event()

    async def run(self, take: Any, messages: Any) -> None:
        self.say = take
        async for message in messages:
            self.sent.append(message)
            self.changed.set()

    def end(self, *_: Any) -> None:
        self.ending = True

    async def until_sent(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.sent) < count:
                self.changed.clear()
                await self.changed.wait()


class Link:
    """A link that dials once, at once."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self._converse = args[3]

    def start(self) -> None:
        self.stream = Stream()
        self._task = asyncio.ensure_future(self._converse(self.stream))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


@pytest.fixture
async def session(monkeypatch):
    links: list[Link] = []

    def dial(*args: Any, **named: Any) -> Link:
        links.append(Link(*args, **named))
        return links[-1]

    monkeypatch.setattr(conductor_session, "Redialer", dial)
    session = ConductorSession("c:1", "lb", lambda *_: None, 0.0, lambda: 0)
    session.start()
    stream = links[0].stream
    await stream.until_sent(1)
    stream.say(conductor_pb2.ScheduleSessionResponse())
    yield session, stream
    await session.close()


async def test_a_placement_that_comes_as_the_time_runs_out_is_used(session):
    session, stream = session
    # The answer comes in the same turn of the loop as the time-out, right before it.
    asyncio.get_running_loop().call_soon(stream.say, PLACED)
    placement = await session.place(REQUEST, REQUEST.ByteSize())
    assert placement.decode_instance_id == "d0"
    assert not stream.ending


async def test_one_that_comes_after_it_is_given_back(session):
    session, stream = session
    with pytest.raises(ConductorAway):
        await session.place(REQUEST, REQUEST.ByteSize())
    stream.say(PLACED)
    await stream.until_sent(3)
    assert stream.sent[-1].released_request_ids == ["r"]


async def test_two_requests_of_one_name_both_end(session):
    """Other regions choose names too: the later request gets the answer, and neither waits for ever."""
    session, stream = session
    session._answer_timeout_s = 60.0
    first, second = (asyncio.ensure_future(session.place(REQUEST, REQUEST.ByteSize())) for _ in range(2))
    with pytest.raises(ConductorAway):
        await first
    stream.say(PLACED)
    assert (await second).decode_instance_id == "d0"
    assert session.pending == 0
    first, second = (asyncio.ensure_future(session.place(REQUEST, REQUEST.ByteSize())) for _ in range(2))
    await stream.until_sent(3)
    first.cancel()
    await asyncio.wait({first})
    session._disconnected()
    with pytest.raises(ConductorAway):
        await second
    assert not stream.ending


async def test_what_is_asked_fits_its_messages_and_goes_in_order(session):
    session, stream = session
    session._answer_timeout_s = 60.0
    keys = [bytes(700_000)] * 20 + [b""] * 130
    asked = [
        asyncio.ensure_future(session.place(each, each.ByteSize()))
        for each in (
            conductor_pb2.ScheduleRequest(request_id=str(number), block_keys=each) for number, each in enumerate(keys)
        )
    ]
    async with asyncio.timeout(60):
        while sum(len(each.requests) for each in stream.sent) < len(keys):
            stream.changed.clear()
            await stream.changed.wait()
    assert all(each.ByteSize() <= MESSAGE_BYTES and len(each.requests) <= 64 for each in stream.sent)
    assert [each.request_id for message in stream.sent for each in message.requests] == [*map(str, range(len(keys)))]
    assert len(stream.sent) < 20
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)
    assert session.pending == 0
