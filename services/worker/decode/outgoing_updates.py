"""What a session sends: the updates that wait, with the load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.runtime.duplex import Accepted, Duplex
from pinyon.runtime.outbox import MESSAGE_BYTES, in_messages
from pinyon.runtime.pace import Pace
from pinyon.runtime.turn_end import TurnEnd
from services.worker.decode.updates import UpdateBuffer

LbStream = Accepted[worker_pb2.SessionResponse, worker_pb2.SessionRequest]


class OutgoingUpdates:
    """The messages that a session's stream runs with; they go at the :class:`TurnEnd`, as those of
    :class:`pinyon.runtime.outgoing.Outgoing` do, or the stream's writer has them, and what waits meanwhile is merged.

    ``load`` is what goes with a message that is sent now; None: nothing. The iterator ends when the updates are closed
    and all of them have gone.
    """

    def __init__(self, updates: UpdateBuffer, load: Callable[[], worker_pb2.Load | None], pace: Pace) -> None:
        self._updates = updates
        self._load = load
        self._pace = pace
        self._made: deque[worker_pb2.SessionResponse] = deque()
        """Put together and not sent: more than one if there was too much for one."""
        self._end = TurnEnd(pace, self._send)
        updates.on_news = self._come

    def by(self, stream: LbStream) -> None:
        """They may go past the writer, by this stream."""
        self._end.by(stream)

    def _come(self) -> None:
        if self._updates.closed:
            self._end.to_writer()
        else:
            self._end.come()

    def _send(self, stream: Duplex[Any, Any]) -> bool:
        """See :class:`TurnEnd`."""
        made = self._made
        self._make()
        while made and stream.push(made[0]):
            made.popleft()
        return bool(made) or self._updates.ready

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
            self._end.check()
            if self._updates.ready:
                if not self._updates.closed:
                    await self._pace.turn()
                self._make()
            elif self._updates.closed:
                raise StopAsyncIteration
            else:
                await self._end.news()
        return self._made.popleft()

    async def aclose(self) -> None:
        """Nothing more goes. Closing twice is fine."""
        self._end.by(None)
        self._end.to_writer()
