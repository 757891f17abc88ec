"""What a session sends: the updates that wait, with the load, at the end of the loop's turn in which the first of them
came, or as soon after it as the pace allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.outbox import MESSAGE_BYTES, in_messages
from pinyon.runtime.pace import Pace
from services.worker.decode.updates import UpdateBuffer

__all__ = ["LbStream", "OutgoingUpdates"]

LbStream = Accepted[worker_pb2.SessionResponse, worker_pb2.SessionRequest]


class OutgoingUpdates:
    """The messages that a session's stream runs with. While the load balancer takes what comes, no task has to be woken
    for one, as with :class:`pinyon.runtime.outgoing.Outgoing`; else the stream's writer has them, and what waits
    meanwhile is merged.

    ``load`` is what goes with a message that is sent now; None: nothing. The iterator ends when the updates are closed
    and all of them have gone.
    """

    def __init__(self, updates: UpdateBuffer, load: Callable[[], worker_pb2.Load | None], pace: Pace) -> None:
        self._updates = updates
        self._load = load
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._stream: LbStream | None = None
        self._made: deque[worker_pb2.SessionResponse] = deque()
        """Put together and not sent: more than one if there was too much for one."""
        self._going: asyncio.Handle | None = None
        self._behind = True
        """The writer has them."""
        self._news = asyncio.Event()
        """For the writer."""
        self._failure: Exception | None = None
        updates.on_news = self._come

    def by(self, stream: LbStream) -> None:
        """They may go past the writer, by this stream."""
        self._stream = stream

    def _come(self) -> None:
        if self._behind:
            self._news.set()
        elif self._updates.closed:
            self._to_writer()
        elif self._going is None:
            self._going = self._loop.call_soon(self._go)

    def _to_writer(self) -> None:
        if self._going is not None:
            self._going.cancel()
            self._going = None
        self._behind = True
        self._news.set()

    def _go(self) -> None:
        self._going = None
        stream, made = self._stream, self._made
        try:
            if stream is not None and stream.has_room:
                early_s = self._pace.early_s()
                if early_s > 0.0:
                    self._going = self._loop.call_later(early_s, self._go)
                    return
                self._pace.went()
                self._make()
                while made and stream.push(made[0]):
                    made.popleft()
        except Exception as error:  # the writer's: it ends the stream
            self._failure = error
            self._to_writer()
            return
        if made or self._updates.ready:
            self._to_writer()

    def _make(self) -> None:
        """Put together what waits."""
        message, load, made = self._updates.take_now(), self._load(), self._made
        if message.ByteSize() <= MESSAGE_BYTES:
            if load is not None:
                message.load.CopyFrom(load)
            elif not message.updates:
                return  # somebody else's message was on its way, and had it
            made.append(message)
            return
        # many resumed requests replay their texts at once
        made.extend([worker_pb2.SessionResponse(updates=updates) for updates in in_messages(message.updates)])
        if load is not None:
            made.append(worker_pb2.SessionResponse(load=load))

    # -- what the writer asks for

    def __aiter__(self) -> OutgoingUpdates:
        return self

    async def __anext__(self) -> worker_pb2.SessionResponse:
        while not self._made:
            if self._failure is not None:
                raise self._failure
            if self._updates.ready:
                if not self._updates.closed:
                    await self._pace.turn()
                self._make()
            elif self._updates.closed:
                raise StopAsyncIteration
            else:
                self._behind = False
                self._news.clear()
                await self._news.wait()
        return self._made.popleft()

    async def aclose(self) -> None:
        """Nothing more goes. Closing twice is fine."""
        self._stream = None
        self._to_writer()
