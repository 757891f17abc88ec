"""The outgoing messages of one stream, filled during a turn of the event loop and sent at its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pinyon.core.clock import Clock
from pinyon.runtime.duplex import Duplex

MESSAGE_BYTES = 2 << 20
"""The limit of parts' bytes in one message, unless a single part has more; gRPC takes 4 MiB."""
FRAME_BYTES = 8
"""The bytes that a part takes in its message besides its own."""
PARTS_MAX = 1 << 16

EACH_S = 0.0001
MOST_S = 0.0015
# Timers of the loop have millisecond steps, so a shorter wait is not worth one.
LEAST_S = 0.0005

Sent = TypeVar("Sent", bound=Message)
Part = TypeVar("Part", bound=Message)


class Pace:
    """The gap between messages of one stream, which grows with the requests in flight: 0.1 ms for each, at most 1.5 ms.

    A message costs some 15 µs of CPU on each side, whatever it holds (:mod:`pinyon.runtime.http2`). Its making and
    reading cost as much again, so one every 1.5 ms takes some 2 % of a core. A single request never waits. With a dozen
    in flight, each waits a millisecond or so, and shares the message with the others."""

    def __init__(self, in_flight: Callable[[], int], clock: Clock) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._last_s = float("-inf")

    async def turn(self) -> None:
        """Waits until the next message is due; call it right before the message is put together."""
        early_s = self.early_s()
        if early_s > 0.0:
            await asyncio.sleep(early_s)
        self.went()

    def early_s(self) -> float:
        """Returns the seconds until the next message is due; 0 if it is."""
        gap_s = min(MOST_S, EACH_S * self._in_flight())
        early_s = self._last_s + gap_s - self._clock()
        return early_s if early_s > LEAST_S else 0.0

    def went(self) -> None:
        """Notes that a message is put together now."""
        self._last_s = self._clock()


class TurnEnd(Generic[Sent]):
    """The messages of a :class:`pinyon.runtime.duplex.Duplex`, which wake no task as long as the peer takes them.

    They go at the end of the event loop's turn, or as soon as the pace allows. Otherwise the stream's writer, which
    iterates over this object, sends them. An error of the sending ends the stream, by the writer. All runs on one event
    loop."""

    def __init__(self, pace: Pace, compose: Callable[[], None] = lambda: None) -> None:
        """Takes ``compose``, which appends messages of what waits for it, right before they go past the writer."""
        self.pace = pace
        self._compose = compose
        self.messages: deque[Sent] = deque()
        """The waiting messages."""
        self._loop = asyncio.get_running_loop()
        self._stream: Duplex[Any, Any] | None = None
        self._going: asyncio.Handle | None = None
        self._behind = True
        """True while the waiting messages are the writer's."""
        self._news = asyncio.Event()
        """Set when there are messages for the writer."""
        self._failure: Exception | None = None

    def by(self, stream: Duplex[Any, Any] | None) -> None:
        """Lets messages go past the writer, by this stream; None ends that."""
        self._stream = stream

    def come(self) -> None:
        """Notes that a message waits."""
        if self._behind:
            self._news.set()
        elif self._going is None:
            self._going = self._loop.call_soon(self._go)

    def to_writer(self) -> None:
        """Leaves the waiting messages to the writer, until it waits for more."""
        if self._going is not None:
            self._going.cancel()
            self._going = None
        self._behind = True
        self._news.set()

    def _go(self) -> None:
        self._going = None
        left = True
        try:
            stream = self._stream
            if stream is not None and stream.has_room:
                early_s = self.pace.early_s()
                if early_s > 0.0:
                    self._going = self._loop.call_later(early_s, self._go)
                    return
                self.pace.went()
                left = self._send(stream)
        except Exception as error:
            self._failure = error
        if left:
            self.to_writer()

    def _send(self, stream: Duplex[Any, Any]) -> bool:
        """Pushes messages as far as the stream takes them, and returns whether some are left."""
        self._compose()
        messages = self.messages
        while messages and stream.push(messages[0]):
            messages.popleft()
        return bool(messages)

    # -- for the writer

    async def wait(self) -> None:
        """Waits for messages for the writer; meanwhile they go past the writer if possible."""
        self._behind = False
        self._news.clear()
        await self._news.wait()

    def check(self) -> None:
        """Raises the error that ended the sending, if any."""
        if self._failure is not None:
            raise self._failure


class Outgoing(TurnEnd[Sent]):
    """Messages that are filled part by part, in order.

    The number of messages that may wait before there is no room for more is ``limit``; nothing enforces it here."""

    def __init__(self, make: Callable[[], Sent], pace: Pace, limit: int, parts: int = PARTS_MAX) -> None:
        """Takes ``make``, which returns an empty message, and the most ``parts`` that a message gets."""
        super().__init__(pace)
        self._make = make
        self._limit = limit
        self._parts_max = parts
        self._size = self._parts = 0
        """The bytes and parts of the last message, which is being filled."""
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False
        """True once no more messages are taken."""
        self._finished = False

    @property
    def has_room(self) -> bool:
        return len(self.messages) <= self._limit

    async def room(self) -> None:
        """Waits until there is room, or the stream is closed."""
        if not self.has_room and not self.closed:
            self._room.clear()
            await self._room.wait()

    def message(self, size_bytes: int) -> Sent:
        """Returns the message for a part of at most ``size_bytes``, which has to be added before the loop turns."""
        messages = self.messages
        if not messages or self._size + size_bytes > MESSAGE_BYTES or self._parts >= self._parts_max:
            messages.append(self._make())
            self._size = self._parts = 0
            self.come()
        self._size += size_bytes
        self._parts += 1
        return messages[-1]

    def finish(self) -> None:
        """Lets the iterator end when the messages that wait have gone."""
        self.closed = self._finished = True
        self.to_writer()

    def close(self) -> None:
        """Drops the waiting messages. Closing twice is fine."""
        self.closed = True
        self.messages.clear()
        self.by(None)
        self.to_writer()
        self._room.set()

    def _taken(self) -> None:
        """Wakes those who wait for room once there is room for many: else they would all wake for each message."""
        if not self._room.is_set() and 2 * len(self.messages) <= self._limit:
            self._room.set()

    def _send(self, stream: Duplex[Any, Any]) -> bool:
        left = super()._send(stream)
        self._taken()
        return left

    def __aiter__(self) -> Outgoing[Sent]:
        return self

    async def __anext__(self) -> Sent:
        while not self.messages:
            self.check()
            if self._finished:
                raise StopAsyncIteration
            await self.wait()
            await self.pace.turn()
        self.check()
        message = self.messages.popleft()
        self._taken()
        return message

    async def aclose(self) -> None:
        self.close()


def in_messages(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yields the parts of each message, in order, as many as its size allows."""
    together: list[Part] = []
    filled = 0
    for part in parts:
        size = part.ByteSize() + FRAME_BYTES
        if together and filled + size > MESSAGE_BYTES:
            yield together
            together, filled = [], 0
        together.append(part)
        filled += size
    if together:
        yield together
