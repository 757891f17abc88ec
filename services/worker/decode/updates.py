"""What streams have to say to one reader, merged until it takes it: at most one update per stream and message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted


def _nobody() -> None:
    """Whoever waits is a reader."""


class UpdateBuffer:
    """One reader. All updates that come in one turn of the event loop travel in one message.

    ``limit`` bounds the changes that wait (about one per token, and per log-probability): a reader that is slower is
    cut off.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._message = worker_pb2.SessionResponse()
        self._by_stream: dict[int, worker_pb2.StreamUpdate] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self._told = False
        """Of what is there now."""
        self.closed = False
        self.on_news: Callable[[], None] = _nobody
        """Called when there is something after nothing, and at the end."""
        self.overflow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with :class:`ResourceExhausted` when the limit is reached; what waited is lost then."""
        self.unsent = 0
        """Changes not taken yet."""

    def update(self, stream_id: int, changes: int = 1) -> worker_pb2.StreamUpdate:
        """The stream's next update, to be filled in before control returns to the event loop."""
        if self.closed:
            return worker_pb2.StreamUpdate()
        if self.unsent >= self._limit:
            self.overflow.set_exception(
                ResourceExhausted(f"the reader is too slow: more than {self._limit} tokens wait for it")
            )
            self.overflow.exception()
            self.close(discard=True)
            return worker_pb2.StreamUpdate()
        self.unsent += changes
        update = self._by_stream.get(stream_id)
        if update is None:
            update = self._by_stream[stream_id] = self._message.updates.add(stream_id=stream_id)
            if not self._told:
                self._tell()
        return update

    @property
    def ready(self) -> bool:
        """There is something to take."""
        return self._nudged or bool(self._by_stream)

    def take_now(self) -> worker_pb2.SessionResponse:
        """Everything there is, which may be nothing."""
        message = self._message
        self._forget()
        return message

    async def take(self) -> worker_pb2.SessionResponse | None:
        """Everything there is: at least one update, or none after a :meth:`nudge`. None when closed and empty."""
        while not self.ready:
            if self.closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.closed and not self._by_stream:
            return None  # nudged only
        return self.take_now()

    def nudge(self) -> None:
        """The reader gets a message soon, even if there is no update for it."""
        if not self.closed:
            self._nudged = True
            if not self._told:
                self._tell()

    def close(self, *, discard: bool = False) -> None:
        """No more updates; the reader gets what is left unless ``discard``."""
        self.closed = True
        if discard:
            self._forget()
        self._tell()

    def _forget(self) -> None:
        self._message = worker_pb2.SessionResponse()
        self._by_stream = {}
        self.unsent = 0
        self._nudged = self._told = False

    def _tell(self) -> None:
        self._told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.on_news()
