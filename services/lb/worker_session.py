"""One long-lived stream to one decode instance, and the mailbox of each request on it.

All submissions of one loop turn travel in one message. Updates go straight into the mailboxes: a list and one future
per request, nothing per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled, PinyonError, ResourceExhausted, Unavailable
from pinyon.core.request import FinishReason
from pinyon.messages.error import error_to_proto
from pinyon.messages.finish_reason import finish_reason_to_proto
from pinyon.runtime.channel import OpenChannel, open_channel
from pinyon.runtime.duplex import Dialed, Method
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import MESSAGE_BYTES
from pinyon.runtime.pace import Pace
from services.lb.regions.delayed import Delayed, delayed_messages

__all__ = ["WorkerSession", "WorkerStream"]

WRITE_S = 10.0
MESSAGES_MAX = 32
CANCEL_BYTES = 16
ASK_BYTES = 16
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", worker_pb2.SessionRequest, worker_pb2.SessionResponse)

_log = get_logger("lb.worker")


class WorkerStream:
    """The updates of one request on one instance. The last one has a finish reason.

    The reader is woken at once for the first update and the last one; between them not more often than every ``gap_s``
    seconds, so that tokens which come faster than anybody reads travel together.
    """

    __slots__ = (
        "_due_s",
        "_gap_s",
        "_loop",
        "_session",
        "_timer",
        "_unread",
        "_updates",
        "_waiter",
        "ended",
        "lost",
        "reached",
        "stream_id",
    )

    def __init__(self, session: WorkerSession, stream_id: int, gap_s: float) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._updates: list[worker_pb2.StreamUpdate] = []
        self._unread = 0
        self._gap_s = gap_s
        self._due_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.stream_id = stream_id
        self.ended = False
        """The instance is done with it (or gone)."""
        self.reached = True
        self.lost = False
        """The instance went away, and it was ``reached`` before: who knows what it did with the request."""

    async def take(self) -> list[worker_pb2.StreamUpdate]:
        """All updates since the last call; waits for at least one."""
        if not self._updates or not (self.ended or self._loop.time() >= self._due_s):
            self._waiter = self._loop.create_future()
            if self._updates:
                self._timer = self._loop.call_at(self._due_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        updates, self._updates = self._updates, []
        self._unread = 0
        self._due_s = self._loop.time() + self._gap_s
        return updates

    def deliver(self, update: worker_pb2.StreamUpdate) -> int:
        """Put one update; how many tokens, and log-probabilities beside them, are unread now."""
        if update.finish_reason:
            self.ended = True
        self._updates.append(update)
        self._unread += len(update.tokens) + len(update.logprobs.top_tokens)
        if self._waiter is not None:
            if self.ended or self._loop.time() >= self._due_s:
                self._wake()
            elif self._timer is None:
                self._timer = self._loop.call_at(self._due_s, self._wake)
        return self._unread

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: PinyonError) -> None:
        """End it from this side."""
        self.deliver(
            worker_pb2.StreamUpdate(
                stream_id=self.stream_id,
                finish_reason=finish_reason_to_proto(FinishReason.ERROR),
                error=error_to_proto(error),
            )
        )

    def close(self) -> None:
        """Nobody reads any more: cancel it if it has not ended. Calling it twice is fine."""
        self._session.forget(self)


class WorkerSession:
    """Opens its stream at once; ends when that breaks, and is then replaced by a new one."""

    def __init__(
        self,
        address: str,
        unread_tokens: int,
        on_end: Callable[[WorkerSession], None],
        on_idle: Callable[[WorkerSession], None] = lambda _: None,
        connect: OpenChannel = open_channel,
        instance_id: str = "",
        on_load: Callable[[WorkerSession, worker_pb2.Load], None] | None = None,
        load_interval_s: float = 0.1,
        delay_s: float = 0.0,
    ) -> None:
        """``on_load`` is told what the instance says of its load, if it is set: no more often than every
        ``load_interval_s``. ``delay_s``: there, and the same back, for tests."""
        self.address = address
        self.instance_id = instance_id
        """Of the instance there; empty if nobody said."""
        self._delay_s = delay_s
        self._unread_limit = unread_tokens
        self._on_end = on_end
        self._on_idle = on_idle
        self._messages: list[worker_pb2.SessionRequest] = []
        """Being filled; the last one has ``_size`` bytes."""
        self._size = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._streams: dict[int, WorkerStream] = {}
        self._last_id = 0
        self._on_load = on_load
        self.heard = False
        """It has said something of its load."""
        self._stream = Dialed(address, METHOD, WRITE_S, connect)
        if on_load is not None:
            self._message(ASK_BYTES).load_interval_ms = max(1, round(load_interval_s * 1e3))
        self._task = asyncio.create_task(self._run(), name=f"worker-session {address}")

    @property
    def streams(self) -> int:
        return len(self._streams)

    @property
    def ending(self) -> bool:
        return self._stream.ending

    @property
    def spoke(self) -> bool:
        """The instance has answered something."""
        return self._stream.spoke

    @property
    def has_room(self) -> bool:
        """The instance takes what is sent to it."""
        return len(self._messages) <= MESSAGES_MAX

    async def room(self) -> None:
        """Wait until it has room or has ended: an instance that takes nothing for ``WRITE_S`` ends it."""
        if not self.has_room:
            self._room.clear()
            await self._room.wait()

    def open(self, size_bytes: int, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """A stream, and the submission to fill in before the loop turns: it is part of the next message.

        Raises :class:`Unavailable` when the session has ended.
        """
        if self._stream.ending:
            raise Unavailable(f"no session to the instance at {self.address}")
        self._last_id += 1
        submission = self._message(size_bytes).submissions.add(stream_id=self._last_id)
        stream = self._streams[self._last_id] = WorkerStream(self, self._last_id, gap_s)
        return stream, submission

    def _message(self, size_bytes: int) -> worker_pb2.SessionRequest:
        """The message that will be sent next, or one after it if that has no room; wakes the writer."""
        if not self._messages or self._size + size_bytes > MESSAGE_BYTES:
            self._messages.append(worker_pb2.SessionRequest())
            self._size = 0
            self._news.set()
        self._size += size_bytes
        return self._messages[-1]

    def forget(self, stream: WorkerStream) -> None:
        if self._remove(stream.stream_id) and not stream.ended:
            self._cancel(stream.stream_id)

    def _remove(self, stream_id: int) -> bool:
        if self._streams.pop(stream_id, None) is None:
            return False
        if not self._streams:
            self._on_idle(self)
        return True

    def _cancel(self, stream_id: int) -> None:
        if not self._stream.ending:  # else it is gone, and with it all it did for us
            self._message(CANCEL_BYTES).cancel_stream_ids.append(stream_id)

    async def close(self) -> None:
        """End the session; its requests fail as if the instance had gone."""
        self._stream.end(Cancelled("closed"))
        await asyncio.wait({self._task})

    # -- the stream

    async def _run(self) -> None:
        reason = "the stream ended"
        try:
            if self._delay_s:
                incoming = Delayed(self._delay_s, self._take)
                await self._stream.run(incoming.put, delayed_messages(self._written(), self._delay_s))
            else:
                await self._stream.run(self._take, self._written())
        except PinyonError as error:
            reason = error.grpc_code
        finally:
            self._end(reason)

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        streams = self._streams
        for update in message.updates:
            stream = streams.get(update.stream_id)
            if stream is None or stream.ended:
                continue
            unread = stream.deliver(update)
            if stream.ended:
                self._remove(stream.stream_id)
            elif unread > self._unread_limit:
                self._remove(stream.stream_id)
                self._cancel(stream.stream_id)
                stream.fail(ResourceExhausted("The client reads too slowly."))
        if self._on_load is not None and message.HasField("load"):
            self.heard = True
            self._on_load(self, message.load)

    def unseen(self, load: worker_pb2.Load) -> int:
        """Submissions that were on their way to the instance when it said that."""
        return max(0, self._last_id - load.received)

    async def _written(self) -> AsyncGenerator[worker_pb2.SessionRequest, None]:
        pace = Pace(lambda: len(self._streams), time.monotonic)
        while True:
            await self._news.wait()
            await pace.turn()
            self._news.clear()
            messages, self._messages = self._messages, []
            self._room.set()
            for message in messages:
                yield message

    def _end(self, reason: str) -> None:
        self._messages.clear()
        self._room.set()
        self._on_end(self)
        streams, self._streams = self._streams, {}
        if streams:
            _log.warning("lost the instance at %s: %s", self.address, reason, extra={"requests": len(streams)})
        for stream in streams.values():
            stream.reached = stream.lost = self._stream.connected
            stream.fail(Unavailable(f"The instance at {self.address} went away."))
