"""The outbox: one batch per reader's turn, bounded, and nothing lost on close."""

import asyncio

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.outbox import Outbox, OutboxClosed


async def test_a_batch_is_what_is_there():
    outbox: Outbox[int] = Outbox(10)
    for item in range(3):
        outbox.put(item)
    assert await outbox.take_all() == [0, 1, 2]


async def test_the_reader_wakes_for_the_first_item():
    outbox: Outbox[int] = Outbox(10)
    reader = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(0)  # lets the reader wait
    assert not reader.done()
    outbox.put(1)
    outbox.put(2)
    assert await reader == [1, 2]


async def test_over_the_limit_is_refused_and_nothing_is_lost():
    outbox: Outbox[int] = Outbox(2)
    outbox.put(1)
    outbox.put(2)
    with pytest.raises(ResourceExhausted):
        outbox.put(3)
    assert await outbox.take_all() == [1, 2]


async def test_close_delivers_what_is_left_and_then_ends():
    outbox: Outbox[int] = Outbox(2)
    outbox.put(1)
    outbox.close()
    with pytest.raises(OutboxClosed):
        outbox.put(2)
    assert await outbox.take_all() == [1]
    with pytest.raises(OutboxClosed):
        await outbox.take_all()


async def test_close_wakes_a_waiting_reader():
    outbox: Outbox[int] = Outbox(2)
    reader = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(0)
    outbox.close()
    with pytest.raises(OutboxClosed):
        await reader


async def test_a_cancelled_reader_can_come_back():
    outbox: Outbox[int] = Outbox(2)
    reader = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    outbox.put(7)
    assert await outbox.take_all() == [7]
