"""What one stream sends: gathered in messages while the loop turns, and sent at the end of the turn in which the first
of it came, or as soon after it as its pace allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pinyon.runtime.duplex import Duplex
from pinyon.runtime.outbox import MESSAGE_BYTES
from pinyon.runtime.pace import Pace

__all__ = ["Outgoing"]

PARTS_MAX = 1 << 16

Sent = TypeVar("Sent", bound=Message)


class Outgoing(Generic[Sent]):
    """The messages that a :class:`pinyon.runtime.duplex.Duplex` runs with. While the peer takes what comes, no task has
    to be woken for one; else the stream's writer has them, one by one.

    All on one event loop. ``limit`` is how many may wait before there is no room for more.
    """

    def __init__(self, make: Callable[[], Sent], pace: Pace, limit: int, parts: int = PARTS_MAX) -> None:
        """``make`` gives an empty message, which gets so many parts at most."""
        self._make = make
        self._pace = pace
        self._limit = limit
        self._parts_max = parts
        self._loop = asyncio.get_running_loop()
        self._stream: Duplex[Sent, Any] | None = None
        self._messages: deque[Sent] = deque()
        """The last one is being filled: with ``_parts``, of ``_size`` bytes."""
        self._size = self._parts = 0
        self._going: asyncio.Handle | None = None
        self._behind = True
        """The writer has them."""
        self._news = asyncio.Event()
        """For the writer."""
        self._room = asyncio.Event()
        self._room.set()
        self._failure: Exception | None = None
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
        self._stream = stream

    def message(self, size_bytes: int) -> Sent:
        """The next one that goes, for a part of at most so many bytes: to be put into it before the loop turns."""
        messages = self._messages
        if not messages or self._size + size_bytes > MESSAGE_BYTES or self._parts >= self._parts_max:
            messages.append(self._make())
            self._size = self._parts = 0
            if self._behind:
                self._news.set()
            elif self._going is None:
                self._going = self._loop.call_soon(self._go)
        self._size += size_bytes
        self._parts += 1
        return messages[-1]

    def close(self) -> None:
        """What waits does not go any more. Closing twice is fine."""
        self._closed = self._behind = True
        if self._going is not None:
            self._going.cancel()
            self._going = None
        self._messages.clear()
        self._stream = None
        self._room.set()

    def _taken(self) -> None:
        """Who waits for room hears of it when there is some for many: one at a time, they would all come for each."""
        if not self._room.is_set() and 2 * len(self._messages) <= self._limit:
            self._room.set()

    def _go(self) -> None:
        self._going = None
        messages, stream = self._messages, self._stream
        try:
            if stream is not None and stream.has_room:
                early_s = self._pace.early_s()
                if early_s > 0.0:
                    self._going = self._loop.call_later(early_s, self._go)
                    return
                self._pace.went()
                while messages and stream.push(messages[0]):
                    messages.popleft()
                self._taken()
        except Exception as error:  # the writer's: it ends the stream
            self._failure = error
        if messages:
            self._behind = True
            self._news.set()

    # -- what the writer asks for

    def __aiter__(self) -> Outgoing[Sent]:
        return self

    async def __anext__(self) -> Sent:
        while not self._messages:
            self._behind = False
            self._news.clear()
            await self._news.wait()
            await self._pace.turn()
        if self._failure is not None:
            raise self._failure
        message = self._messages.popleft()
        self._taken()
        return message

    async def aclose(self) -> None:
        self.close()
