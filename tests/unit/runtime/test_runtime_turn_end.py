"""Waiting messages are sent by the end of the turn or by the writer, never by both."""

import asyncio

import pytest

from pinyon.runtime.outgoing import Pace, TurnEnd

WAIT_S = 60.0


class Stream:
    """A peer that takes messages while it has room, and may break."""

    def __init__(self):
        self.sent, self.has_room, self.failure = [], True, None

    def push(self, message):
        if self.failure is not None:
            raise self.failure
        self.sent.append(message)
        return True


class Owner:
    def __init__(self):
        self.stream = Stream()
        self.end = TurnEnd(Pace(lambda: 0, lambda: 0.0))
        self.end.by(self.stream)

    @property
    def state(self):
        return len(self.end.messages), len(self.stream.sent)

    def come(self):
        self.end.messages.append("news")
        self.end.come()


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


async def waiting_writer(owner):
    writer = asyncio.ensure_future(owner.end.wait())
    await turns()
    return writer


async def test_before_the_writer_waits_everything_is_its():
    owner = Owner()
    owner.come()
    await turns()
    assert owner.state == (1, 0)


async def test_while_the_writer_waits_news_goes_at_the_end_of_the_turn():
    owner = Owner()
    writer = await waiting_writer(owner)
    owner.come()
    owner.come()
    assert owner.state == (2, 0)
    await turns()
    assert owner.state == (0, 2)
    assert not writer.done()
    writer.cancel()


async def test_what_was_handed_to_the_writer_does_not_go_past_it():
    owner = Owner()
    writer = await waiting_writer(owner)
    owner.come()
    owner.end.to_writer()
    await asyncio.wait_for(writer, WAIT_S)
    await turns()
    assert owner.state == (1, 0)


@pytest.mark.parametrize("how", ["no room", "no stream", "an error"])
async def test_the_writer_has_what_cannot_go(how):
    owner = Owner()
    writer = await waiting_writer(owner)
    if how == "no room":
        owner.stream.has_room = False
    elif how == "no stream":
        owner.end.by(None)
    else:
        owner.stream.failure = ValueError("broken")
    owner.come()
    await asyncio.wait_for(writer, WAIT_S)
    assert owner.state == (1, 0)
    if owner.stream.failure is not None:
        with pytest.raises(ValueError, match="broken"):
            owner.end.check()
    else:
        owner.end.check()
