"""Outgoing messages: all are sent once, in order, whether the peer has room or not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.outgoing import MESSAGE_BYTES, Outgoing, Pace

Ask = worker_pb2.SessionRequest
WAIT_S = 60.0


class Stream:
    """A stand-in for :class:`pinyon.runtime.duplex.Duplex` that takes ``room`` messages before the writer waits."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.sent: list[int] = []
        self.written = 0
        self.free, self.news = asyncio.Event(), asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def push(self, message: Any) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent += message.cancel_stream_ids
        self.news.set()
        return True

    async def until_sent(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.sent) < count:
                self.news.clear()
                await self.news.wait()

    def give(self, room: int) -> None:
        self.room += room
        self.free.set()

    async def write_all(self, messages: Outgoing[Ask]) -> None:
        async for message in messages:
            self.written += 1
            while not self.push(message):
                self.free.clear()
                await self.free.wait()


def outgoing(stream: Stream, in_flight: int = 1, **limits: int) -> Outgoing[Ask]:
    made: Outgoing[Ask] = Outgoing(Ask, Pace(lambda: in_flight, time.monotonic), limits.pop("limit", 32), **limits)
    made.by(stream)  # type: ignore[arg-type]
    return made


@given(st.lists(st.one_of(st.integers(1, 3), st.integers(-4, 0), st.none()), max_size=40), st.integers(1, 3))
def test_all_of_it_goes_once_and_in_order(steps: list[int | None], parts: int) -> None:
    """Each step puts some messages, gives the peer room, or turns the loop."""

    async def run() -> None:
        stream = Stream()
        out = outgoing(stream, parts=parts)
        writer = asyncio.ensure_future(stream.write_all(out))
        put = 0
        for step in steps:
            if step is None:
                await asyncio.sleep(0)
            elif step > 0:
                for _ in range(step):
                    out.message(16).cancel_stream_ids.append(put)
                    put += 1
            else:
                stream.give(-step)
        stream.give(1 << 20)
        await stream.until_sent(put)
        assert stream.sent == list(range(put))
        assert len(out.messages) == 0
        writer.cancel()
        await asyncio.wait({writer})

    asyncio.run(run())


async def test_with_room_no_writer_is_woken_and_a_turn_is_one_message() -> None:
    stream = Stream(100)
    out = outgoing(stream)
    writer = asyncio.ensure_future(stream.write_all(out))
    await asyncio.sleep(0)
    for turn in range(10):
        for _ in range(3):
            out.message(16).cancel_stream_ids.append(turn)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert stream.sent == [turn for turn in range(10) for _ in range(3)]
    assert (stream.room, stream.written) == (90, 0)
    writer.cancel()


async def test_under_load_messages_are_spaced() -> None:
    stream = Stream(100)
    out = outgoing(stream, in_flight=1000)
    writer = asyncio.ensure_future(stream.write_all(out))
    began_s = time.monotonic()
    await asyncio.sleep(0)
    for turn in range(4):
        out.message(16).cancel_stream_ids.append(turn)
        await stream.until_sent(turn + 1)
    assert time.monotonic() - began_s >= 3 * 0.001
    writer.cancel()


async def test_a_message_is_no_larger_than_it_may_be() -> None:
    stream = Stream()
    out = outgoing(stream)
    first = out.message(MESSAGE_BYTES - 10)
    assert out.message(10) is first
    assert out.message(1) is not first
    assert out.message(2 * MESSAGE_BYTES) is not first  # this part is a message of its own
    assert len(out.messages) == 3


async def test_what_the_stream_cannot_send_ends_it() -> None:
    class Narrow(Stream):
        def push(self, message: Any) -> bool:
            raise ResourceExhausted("too large")

    stream = Narrow(1)
    out = outgoing(stream)
    writer = asyncio.ensure_future(stream.write_all(out))
    await asyncio.sleep(0)
    out.message(16)
    with pytest.raises(ResourceExhausted):
        await asyncio.wait_for(writer, WAIT_S)


async def test_who_waits_for_room_has_it_or_hears_of_the_end() -> None:
    stream = Stream()
    out = outgoing(stream, limit=4, parts=1)
    await out.room()
    for _ in range(6):
        out.message(16)
    assert not out.has_room
    waiting = asyncio.ensure_future(out.room())
    await asyncio.sleep(0)
    writer = asyncio.ensure_future(stream.write_all(out))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.give(4)
    await asyncio.wait_for(waiting, WAIT_S)
    for _ in range(6):
        out.message(16)
    waiting = asyncio.ensure_future(out.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    writer.cancel()
    out.close()
    await asyncio.wait_for(waiting, WAIT_S)
    await out.room()
    assert len(out.messages) == 0


async def test_what_waits_goes_and_then_the_writer_ends() -> None:
    stream = Stream()
    out = outgoing(stream, parts=1)
    for number in range(3):
        out.message(16).cancel_stream_ids.append(number)
    assert sum([len(each.cancel_stream_ids) for each in out.messages]) == 3
    out.finish()
    stream.give(3)
    await asyncio.wait_for(stream.write_all(out), WAIT_S)
    assert (stream.sent, len(out.messages), out.closed) == ([0, 1, 2], 0, True)


async def test_the_end_wakes_a_writer_that_waits() -> None:
    stream = Stream()
    out = outgoing(stream)
    writer = asyncio.ensure_future(stream.write_all(out))
    await asyncio.sleep(0)
    assert not writer.done()
    out.finish()
    await asyncio.wait_for(writer, WAIT_S)
