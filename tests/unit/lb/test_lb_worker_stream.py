"""A request's mailbox: the events that wake its reader."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.frontdoor.update_stream import WorkerStream, WorkerStreams

HOUR_S = 3600.0


def make(gap_s: float) -> WorkerStream:
    return WorkerStreams(1 << 30, lambda _: None).open(gap_s)


def update(token: int, last: bool = False) -> worker_pb2.StreamUpdate:
    reason = common_pb2.FINISH_REASON_STOP if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return worker_pb2.StreamUpdate(stream_id=1, tokens=[token], finish_reason=reason)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_and_last_updates_wake_at_once_and_others_wait():
    stream = make(HOUR_S)
    first = asyncio.ensure_future(stream.take())
    await settle()
    stream.deliver(update(1))
    assert [list(each.tokens) for each in await first] == [[1]]
    rest = asyncio.ensure_future(stream.take())
    await settle()
    assert stream.deliver(update(2)) == 1
    assert stream.deliver(update(3)) == 2
    await settle()
    assert not rest.done()
    stream.deliver(update(4, last=True))
    assert [list(each.tokens) for each in await rest] == [[2], [3], [4]]


async def test_after_the_gap_the_reader_gets_what_is_there():
    stream = make(0.01)
    stream.deliver(update(1))
    assert len(await stream.take()) == 1
    stream.deliver(update(2))  # before a reader waits
    assert len(await stream.take()) == 1
    waiting = asyncio.ensure_future(stream.take())
    await settle()
    stream.deliver(update(3))  # while a reader waits
    stream.deliver(update(4))
    assert len(await waiting) == 2


async def test_a_cancelled_reader_leaves_no_timer():
    stream = make(HOUR_S)
    stream.deliver(update(1))
    await stream.take()
    stream.deliver(update(2))
    reader = asyncio.ensure_future(stream.take())
    await settle()
    reader.cancel()
    await asyncio.wait({reader})
    assert stream._timer is None
    stream.deliver(update(3, last=True))
    assert len(await stream.take()) == 2


async def test_log_probabilities_are_unread_as_tokens_are():
    stream = make(HOUR_S)
    one = update(1)
    one.logprobs.CopyFrom(common_pb2.Logprobs(logprobs=[-1], top_count=3, top_tokens=[1, 2, 3], top_logprobs=[-1] * 3))
    assert stream.deliver(one) == 4
    assert stream.deliver(update(2)) == 5


@given(st.lists(st.one_of(st.just("update"), st.booleans()), max_size=40))
async def test_each_update_is_heard_or_read_once_and_in_order(steps: list[str | bool]):
    """The order holds whatever a listener takes, and whenever the reader has its turn."""
    stream, seen, takes = make(0.0), list[int](), True

    def listener(updates: list[worker_pb2.StreamUpdate]) -> bool:
        if takes:
            seen.extend(token for each in updates for token in each.tokens)
        return takes

    async def read() -> None:
        while not stream.ended or stream._updates:
            seen.extend(token for each in await stream.take() for token in each.tokens)

    reader = asyncio.ensure_future(read())
    await settle()
    stream.listener = listener
    count = 0
    for step in steps:
        if step == "update":
            count += 1
            unread = stream.deliver(update(count))
            assert unread <= count - len(seen)
        elif step:
            takes = not takes
        else:
            await settle()
    stream.deliver(update(count + 1, last=True))
    await reader
    assert seen == list(range(1, count + 2))
    assert stream._timer is None


class StoppedLoop:
    """The running loop with a clock that advances when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, asyncio.Handle]] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback) -> asyncio.Handle:
        handle = asyncio.Handle(callback, (), asyncio.get_running_loop())
        self._timers.append((when_s, handle))
        return handle

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds
        for when_s, handle in self._timers:
            if when_s <= self.now_s and not handle.cancelled():
                handle._run()
                handle.cancel()


async def test_a_listener_hears_at_most_once_per_gap_and_not_the_end():
    stream, heard = make(1.0), list[int]()
    stream._loop = loop = StoppedLoop()

    def listener(updates: list[worker_pb2.StreamUpdate]) -> bool:
        heard.append(len(updates))
        return True

    stream.listener = listener
    reader = asyncio.ensure_future(stream.take())
    await settle()
    stream.deliver(update(1))
    assert heard == [1]
    stream.deliver(update(2))
    assert stream.deliver(update(3)) == 2
    loop.go_on(0.75)
    assert heard == [1]
    loop.go_on(0.25)
    assert heard == [1, 2]
    assert not reader.done()
    assert stream.deliver(update(4)) == 1
    stream.deliver(update(5, last=True))
    assert [token for each in await reader for token in each.tokens] == [4, 5]
    assert heard == [1, 2]


@pytest.mark.parametrize("raised", [StopIteration(), KeyError("x"), ValueError("broken")])
async def test_what_a_listener_raises_is_its_own_request_s(raised: Exception):
    def fail(_: object) -> bool:
        raise raised

    stream = make(0.0)
    stream.deliver(update(1))
    await stream.take()
    waiting = asyncio.ensure_future(stream.take())
    await settle()
    stream.listener = fail
    stream.deliver(update(2))  # delivered where a message is read: the reader goes on there
    with pytest.raises((RuntimeError, KeyError, ValueError)):
        await waiting
