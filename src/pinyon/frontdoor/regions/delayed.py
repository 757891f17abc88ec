"""Distance between regions, for tests on one machine: messages are handed on after a time, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from google.protobuf.message import Message

from pinyon.runtime.duplex import Messages

__all__ = ["Delayed", "delayed_messages"]

Item = TypeVar("Item")
Sent = TypeVar("Sent", bound=Message)


class Delayed(Generic[Item]):
    """``put`` → ``hand_on`` so many seconds later; at once when it is 0. ``close`` drops what is under way."""

    def __init__(self, seconds: float, hand_on: Callable[[Item], None]) -> None:
        self._seconds = seconds
        self._hand_on = hand_on
        self._items: deque[tuple[float, Item]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, item: Item) -> None:
        if not self._seconds:
            self._hand_on(item)
            return
        self._items.append((self._loop.time() + self._seconds, item))
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._due)

    def close(self) -> None:
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        items, self._timer = self._items, None
        now_s = self._loop.time()
        while items and items[0][0] <= now_s:
            self._hand_on(items.popleft()[1])
        if items:
            self._timer = self._loop.call_later(max(0.0, items[0][0] - now_s), self._due)


async def delayed_messages(messages: Messages[Sent], seconds: float) -> AsyncGenerator[Sent, None]:
    """The same messages, each so many seconds later; those that come meanwhile wait beside it."""
    ready: asyncio.Queue[Sent] = asyncio.Queue()
    delayed: Delayed[Sent] = Delayed(seconds, ready.put_nowait)

    async def read() -> None:
        async with aclosing(messages):
            async for message in messages:
                delayed.put(message)

    reading = asyncio.create_task(read(), name="delayed messages")
    try:
        while True:
            yield await ready.get()
    finally:
        delayed.close()
        reading.cancel()
        await asyncio.wait({reading})
