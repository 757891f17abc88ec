"""Tests of when a load balancer is told of the load."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.runtime.outgoing import Pace
from services.worker.decode.load_news import HEARTBEAT_S, LoadNews
from services.worker.decode.outgoing_updates import OutgoingUpdates

INTERVAL_S = 0.1


class Source:
    def __init__(self) -> None:
        self.load = worker_pb2.Load(running=1)
        self.reads = 0

    def read(self) -> worker_pb2.Load:
        self.reads += 1
        load = worker_pb2.Load()
        load.CopyFrom(self.load)
        return load

    def news(self, interval_s: float = INTERVAL_S) -> LoadNews:
        return LoadNews(self.read, interval_s, lambda: None, lambda: 0.0)


@pytest.fixture
def source() -> Source:
    return Source()


def test_the_first_load_is_told_at_once_changes_by_the_interval(source: Source) -> None:
    news = source.news()
    assert news.look(5.0)
    assert news.tell(5.0) == worker_pb2.Load(running=1, seq=1)
    source.load.pending = 1
    assert not news.look(5.05)
    assert news.look(5.1)
    assert news.look(5.1001), "due until it is told"
    assert news.tell(5.3).pending == 1
    assert not news.look(5.39)


def test_what_goes_back_meanwhile_is_told_as_it_is_then(source: Source) -> None:
    news = source.news()
    news.tell(0.0)
    source.load.pending = 1
    assert news.look(0.1)
    source.load.pending = 0
    assert news.tell(0.2).pending == 0
    assert not news.look(0.3)


@pytest.mark.parametrize("interval_s", [0.01, 0.1, 0.3, 0.5, 2.0])
def test_what_does_not_change_is_told_now_and_then(source: Source, interval_s: float) -> None:
    """The load is checked when the session says so, and at any other time."""
    news = source.news(interval_s)
    heartbeat_s = max(HEARTBEAT_S, interval_s)
    now, told = 0.0, []
    news.tell(now)
    while now < 10 * heartbeat_s:
        now = min(news.next_s, now + 0.0123)
        if news.look(now):
            news.tell(now)
            told.append(now)
    gaps = [later - earlier for earlier, later in zip([0.0, *told], told, strict=False)]
    assert max(gaps) <= heartbeat_s + 0.002
    assert min(gaps) >= heartbeat_s - 0.002


def test_a_message_that_goes_anyway_carries_the_load_early(source: Source) -> None:
    news = source.news()
    news.tell(0.0)
    assert not news.look(HEARTBEAT_S * 0.4, going=True)
    assert not news.look(HEARTBEAT_S * 0.6)
    assert news.look(HEARTBEAT_S * 0.6, going=True)
    seldom = source.news(2.0)
    seldom.tell(0.0)
    assert not seldom.look(1.9, going=True)


def test_it_is_read_no_more_often_than_the_interval(source: Source) -> None:
    news = source.news()
    news.tell(0.0)
    for step in range(400):
        news.look(step * 0.001)
    assert source.reads <= 1 + 4


async def test_a_reader_is_woken_for_it_and_updates_take_it_along(source: Source) -> None:
    now = [0.0]
    updates = OutgoingUpdates(10, Pace(lambda: 0, lambda: 0.0), lambda: news.take())
    news = LoadNews(source.read, INTERVAL_S, updates.nudge, lambda: now[0])
    news.start()
    async with asyncio.timeout(60):
        message = await anext(updates)
        assert (len(message.updates), message.load.seq) == (0, 1), "nudged"
        source.load.pending = 3
        updates.update(7).text = "a"
        message = await anext(updates)
        assert (len(message.updates), message.HasField("load")) == (1, False), "too early"
        now[0] += INTERVAL_S
        updates.update(7).text = "b"
        message = await anext(updates)
        assert (len(message.updates), message.load.seq, message.load.pending) == (1, 2, 3)
        now[0] += HEARTBEAT_S
        message = await anext(updates)
        assert (len(message.updates), message.load.seq) == (0, 3), "nudged by the timer"
    news.close()


async def test_a_nudge_is_no_farewell() -> None:
    updates = OutgoingUpdates(10, Pace(lambda: 0, lambda: 0.0))
    updates.nudge()
    updates.close()
    updates.nudge()
    assert [each async for each in updates] == []
