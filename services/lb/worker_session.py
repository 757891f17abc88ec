"""One long-lived stream to one decode instance, and the mailbox of each request on it.

All submissions of one loop turn travel in one message. Updates go straight into the mailboxes: a list and one future per
request, nothing per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.runtime.channel import open_channel
from pinyon.runtime.interceptors import error_to_proto
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import Outbox, OutboxClosed

__all__ = ["WorkerSession", "WorkerStream"]

WRITE_S = 10.0
OUTBOX_LIMIT = 65_536
MESSAGE_BYTES = 2 << 20
"""A message is sent when it has this much; gRPC takes twice as much."""

_log = get_logger("lb.worker")


class WorkerStream:
    """The updates of one request on one instance. The last one has a finish reason."""

    __slots__ = ("_session", "_unread", "_updates", "_waiter", "ended", "stream_id")

    def __init__(self, session: WorkerSession, stream_id: int) -> None:
        self._session = session
        self._updates: list[worker_pb2.StreamUpdate] = []
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self.stream_id = stream_id
        self.ended = False
        """The instance is done with it (or gone)."""

    async def take(self) -> list[worker_pb2.StreamUpdate]:
        """All updates since the last call; waits for at least one."""
        if not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates = self._updates, []
        self._unread = 0
        return updates

    def deliver(self, update: worker_pb2.StreamUpdate) -> int:
        """Put one update; how many tokens are unread now."""
        if update.finish_reason:
            self.ended = True
        self._updates.append(update)
        self._unread += len(update.tokens)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return self._unread

    def fail(self, error: PinyonError) -> None:
        """End it from this side."""
        self.deliver(
            worker_pb2.StreamUpdate(
                stream_id=self.stream_id, finish_reason=common_pb2.FINISH_REASON_ERROR, error=error_to_proto(error)
            )
        )

    def close(self) -> None:
        """Nobody reads any more: cancel it if it has not ended. Calling it twice is fine."""
        self._session.forget(self)


class WorkerSession:
    """Opens its stream at once; ends when that breaks, and is then replaced by a new one."""

    def __init__(self, address: str, unread_tokens: int, on_end: Callable[[WorkerSession], None]) -> None:
        self.address = address
        self._unread_limit = unread_tokens
        self._on_end = on_end
        self._outbox: Outbox[worker_pb2.Submission | int] = Outbox(OUTBOX_LIMIT)
        self._streams: dict[int, WorkerStream] = {}
        self._last_id = 0
        self._task = asyncio.create_task(self._run(), name=f"worker-session {address}")

    @property
    def streams(self) -> int:
        return len(self._streams)

    def open(self, submission: worker_pb2.Submission) -> WorkerStream:
        """Submit. Raises :class:`Unavailable` when the session has ended or is too far behind."""
        self._last_id += 1
        submission.stream_id = self._last_id
        try:
            self._outbox.put(submission)
        except (OutboxClosed, ResourceExhausted):
            raise Unavailable(f"no session to the instance at {self.address}") from None
        stream = WorkerStream(self, self._last_id)
        self._streams[self._last_id] = stream
        return stream

    def forget(self, stream: WorkerStream) -> None:
        if self._streams.pop(stream.stream_id, None) is not None and not stream.ended:
            self._cancel(stream.stream_id)

    def _cancel(self, stream_id: int) -> None:
        try:
            self._outbox.put(stream_id)
        except OutboxClosed:
            return  # the stream to the instance is gone, and with it all it did for us
        except ResourceExhausted:
            self._task.cancel()  # it takes nothing: the end of the session cancels everything

    async def close(self) -> None:
        """End the session; its requests fail as if the instance had gone."""
        self._task.cancel()
        await asyncio.wait({self._task})

    # -- the stream

    async def _run(self) -> None:
        channel = open_channel(self.address)
        call: Any = None
        writer: asyncio.Task[None] | None = None
        reason = "the stream ended"
        try:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            writer = asyncio.create_task(self._write_all(call), name=f"worker-writer {self.address}")
            while (message := await call.read()) is not grpc.aio.EOF:
                self._take(message)
        except asyncio.CancelledError:
            reason = "closed"  # we are the only ones to cancel this task
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "the stream ended"
        except Exception:
            _log.exception("worker session failed")
            reason = "internal error"
        finally:
            if call is not None:
                call.cancel()
            self._end(reason)
            if writer is not None:
                writer.cancel()
                await asyncio.wait({writer})
                if not writer.cancelled():
                    writer.exception()  # retrieved: the reader told why
            await channel.close(None)

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        streams = self._streams
        for update in message.updates:
            stream = streams.get(update.stream_id)
            if stream is None or stream.ended:
                continue
            unread = stream.deliver(update)
            if stream.ended:
                del streams[stream.stream_id]
            elif unread > self._unread_limit:
                del streams[stream.stream_id]
                self._cancel(stream.stream_id)
                stream.fail(ResourceExhausted("The client reads too slowly."))

    async def _write_all(self, call: Any) -> None:
        try:
            while True:
                message = worker_pb2.SessionRequest()
                size = 0
                for item in await self._outbox.take_all():
                    if isinstance(item, int):
                        message.cancel_stream_ids.append(item)
                        size += 16
                    else:
                        message.submissions.append(item)
                        size += len(item.prompt_tokens_le32) + len(item.block_keys) + 4096
                    if size >= MESSAGE_BYTES:
                        await self._write(call, message)
                        message, size = worker_pb2.SessionRequest(), 0
                if size:
                    await self._write(call, message)
        except BaseException:
            call.cancel()  # ends the reader too
            raise

    async def _write(self, call: Any, message: worker_pb2.SessionRequest) -> None:
        async with asyncio.timeout(WRITE_S):
            await call.write(message)

    def _end(self, reason: str) -> None:
        self._outbox.close()
        self._on_end(self)
        streams, self._streams = self._streams, {}
        if streams:
            _log.warning("lost the instance at %s: %s", self.address, reason, extra={"requests": len(streams)})
        for stream in streams.values():
            stream.fail(Unavailable(f"The instance at {self.address} went away."))
