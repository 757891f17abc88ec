"""Waiting messages are sent by the end of the turn or by the writer, never by both."""

import asyncio

import pytest

from pinyon.runtime.pace import Pace
from pinyon.runtime.turn_end import TurnEnd

WAIT_S = 60.0


class Owner:
    def __init__(self, in_flight=0):
        self.waiting, self.sent, self.has_room, self.failure = 0, 0, True, None
        self.end = TurnEnd(Pace(lambda: in_flight, lambda: 0.0), self.send)
        self.end.by(self)

    def send(self, stream):
        assert stream is self
        if self.failure is not None:
            raise self.failure
        self.sent, self.waiting = self.sent + self.waiting, 0
        return False

    def come(self):
        self.waiting += 1
        self.end.come()


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


async def waiting_writer(owner):
    writer = asyncio.ensure_future(owner.end.news())
    await turns()
    return writer


async def test_before_the_writer_waits_everything_is_its():
    owner = Owner()
    owner.come()
    await turns()
    assert (owner.waiting, owner.sent) == (1, 0)


async def test_while_the_writer_waits_news_goes_at_the_end_of_the_turn():
    owner = Owner()
    writer = await waiting_writer(owner)
    owner.come()
    owner.come()
    assert owner.sent == 0
    await turns()
    assert owner.sent == 2
    assert not writer.done()
    writer.cancel()


async def test_what_was_handed_to_the_writer_does_not_go_past_it():
    owner = Owner()
    writer = await waiting_writer(owner)
    owner.come()
    owner.end.to_writer()
    await asyncio.wait_for(writer, WAIT_S)
    await turns()
    assert (owner.waiting, owner.sent) == (1, 0)


@pytest.mark.parametrize("how", ["no room", "no stream", "an error"])
async def test_the_writer_has_what_cannot_go(how):
    owner = Owner()
    writer = await waiting_writer(owner)
    if how == "no room":
        owner.has_room = False
    elif how == "no stream":
        owner.end.by(None)
    else:
        owner.failure = ValueError("broken")
    owner.come()
    await asyncio.wait_for(writer, WAIT_S)
    assert (owner.waiting, owner.sent) == (1, 0)
    if owner.failure is not None:
        with pytest.raises(ValueError, match="broken"):
            owner.end.check()
    else:
        owner.end.check()
