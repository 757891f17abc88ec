"""A session with another region's load balancer holds no more than its bound for a caller that reads nothing."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import Any

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.frontdoor.regions.inbound import MESSAGES_MAX, PARTS_MAX, InboundSession

SERVING: Any = SimpleNamespace(
    clock=monotonic,
    sessions=set(),
    ending=False,
    states=lambda sharing, region: [],
    readiness=SimpleNamespace(draining=False),
)


class Unread:
    """A stream whose other end reads nothing."""

    ending = False
    why: Any = None

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def push(self, message: Any) -> bool:
        return False

    async def run(self, take: Any, outgoing: Any) -> None:
        await self.ended.wait()

    def end(self, why: Any = None) -> None:
        self.ending, self.why = True, why
        self.ended.set()


class Session(InboundSession[Any]):
    held = 0

    def add(self, message: peer_pb2.SessionResponse, part: Any) -> None:
        self.held += 1

    def take(self, message: peer_pb2.SessionRequest) -> None:
        pass


async def test_a_caller_that_takes_nothing_is_ended() -> None:
    session, stream = Session(SERVING, SimpleNamespace(name="lb-eu", region="eu")), Unread()  # type: ignore[arg-type]
    running = asyncio.create_task(session.run(stream, peer_pb2.PeerWelcome()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    part = peer_pb2.PeerWelcome()
    for _ in range((MESSAGES_MAX + 2) * PARTS_MAX):
        session.put(part)
    await running
    assert isinstance(stream.why, ResourceExhausted)
    assert session.held <= (MESSAGES_MAX + 1) * PARTS_MAX
