"""The outgoing messages of one stream, filled during a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pinyon.runtime.duplex import Duplex
from pinyon.runtime.outbox import MESSAGE_BYTES
from pinyon.runtime.pace import Pace
from pinyon.runtime.turn_end import TurnEnd

PARTS_MAX = 1 << 16

Sent = TypeVar("Sent", bound=Message)


class Outgoing(Generic[Sent]):
    """The messages of a :class:`pinyon.runtime.duplex.Duplex`, sent at the :class:`TurnEnd` or by the stream's writer.

    All runs on one event loop. ``limit`` is the number of messages that may wait before there is no room for more.
    """

    def __init__(self, make: Callable[[], Sent], pace: Pace, limit: int, parts: int = PARTS_MAX) -> None:
        """Takes ``make``, which returns an empty message, and the most ``parts`` that a message gets."""
        self._make = make
        self._pace = pace
        self._limit = limit
        self._parts_max = parts
        self._messages: deque[Sent] = deque()
        """The waiting messages; the last one is being filled, and has ``_parts`` parts of ``_size`` bytes."""
        self._size = self._parts = 0
        self._end = TurnEnd(pace, self._send)
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of waiting messages."""
        return len(self._messages)

    @property
    def has_room(self) -> bool:
        return len(self._messages) <= self._limit

    async def room(self) -> None:
        """Waits until there is room, or the stream is closed."""
        if not self.has_room and not self._closed:
            self._room.clear()
            await self._room.wait()

    def by(self, stream: Duplex[Sent, Any]) -> None:
        """Lets messages go past the writer, by this stream."""
        self._end.by(stream)

    def message(self, size_bytes: int) -> Sent:
        """Returns the message for a part of at most ``size_bytes``, which has to be added before the loop turns."""
        messages = self._messages
        if not messages or self._size + size_bytes > MESSAGE_BYTES or self._parts >= self._parts_max:
            messages.append(self._make())
            self._size = self._parts = 0
            self._end.come()
        self._size += size_bytes
        self._parts += 1
        return messages[-1]

    def close(self) -> None:
        """Drops the waiting messages. Closing twice is fine."""
        self._closed = True
        self._messages.clear()
        self._end.by(None)
        self._end.to_writer()
        self._room.set()

    def _taken(self) -> None:
        """Wakes those who wait for room once there is room for many: else they would all wake for each message."""
        if not self._room.is_set() and 2 * len(self._messages) <= self._limit:
            self._room.set()

    def _send(self, stream: Duplex[Any, Any]) -> bool:
        """Pushes messages as far as the stream takes them, and returns whether some are left."""
        messages = self._messages
        while messages and stream.push(messages[0]):
            messages.popleft()
        self._taken()
        return bool(messages)

    # -- for the writer

    def __aiter__(self) -> Outgoing[Sent]:
        return self

    async def __anext__(self) -> Sent:
        while not self._messages:
            self._end.check()
            await self._end.news()
            await self._pace.turn()
        self._end.check()
        message = self._messages.popleft()
        self._taken()
        return message

    async def aclose(self) -> None:
        self.close()
