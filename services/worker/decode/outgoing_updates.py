"""The updates of a load balancer's streams, merged until they are sent, with the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.outgoing import MESSAGE_BYTES, Pace, TurnEnd, in_messages

LbStream = Accepted[worker_pb2.SessionResponse, worker_pb2.SessionRequest]


class OutgoingUpdates:
    """The messages of one session's stream, with at most one update per request in each.

    Waiting updates are merged. ``limit`` bounds the changes that wait (about one per token, and per log-probability): a
    slower reader is cut off. A message carries the load that ``load`` returns; None: no load. The iterator ends when
    the updates are closed and all of them have been sent."""

    def __init__(self, limit: int, pace: Pace, load: Callable[[], worker_pb2.Load | None] = lambda: None) -> None:
        self._end: TurnEnd[worker_pb2.SessionResponse] = TurnEnd(pace, self._make)
        self._limit = limit
        self._load = load
        self._message = worker_pb2.SessionResponse()
        """The updates that wait, after the messages that have been assembled."""
        self._by_stream: dict[int, worker_pb2.StreamUpdate] = {}
        self._nudged = False
        self._told = False
        """True if the end of this turn of the event loop will handle the waiting updates."""
        self.overflow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with :class:`ResourceExhausted` when the limit is reached; waiting updates are lost then."""
        self.unsent = 0
        """The number of changes that have not been taken yet."""
        self.closed = False
        """True once no more updates are taken."""

    def by(self, stream: LbStream | None) -> None:
        """Lets messages bypass the writer through this stream; None ends that."""
        self._end.by(stream)

    def update(self, stream_id: int, changes: int = 1) -> worker_pb2.StreamUpdate:
        """Returns the stream's next update, to be filled in before control returns to the event loop."""
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
                self._told = True
                self._end.come()
        return update

    def apart(self, stream_id: int) -> worker_pb2.StreamUpdate:
        """Returns an update that is merged with no other; it must be filled in as soon as :meth:`update`'s."""
        merged = self._by_stream.pop(stream_id, None)
        update = self.update(stream_id)
        self._by_stream.pop(stream_id, None)
        if merged is not None and not self.closed:
            self._by_stream[stream_id] = merged
        return update

    def nudge(self) -> None:
        """Sends the reader a message soon, even if there is no update for it."""
        if not self.closed:
            self._nudged = True
            if not self._told:
                self._told = True
                self._end.come()

    def close(self, *, discard: bool = False) -> None:
        """Takes no more updates; the reader gets the rest unless ``discard``."""
        self.closed = True
        if discard:
            self._forget()
        self._end.to_writer()

    @property
    def _ready(self) -> bool:
        """True if an update or a nudge waits."""
        return self._nudged or bool(self._message.updates)

    def _forget(self) -> None:
        self._message = worker_pb2.SessionResponse()
        self._by_stream = {}
        self.unsent = 0
        self._nudged = self._told = False

    def _make(self) -> None:
        """Assembles messages from the waiting updates."""
        message, made = self._message, self._end.messages
        self._forget()
        load = self._load()
        if message.ByteSize() <= MESSAGE_BYTES:
            if load is not None:
                message.load.CopyFrom(load)
            elif not message.updates:
                return  # an earlier message was on its way, and took the load
            made.append(message)
            return
        # Many resumed requests may replay their texts at once.
        made.extend([worker_pb2.SessionResponse(updates=updates) for updates in in_messages(message.updates)])
        if load is not None:
            made.append(worker_pb2.SessionResponse(load=load))

    # -- for the writer

    def __aiter__(self) -> OutgoingUpdates:
        return self

    async def __anext__(self) -> worker_pb2.SessionResponse:
        while not self._end.messages:
            self._end.check()
            if self._ready:
                if not self.closed:
                    await self._end.pace.turn()
                self._make()
            elif self.closed:
                raise StopAsyncIteration
            else:
                await self._end.wait()
        return self._end.messages.popleft()

    async def aclose(self) -> None:
        """Ends the sending. Closing twice is fine."""
        self.by(None)
        self._end.to_writer()
