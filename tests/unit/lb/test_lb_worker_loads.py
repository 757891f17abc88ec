"""Watched instances: when a session is opened to them, and which of their reports are handed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.instances import worker_sessions
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions


class Stream:
    """A dialed stream on which the test plays the instance."""

    dialed: ClassVar[list[Stream]] = []

    def __init__(self, address: str, *_: Any) -> None:
        self.address = address
        self.ended = asyncio.Event()
        self.spoke = self.ending = self.connected = False
        self.take: Callable[[worker_pb2.SessionResponse], None] | None = None
        Stream.dialed.append(self)

    async def run(self, take: Any, messages: Any) -> None:
        self.take, self.messages = take, messages
        await self.ended.wait()
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
        self.sessions = WorkerSessions(100, lambda: self.now, on_load=self._on_load, on_load_lost=self._on_lost)

    def _on_lost(self, address: str, instance_id: str) -> None:
        self.lost.append(instance_id)

    def _on_load(self, address: str, instance_id: str, load: worker_pb2.Load, unseen: int) -> None:
        self.heard.append((instance_id, load.pending, unseen))

    async def dialed(self, count: int) -> Stream:
        await until(lambda: len(Stream.dialed) >= count)
        assert len(Stream.dialed) == count
        return Stream.dialed[-1]


@pytest.fixture
async def lb(monkeypatch: pytest.MonkeyPatch):
    Stream.dialed = []
    monkeypatch.setattr(worker_sessions, "Dialed", Stream)
    lb = Balancer()
    yield lb
    await lb.sessions.close()


async def test_nobody_is_asked_if_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.dialed = []
    monkeypatch.setattr(worker_sessions, "Dialed", Stream)
    sessions = WorkerSessions(100)
    await sessions.open("d:1", 10, 0.0, "a")
    await until(lambda: Stream.dialed[0].take)
    assert not (await anext(Stream.dialed[0].messages)).load_interval_ms
    await Stream.dialed[0].says(pending=1)
    sessions.keep_only(frozenset(("d:1",)))
    assert len(sessions) == 1
    await sessions.close()


async def test_the_first_message_asks_and_what_is_said_is_handed_on(lb: Balancer) -> None:
    lb.sessions.watch({"d:1": "a"})
    stream = await lb.dialed(1)
    await until(lambda: stream.take)
    first = await anext(stream.messages)
    assert (first.load_interval_ms, len(first.submissions)) == (100, 0)
    await stream.says(pending=2)
    await lb.sessions.open("d:1", 10, 0.0, "a")
    await lb.sessions.open("d:1", 10, 0.0, "a")
    await stream.says(received=1)
    assert lb.heard == [("a", 2, 0), ("a", 0, 1)]
    assert len(Stream.dialed) == 1, "one session for both"


async def test_a_session_that_ends_is_lost_once_and_redialed_later(lb: Balancer) -> None:
    lb.sessions.watch({"d:1": "a"})
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
    assert (lb.lost, lb.heard[-1]) == (["a"], ("a", 5, 0))


async def test_who_is_let_go_is_lost_and_not_dialed_again(lb: Balancer) -> None:
    lb.sessions.watch({"d:1": "a", "d:2": "b"})
    for stream in (await lb.dialed(2), Stream.dialed[0]):
        await stream.says()
    lb.sessions.keep_only(frozenset(("d:2",)))
    assert lb.lost == ["a"]
    await until(lambda: len(lb.sessions) == 1)
    await Stream.dialed[0].says()  # the report was on its way
    lb.now += 10
    lb.sessions._dial()
    assert len(Stream.dialed) == 2
    assert len(lb.heard) == 2
    lb.sessions.watch({})
    assert lb.lost == ["a", "b"]
    await until(lambda: len(lb.sessions) == 0)


async def test_a_restart_is_dialed_at_once_and_old_news_are_dropped(lb: Balancer) -> None:
    lb.sessions.watch({"d:1": "a"})
    await (await lb.dialed(1)).says()
    stream, _ = await lb.sessions.open("d:1", 10, 0.0, "a")
    lb.sessions.keep_only(frozenset(("d:1",)), renewed=("d:1",), restarted=("d:1",))
    assert lb.lost == ["a"]
    second = await lb.dialed(2)
    await Stream.dialed[0].says(pending=7)
    await second.says(pending=1)
    assert lb.heard[1:] == [("a", 1, 0)]
    Stream.dialed[0].end()
    await stream.take()
    assert stream.lost is False  # it was never connected
    assert lb.lost == ["a"]


async def test_another_instance_at_the_address_gets_its_own_session(lb: Balancer) -> None:
    lb.sessions.watch({"d:1": "a"})
    await (await lb.dialed(1)).says()
    lb.sessions.watch({"d:1": "b"})
    assert lb.lost == ["a"]
    lb.now += 0.051
    await (await lb.dialed(2)).says()
    assert lb.heard[-1][0] == "b"


async def test_they_are_bounded(lb: Balancer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_sessions, "SESSIONS_MAX", 40)
    lb.sessions.watch({f"d:{number}": f"i{number}" for number in range(100)})
    await lb.dialed(40)
    with pytest.raises(Unavailable):
        await lb.sessions.open("e:1", 10, 0.0)
