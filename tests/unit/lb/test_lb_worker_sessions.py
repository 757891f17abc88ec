"""Tests of when an instance is dialed, and which of its reports are handed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.instances import worker_sessions
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.frontdoor.update_stream import WorkerStream
from pinyon.runtime.outgoing import MESSAGE_BYTES


class Stream:
    """A dialed stream on which the test plays the instance. It ends, and lets go of its session, when the test says
    so."""

    dialed: ClassVar[list[Stream]] = []

    def __init__(self, address: str, *_: Any) -> None:
        self.ended, self.let_go = asyncio.Event(), asyncio.Event()
        self.let_go.set()
        self.spoke = self.ending = self.connected = self.has_room = False
        self.take: Callable[[worker_pb2.SessionResponse], None] | None = None
        Stream.dialed.append(self)

    async def run(self, take: Any, messages: Any) -> None:
        self.take, self.messages = take, messages
        await self.ended.wait()
        await self.let_go.wait()
        raise Unavailable("gone")

    def end(self, *_: Any) -> None:
        self.ending = True
        self.ended.set()

    async def says(self, **load: Any) -> None:
        await until(lambda: self.take is not None)
        self.spoke = True
        self.take(worker_pb2.SessionResponse(load=worker_pb2.Load(**load)))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Balancer:
    def __init__(self) -> None:
        self.now = 0.0
        self.heard: list[tuple[str, int, int]] = []
        self.lost: list[str] = []
        self.sessions = WorkerSessions(100, self._on_load, self.lost.append, lambda: self.now)

    def _on_load(self, address: str, load: worker_pb2.Load, unseen: int) -> None:
        self.heard.append((address, load.pending, unseen))

    async def open(self, address: str, size_bytes: int = 10, instance_id: str = "a") -> WorkerStream:
        return (await self.sessions.open(address, instance_id, size_bytes, 0.0))[0]

    async def dialed(self, count: int) -> Stream:
        await until(lambda: len(Stream.dialed) >= count)
        assert len(Stream.dialed) == count
        return Stream.dialed[-1]

    async def gone(self) -> None:
        """Ends the session that was opened last."""
        before = len(self.sessions)
        Stream.dialed[-1].end()
        await until(lambda: len(self.sessions) == before - 1)


@pytest.fixture
async def lb(monkeypatch: pytest.MonkeyPatch):
    Stream.dialed = []
    monkeypatch.setattr(worker_sessions, "Dialed", Stream)
    lb = Balancer()
    yield lb
    for stream in Stream.dialed:
        stream.let_go.set()
    await lb.sessions.close()


async def test_a_dead_address_is_dialed_once_in_its_pause(lb: Balancer) -> None:
    for pause in (0.05, 0.1, 0.2):
        await lb.open("d:1")
        await lb.gone()
        lb.now += pause * 0.9
        for _ in range(3):
            with pytest.raises(Unavailable):
                await lb.open("d:1")
        await lb.open("d:2")  # another session
        await lb.gone()
        lb.now += 1.0
        lb.sessions.keep({"d:1": "a", "d:2": "a"}, watch=False, renewed=("d:2",))
    assert len(Stream.dialed) == 6


async def test_one_that_has_spoken_or_is_new_again_is_dialed_at_once(lb: Balancer) -> None:
    await lb.open("d:1")
    Stream.dialed[-1].spoke = True
    await lb.gone()
    await lb.open("d:1")
    await lb.gone()
    lb.sessions.keep({"d:1": "a"}, watch=False, renewed=("d:1",))
    await lb.open("d:1")
    assert len(Stream.dialed) == 3


async def test_a_session_that_is_ending_is_replaced(lb: Balancer) -> None:
    await lb.open("d:1")
    await asyncio.sleep(0)
    Stream.dialed[0].spoke = True
    Stream.dialed[0].let_go.clear()
    Stream.dialed[0].end()
    stream = await lb.open("d:1")
    assert len(Stream.dialed) == len(lb.sessions) == 2
    Stream.dialed[0].let_go.set()
    await until(lambda: len(lb.sessions) == 1)
    assert not stream.ended
    assert lb.sessions.streams == 1


async def test_a_burst_waits_for_the_instance_to_take_it(lb: Balancer) -> None:
    """Prompts that fill more messages than may wait are no failure of the instance."""
    async with asyncio.timeout(60):
        count = 3 * worker_sessions.MESSAGES_MAX
        opened = [asyncio.ensure_future(lb.open("d:1", MESSAGE_BYTES)) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [each for each in opened if not each.done()]
        assert 0 < len(waiting) < len(opened)
        waiting[0].cancel()
        taken = 0
        while not all(each.done() for each in opened):
            message = await anext(Stream.dialed[0].messages)
            taken += len(message.submissions)
            await asyncio.sleep(0)
        assert sum(not each.cancelled() for each in opened) == len(opened) - 1
        assert lb.sessions.streams == len(opened) - 1


async def test_those_who_wait_for_room_learn_that_the_instance_is_gone(lb: Balancer) -> None:
    async with asyncio.timeout(60):
        count = 2 * worker_sessions.MESSAGES_MAX
        opened = [asyncio.ensure_future(lb.open("d:1", MESSAGE_BYTES)) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [each for each in opened if not each.done()]
        assert waiting
        await lb.gone()
        for each in waiting:
            with pytest.raises(Unavailable):
                await each


async def test_the_first_message_asks_and_what_is_said_is_handed_on(lb: Balancer) -> None:
    lb.sessions.keep({"d:1": "a"}, watch=True)
    stream = await lb.dialed(1)
    await until(lambda: stream.take)
    first = await anext(stream.messages)
    assert (first.load_interval_ms, len(first.submissions)) == (100, 0)
    await stream.says(pending=2)
    await lb.open("d:1")
    await lb.open("d:1")
    await stream.says(received=1)
    assert lb.heard == [("d:1", 2, 0), ("d:1", 0, 1)]
    assert len(Stream.dialed) == 1, "one session for both"


async def test_a_session_that_ends_is_lost_once_and_redialed_later(lb: Balancer) -> None:
    lb.sessions.keep({"d:1": "a"}, watch=True)
    await (await lb.dialed(1)).says()
    Stream.dialed[0].end()
    await until(lambda: lb.lost)
    lb.now += 0.051
    second = await lb.dialed(2)
    second.end()  # the stream ended without a report
    await until(lambda: len(lb.sessions) == 0)
    lb.now += 0.051
    third = await lb.dialed(3)
    third.end()
    await until(lambda: len(lb.sessions) == 0)
    lb.now += 0.051  # the pause has doubled
    lb.sessions._dial()
    await lb.dialed(3)
    lb.now += 0.051
    await (await lb.dialed(4)).says(pending=5)
    assert (lb.lost, lb.heard[-1]) == (["d:1"], ("d:1", 5, 0))


async def test_who_is_let_go_is_lost_and_not_dialed_again(lb: Balancer) -> None:
    lb.sessions.keep({"d:1": "a", "d:2": "b"}, watch=True)
    for stream in (await lb.dialed(2), Stream.dialed[0]):
        await stream.says()
    lb.sessions.keep({"d:2": "b"}, watch=True)
    assert lb.lost == ["d:1"]
    await until(lambda: len(lb.sessions) == 1)
    await Stream.dialed[0].says()  # the report was on its way
    lb.now += 10
    lb.sessions._dial()
    assert len(Stream.dialed) == 2
    assert len(lb.heard) == 2
    lb.sessions.keep({}, watch=True)
    assert lb.lost == ["d:1", "d:2"]
    await until(lambda: len(lb.sessions) == 0)


async def test_a_restart_is_dialed_at_once_and_old_news_are_dropped(lb: Balancer) -> None:
    lb.sessions.keep({"d:1": "a"}, watch=True)
    await (await lb.dialed(1)).says()
    stream = await lb.open("d:1")
    lb.sessions.keep({"d:1": "a"}, watch=True, renewed=("d:1",), restarted=("d:1",))
    assert lb.lost == ["d:1"]
    second = await lb.dialed(2)
    await Stream.dialed[0].says(pending=7)
    await second.says(pending=1)
    assert lb.heard[1:] == [("d:1", 1, 0)]
    Stream.dialed[0].end()
    await stream.take()
    assert stream.lost is False  # it was never connected
    assert lb.lost == ["d:1"]


async def test_another_instance_at_the_address_gets_its_own_session(lb: Balancer) -> None:
    lb.sessions.keep({"d:1": "a"}, watch=True)
    await (await lb.dialed(1)).says()
    lb.sessions.keep({"d:1": "b"}, watch=True)
    assert lb.lost == ["d:1"]
    lb.now += 0.051
    await (await lb.dialed(2)).says()
    assert len(lb.heard) == 2


async def test_they_are_bounded(lb: Balancer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_sessions, "SESSIONS_MAX", 40)
    lb.sessions.keep({f"d:{number}": f"i{number}" for number in range(100)}, watch=True)
    await lb.dialed(40)
    with pytest.raises(Unavailable):
        await lb.open("e:1")
