"""What one stream sends, gathered in messages while the loop turns."""

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
    """The messages that a :class:`pinyon.runtime.duplex.Duplex` runs with; they go at the :class:`TurnEnd`, or the
    stream's writer has them, one by one.

    All on one event loop. ``limit`` is how many may wait before there is no room for more.
    """

    def __init__(self, make: Callable[[], Sent], pace: Pace, limit: int, parts: int = PARTS_MAX) -> None:
        """``make`` gives an empty message, which gets so many parts at most."""
        self._make = make
        self._pace = pace
        self._limit = limit
        self._parts_max = parts
        self._messages: deque[Sent] = deque()
        """The last one is being filled: with ``_parts``, of ``_size`` bytes."""
        self._size = self._parts = 0
        self._end = TurnEnd(pace, self._send)
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    @property
    def has_room(self) -> bool:
        return len(self._messages) <= self._limit

    async def room(self) -> None:
        """Wait until there is some, or it is closed."""
        if not self.has_room and not self._closed:
            self._room.clear()
            await self._room.wait()

    def by(self, stream: Duplex[Sent, Any]) -> None:
        """They may go past the writer, by this stream."""
        self._end.by(stream)

    def message(self, size_bytes: int) -> Sent:
        """The next one that goes, for a part of at most so many bytes: to be put into it before the loop turns."""
        messages = self._messages
        if not messages or self._size + size_bytes > MESSAGE_BYTES or self._parts >= self._parts_max:
            messages.append(self._make())
            self._size = self._parts = 0
            self._end.come()
        self._size += size_bytes
        self._parts += 1
        return messages[-1]

    def close(self) -> None:
        """What waits does not go any more. Closing twice is fine."""
        self._closed = True
        self._messages.clear()
        self._end.by(None)
        self._end.to_writer()
        self._room.set()

    def _taken(self) -> None:
        """Who waits for room hears of it when there is some for many: one at a time, they would all come for each."""
        if not self._room.is_set() and 2 * len(self._messages) <= self._limit:
            self._room.set()

    def _send(self, stream: Duplex[Any, Any]) -> bool:
        """See :class:`TurnEnd`."""
        messages = self._messages
        while messages and stream.push(messages[0]):
            messages.popleft()
        self._taken()
        return bool(messages)

    # -- what the writer asks for

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
