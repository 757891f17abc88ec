"""A bounded mailbox whose reader takes all items at once, so that one message carries the work of one loop turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

from pinyon.core.errors import ResourceExhausted

MESSAGE_BYTES = 2 << 20
"""The limit of parts' bytes in one message, unless a single part has more; gRPC takes 4 MiB."""
FRAME_BYTES = 8
"""The bytes that a part takes in its message besides its own."""

Item = TypeVar("Item")
Part = TypeVar("Part", bound=Message)


class OutboxClosed(Exception):
    """An error: the outbox was closed and is empty."""


class Outbox(Generic[Item]):
    """A mailbox of many writers and one reader, all on one event loop. ``limit`` bounds the items that wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: Item) -> None:
        """Adds one item. Raises :class:`ResourceExhausted` when full and :class:`OutboxClosed` when closed."""
        if self._closed:
            raise OutboxClosed
        if len(self._items) >= self._limit:
            raise ResourceExhausted(f"outbox is full ({self._limit} items)")
        self._items.append(item)
        self._wake()

    async def take_all(self) -> list[Item]:
        """Waits for at least one item and takes all. Raises :class:`OutboxClosed` when closed and empty."""
        while not self._items:
            if self._closed:
                raise OutboxClosed
            if self._waiter is not None:
                raise RuntimeError("an outbox has one reader")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Closes the outbox for new items; the reader gets what is left. Closing twice is fine."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
