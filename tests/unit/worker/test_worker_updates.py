from __future__ import annotations

import asyncio

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.outgoing import Pace
from services.worker.decode.outgoing_updates import OutgoingUpdates


def waiting(limit: int) -> OutgoingUpdates:
    return OutgoingUpdates(limit, Pace(lambda: 0, lambda: 0.0))


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
