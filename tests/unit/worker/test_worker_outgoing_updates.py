"""The updates of a session: they pass the writer while there is room, and go through it when there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.outgoing import MESSAGE_BYTES, Pace
from services.worker.decode.outgoing_updates import OutgoingUpdates


def waiting(limit: int = 10_000) -> OutgoingUpdates:
    return OutgoingUpdates(limit, Pace(lambda: 0, lambda: 0.0))


class Peer:
    """A stream that takes what is pushed while it has room."""

    def __init__(self) -> None:
        self.has_room = True
        self.takes = 1 << 30
        """The number of updates taken before there is no room."""
        self.got: list[worker_pb2.SessionResponse] = []
        self.came = asyncio.Event()

    def push(self, message: worker_pb2.SessionResponse) -> bool:
        if not self.has_room:
            return False
        self.got.append(message)
        self.came.set()
        self.has_room = len(self.got) < self.takes
        return True


class Session:
    """A session's updates, with a writer that asks for messages as a stream's does."""

    def __init__(self) -> None:
        self.loads: list[worker_pb2.Load] = []
        self.broken = False
        self.peer = Peer()
        self.now_s = 0.0
        self.in_flight = 0
        pace = Pace(lambda: self.in_flight, lambda: self.now_s)
        self.updates = OutgoingUpdates(10_000, pace, self._load)
        stream: Any = self.peer
        self.updates.by(stream)
        self.written: list[worker_pb2.SessionResponse] = []
        self.taken = asyncio.Event()
        """The event that the peer takes what is written."""
        self.taken.set()
        self.writer = asyncio.ensure_future(self._write())

    def _load(self) -> worker_pb2.Load | None:
        if self.broken:
            raise RuntimeError("no load")
        return self.loads.pop() if self.loads else None

    async def _write(self) -> None:
        async for message in self.updates:
            self.written.append(message)
            await self.taken.wait()

    async def turns(self) -> None:
        """Lets the loop turn until every task has done what it can; none waits for time."""
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def session():
    made = Session()
    await made.turns()
    yield made
    made.updates.close()
    async with asyncio.timeout(60):
        await made.writer
    await made.updates.aclose()


def texts(messages: list[worker_pb2.SessionResponse]) -> list[dict[int, str]]:
    return [{each.stream_id: each.text for each in message.updates} for message in messages]


async def test_all_of_one_turn_goes_past_the_writer_in_one_message(session: Session) -> None:
    for number in (1, 2, 1):
        session.updates.update(number).text += "a"
    assert not session.peer.got
    await session.turns()
    session.updates.update(2).text = "b"
    await session.turns()
    assert texts(session.peer.got) == [{1: "aa", 2: "a"}, {2: "b"}]
    assert not session.written


async def test_without_room_updates_are_merged_and_stay_in_order(session: Session) -> None:
    session.peer.has_room = False
    session.taken.clear()
    session.updates.update(1).text = "a"
    await session.turns()
    for letter in "bc":
        session.updates.update(1).text += letter
        await session.turns()
    session.peer.has_room = True
    session.updates.update(1).text += "d"
    await session.turns()
    assert (texts(session.written), session.peer.got) == ([{1: "a"}], [])
    session.taken.set()
    await session.turns()
    session.updates.update(1).text = "e"
    await session.turns()
    assert (texts(session.written), texts(session.peer.got)) == ([{1: "a"}, {1: "bcd"}], [{1: "e"}])


async def test_under_load_what_comes_soon_waits_and_goes_by_itself(session: Session) -> None:
    session.in_flight = 20
    session.updates.update(1).text = "a"
    await session.turns()
    session.updates.update(1).text = "b"
    await session.turns()
    assert texts(session.peer.got) == [{1: "a"}]
    session.updates.update(1).text += "c"
    session.now_s += 0.002
    async with asyncio.timeout(60):
        while len(session.peer.got) < 2:
            session.peer.came.clear()
            await session.peer.came.wait()
    assert (texts(session.peer.got), session.written) == ([{1: "a"}, {1: "bc"}], [])


async def test_the_end_does_not_wait_for_the_pace(session: Session) -> None:
    session.in_flight = 20
    for text in "ab":
        session.updates.update(1).text = text
        await session.turns()
    session.updates.close()
    async with asyncio.timeout(60):
        await session.writer
    assert (texts(session.peer.got), texts(session.written)) == ([{1: "a"}], [{1: "b"}])


async def test_the_writer_sends_what_the_peer_did_not_take(session: Session) -> None:
    session.peer.takes = 1
    for number in range(1000):
        session.updates.update(number).text = "x" * 8000
    await session.turns()
    assert (len(session.peer.got), len(session.written)) == (1, 3)
    assert [each.stream_id for message in session.peer.got + session.written for each in message.updates] == [
        *range(1000)
    ]


async def test_the_end_comes_after_all_that_was_said(session: Session) -> None:
    session.updates.update(1).text = "last"
    session.updates.close()
    async with asyncio.timeout(60):
        await session.writer
    assert texts(session.written + session.peer.got) == [{1: "last"}]


async def test_a_load_goes_with_updates_and_alone(session: Session) -> None:
    session.loads.append(worker_pb2.Load(seq=1))
    session.updates.update(1).text = "a"
    await session.turns()
    session.loads.append(worker_pb2.Load(seq=2))
    session.updates.nudge()
    await session.turns()
    session.updates.nudge()  # another message has taken the load
    await session.turns()
    assert [(len(each.updates), each.load.seq) for each in session.peer.got] == [(1, 1), (0, 2)]
    assert not session.written


async def test_a_message_that_cannot_be_made_ends_the_writer(session: Session) -> None:
    session.broken = True
    session.updates.update(1).text = "a"
    with pytest.raises(RuntimeError, match="no load"):
        async with asyncio.timeout(60):
            await session.writer
    session.writer = asyncio.ensure_future(asyncio.sleep(0))


async def test_texts_that_are_replayed_at_once_fit_their_messages() -> None:
    updates = waiting()
    for number in range(1000):
        updates.update(number).text = "x" * 8000
    updates.close()
    messages = [message async for message in updates]
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in messages)
    assert [each.stream_id for message in messages for each in message.updates] == list(range(1000))


async def test_updates_of_a_stream_merge_and_streams_share_a_message():
    buffer = waiting(10)
    for stream, token in ((1, 5), (2, 6), (1, 7)):
        buffer.update(stream).tokens.append(token)
    message = await anext(buffer)
    assert [(update.stream_id, list(update.tokens)) for update in message.updates] == [(1, [5, 7]), (2, [6])]
    assert buffer.unsent == 0


async def test_the_reader_waits_and_is_woken_once_for_all_of_a_turn():
    buffer = waiting(10)
    reading = asyncio.ensure_future(anext(buffer))
    await asyncio.sleep(0)
    buffer.update(1).text = "a"
    buffer.update(2).text = "b"
    assert len((await reading).updates) == 2


async def test_closing_gives_what_is_left_then_none():
    buffer = waiting(10)
    buffer.update(1).text = "a"
    buffer.close()
    buffer.update(1).text = "late"
    message = await anext(buffer)
    assert [update.text for update in message.updates] == ["a"]
    assert [each async for each in buffer] == []


async def test_closing_wakes_the_reader():
    buffer = waiting(10)
    reading = asyncio.ensure_future(anext(buffer, None))
    await asyncio.sleep(0)
    buffer.close()
    assert await reading is None


async def test_over_the_limit_everything_is_dropped_and_said():
    buffer = waiting(3)
    for token in range(3):
        buffer.update(1).tokens.append(token)
    assert not buffer.overflow.done()
    buffer.update(1).tokens.append(9)
    with pytest.raises(ResourceExhausted):
        buffer.overflow.result()
    assert buffer.unsent == 0
    assert [each async for each in buffer] == []
    buffer.update(1)  # late updates do no harm


async def test_what_a_token_brings_along_counts():
    buffer = waiting(10)
    for _ in range(3):
        buffer.update(1, 4).tokens.append(7)
    assert (buffer.unsent, buffer.overflow.done()) == (12, False)
    buffer.update(1, 4)
    with pytest.raises(ResourceExhausted):
        buffer.overflow.result()


async def test_an_update_apart_is_merged_with_no_other():
    buffer = waiting(10)
    buffer.update(1).text = "a"
    buffer.apart(1).text = "refused"
    buffer.update(1).text += "b"
    buffer.apart(2).text = "refused, too"
    buffer.update(2).text = "c"
    message = await anext(buffer)
    said = [(update.stream_id, update.text) for update in message.updates]
    assert said == [(1, "ab"), (1, "refused"), (2, "refused, too"), (2, "c")]
    buffer.apart(3).text = "alone"
    assert [update.text for update in (await anext(buffer)).updates] == ["alone"]
