"""What streams have to say to one reader, merged until it takes it: at most one update per stream and message."""

from __future__ import annotations

import asyncio

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.pace import Pace

__all__ = ["UpdateBuffer"]


class UpdateBuffer:
    """One reader. All updates that come in one turn of the event loop travel in one message.

    ``limit`` bounds the changes that wait (about one per token, and per log-probability): a reader that is slower is
    cut off. ``pace`` spaces the messages, so that under load more updates travel in one.
    """

    def __init__(self, limit: int, pace: Pace | None = None) -> None:
        self._limit = limit
        self._pace = pace
        self._message = worker_pb2.SessionResponse()
        self._by_stream: dict[int, worker_pb2.StreamUpdate] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._nudged = False
        self.overflow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with :class:`ResourceExhausted` when the limit is reached; what waited is lost then."""
        self.unsent = 0
        """Changes not taken yet."""

    def update(self, stream_id: int, changes: int = 1) -> worker_pb2.StreamUpdate:
        """The stream's next update, to be filled in before control returns to the event loop."""
        if self._closed:
            return worker_pb2.StreamUpdate()
        if self.unsent >= self._limit:
            self.overflow.set_exception(
                ResourceExhausted(f"the reader is too slow: more than {self._limit} tokens wait for it")
            )
            self.overflow.exception()
            self.close(discard=True)
            return worker_pb2.StreamUpdate()
        self.unsent += changes
        self._wake()
        update = self._by_stream.get(stream_id)
        if update is None:
            update = self._by_stream[stream_id] = self._message.updates.add()
            update.stream_id = stream_id
        return update

    async def take(self) -> worker_pb2.SessionResponse | None:
        """Everything there is: at least one update, or none after a :meth:`nudge`. None when closed and empty."""
        while not (self._by_stream or self._nudged):
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pace is not None and not self._closed:
            await self._pace.turn()
        if self._closed and not self._by_stream:
            return None  # discarded meanwhile, or nudged only
        self._nudged = False
        message = self._message
        self._forget()
        return message

    def nudge(self) -> None:
        """The reader gets a message soon, even if there is no update for it."""
        if not self._closed:
            self._nudged = True
            self._wake()

    def close(self, *, discard: bool = False) -> None:
        """No more updates; the reader gets what is left unless ``discard``."""
        self._closed = True
        if discard:
            self._forget()
        self._wake()

    def _forget(self) -> None:
        self._message = worker_pb2.SessionResponse()
        self._by_stream = {}
        self.unsent = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
