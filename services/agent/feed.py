"""The subscription to a server's KV cache events, by ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from pinyon.runtime.logging import get_logger
from services.agent.engine_blocks import EngineBlocks

WAITING_MAX = 10_000
"""The maximum number of batches that wait here; the publisher drops more, which are then replayed."""
BATCH_BYTES_MAX = 64 << 20
REPLAY_S = 20.0
"""The time in which a replay must begin."""
REPLAYING_S = 2.0
"""The time in which each further message of it must come."""
PAUSE_S = 1.0
"""The pause after a failure, before everything begins anew."""
_END = b"\xff" * 8
"""The number that ends a replay."""

_log = get_logger("agent")


@dataclass(eq=False)
class EventFeed:
    """The feed of ``held`` with the events at one address. At ``replay``, if given, missed ones can be asked for.

    ``changed`` is called after each batch."""

    held: EngineBlocks
    events: str
    replay: str
    topic: str
    changed: Callable[[], None]

    async def run(self) -> None:
        """Applies events until it is cancelled."""
        while True:
            context = zmq.asyncio.Context()
            try:
                await self._follow(context)
            except Exception:
                _log.exception("the events at %s cannot be read; everything begins anew", self.events)
            finally:
                context.destroy(linger=0)
            self.held.begin()
            self.changed()
            await asyncio.sleep(PAUSE_S)

    async def _follow(self, context: Any) -> None:
        # Subscribed first, so that nothing is lost between the replay and what comes live.
        socket = _connected(context, zmq.SUB, self.events)
        socket.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        await self._catch_up(context, 0)
        while True:
            frames = await socket.recv_multipart()
            if (number := self._number(frames)) is not None:
                if (first := self.held.missing(number)) is not None:
                    await self._catch_up(context, first)
                await self._take(number, frames[-1])

    async def _catch_up(self, context: Any, first: int) -> None:
        """Has the batches from ``first`` on replayed, as far as the server still has them.

        A server that replays faster than batches are taken loses some on the way, so those are asked for again."""
        if not self.replay:
            return
        while not await self._replay(context, first) and self.held.next > first:
            first = self.held.next

    async def _replay(self, context: Any, first: int) -> bool:
        """Takes a replay up to its end, or to the first batch that was lost on the way. Returns whether it ended."""
        self.held.counts["replays"] += 1
        socket = _connected(context, zmq.DEALER, self.replay)
        wait_s, taken = REPLAY_S, False
        try:
            # Python 3.11's wait_for loses a cancellation that comes together with a message.
            async with asyncio.timeout(wait_s):
                await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(wait_s):
                    frames = await socket.recv_multipart()
                if frames[-2:-1] == [_END]:
                    return True
                if (number := self._number(frames)) is not None:
                    if taken and number > self.held.next:
                        return False
                    await self._take(number, frames[-1])
                    wait_s, taken = REPLAYING_S, True
        except TimeoutError:
            if not taken:
                _log.warning("%s does not replay events, or too slowly", self.replay)
            return False
        finally:
            socket.close(linger=0)

    async def _take(self, number: int, payload: bytes) -> None:
        try:
            batch = msgpack.unpackb(payload)
        except ValueError:
            batch = None
        with closing(self.held.take(number, batch)) as steps:
            for _ in steps:
                await asyncio.sleep(0)
        self.changed()

    def _number(self, frames: Sequence[bytes]) -> int | None:
        """Returns the number of the batch in these frames, the last two of which are number and batch."""
        if len(frames) > 1 and len(frames[-2]) == 8:
            return int.from_bytes(frames[-2], "big")
        self.held.counts["malformed_batches"] += 1
        return None


def _connected(context: Any, kind: int, address: str) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
    socket.connect(address)
    return socket
