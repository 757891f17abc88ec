"""The mailboxes of requests that run on an instance or in another region. Updates go straight into them: one list and
one future per request, nothing per token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import PinyonError, ResourceExhausted
from pinyon.core.request import FinishReason
from pinyon.messages.enums import finish_reason_to_proto
from pinyon.messages.error import error_to_proto


class WorkerStream:
    """The updates of one request on one instance. The last one has a finish reason.

    The reader is woken at once for the first and the last update, and in between at most every ``gap_s`` seconds:
    tokens that come faster travel together. A ``listener`` gets the updates in between in the reader's place, straight
    from the socket, whenever it accepts them."""

    __slots__ = (
        "_due_s", "_gap_s", "_loop", "_owner", "_timer", "_unread", "_updates", "_waiter", "ended", "listener", "lost",
        "reached", "stream_id",
    )  # fmt: skip

    def __init__(self, owner: WorkerStreams, stream_id: int, gap_s: float) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._updates: list[worker_pb2.StreamUpdate] = []
        self._unread = 0
        self._gap_s = gap_s
        self._due_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.stream_id = stream_id
        self.listener: Callable[[list[worker_pb2.StreamUpdate]], bool] | None = None
        """Called only while the reader waits, with all unread updates; returns whether it has dealt with them."""
        self.ended = False
        """True once the instance has finished the request, or is gone."""
        self.reached = True
        self.lost = False
        """True if the instance was ``reached`` and then lost: what it did with the request is unknown."""

    async def take(self) -> list[worker_pb2.StreamUpdate]:
        """Returns all updates since the last call; waits for at least one."""
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
        """Stores one update. Returns how many tokens, and log-probabilities beside them, are unread now."""
        if update.finish_reason:
            self.ended = True
        self._updates.append(update)
        if self._waiter is not None:
            if self.ended or self._loop.time() >= self._due_s:
                self._wake()
                if not self._updates:
                    return 0
            elif self._timer is None:
                self._timer = self._loop.call_at(self._due_s, self._wake)
        self._unread += len(update.tokens)
        if update.HasField("logprobs"):
            self._unread += len(update.logprobs.top_tokens)
        return self._unread

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self.listener is not None and not self.ended:
            try:
                heard = self.listener(self._updates)
            except Exception as error:
                stops = isinstance(error, StopIteration)  # no future accepts that exception
                waiter.set_exception(RuntimeError(repr(error)) if stops else error)
                return
            if heard:
                self._updates = []
                self._unread = 0
                self._due_s = self._loop.time() + self._gap_s
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                return
        waiter.set_result(None)

    def fail(self, error: PinyonError) -> None:
        """Ends the stream from this side."""
        self.deliver(failed_update(self.stream_id, error))

    def close(self) -> None:
        """Stops reading; cancels the request if it has not ended. May be called twice."""
        self._owner.forget(self)


def failed_update(stream_id: int, error: PinyonError) -> worker_pb2.StreamUpdate:
    """Returns the last update of a stream that ends with that error."""
    reason = finish_reason_to_proto(FinishReason.ERROR)
    return worker_pb2.StreamUpdate(stream_id=stream_id, finish_reason=reason, error=error_to_proto(error))


class WorkerStreams:
    """The streams of one session. ``cancel`` is called with the id of an unfinished stream that is not read any more;
    ``on_idle`` when the last stream has gone."""

    def __init__(
        self, unread_tokens: int, cancel: Callable[[int], None], on_idle: Callable[[], None] = lambda: None
    ) -> None:
        self._unread_limit = unread_tokens
        self._cancel = cancel
        self._on_idle = on_idle
        self._streams: dict[int, WorkerStream] = {}
        self.opened = 0
        """The number of streams opened so far."""

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, gap_s: float) -> WorkerStream:
        self.opened += 1
        stream = self._streams[self.opened] = WorkerStream(self, self.opened, gap_s)
        return stream

    def forget(self, stream: WorkerStream) -> None:
        """Removes a stream that is not read any more."""
        if self._remove(stream.stream_id) and not stream.ended:
            self._cancel(stream.stream_id)

    def take(self, updates: Iterable[worker_pb2.StreamUpdate]) -> None:
        """Delivers updates to their streams."""
        streams = self._streams
        for update in updates:
            stream = streams.get(update.stream_id)
            if stream is None or stream.ended:
                continue
            unread = stream.deliver(update)
            if update.finish_reason:
                self._remove(stream.stream_id)
            elif unread > self._unread_limit:
                self._remove(stream.stream_id)
                self._cancel(stream.stream_id)
                stream.fail(ResourceExhausted("The client reads too slowly."))

    def end(self, error: PinyonError, reached: bool) -> int:
        """Ends all streams with the session, and returns how many. ``reached``: the other side had been there."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.reached = stream.lost = reached
            stream.fail(error)
        return len(streams)

    def _remove(self, stream_id: int) -> bool:
        if self._streams.pop(stream_id, None) is None:
            return False
        if not self._streams:
            self._on_idle()
        return True
