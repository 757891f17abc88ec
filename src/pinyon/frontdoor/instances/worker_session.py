"""One long-lived stream to one decode instance. All submissions of one loop turn travel in one message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled, PinyonError, Unavailable
from pinyon.frontdoor.update_stream import WorkerStream, WorkerStreams
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.duplex import Dialed, Method
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import Outgoing
from pinyon.runtime.pace import Pace

WRITE_S = 10.0
MESSAGES_MAX = 32
CANCEL_BYTES = 16
ASK_BYTES = 16
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", worker_pb2.SessionRequest, worker_pb2.SessionResponse)

_log = get_logger("lb.worker")


class LoadWatch(NamedTuple):
    """Who is told what an instance says of its load: no more often than every ``interval_s``."""

    tell: Callable[[WorkerSession, worker_pb2.Load], None]
    interval_s: float


class WorkerSession:
    """Opens its stream at once; ends when that breaks, and is then replaced by a new one."""

    def __init__(
        self,
        address: str,
        unread_tokens: int,
        on_end: Callable[[WorkerSession], None],
        on_idle: Callable[[WorkerSession], None] = lambda _: None,
        connect: OpenSession = open_session,
        instance_id: str = "",
        on_load: LoadWatch | None = None,
    ) -> None:
        self.address = address
        self.instance_id = instance_id
        """Of the instance there; empty if nobody said."""
        self._on_end = on_end
        self._streams = WorkerStreams(unread_tokens, self._cancel, lambda: on_idle(self))
        self._on_load = None if on_load is None else on_load.tell
        self.heard = False
        """It has said something of its load."""
        self._stream = Dialed(address, METHOD, WRITE_S, connect)
        pace = Pace(lambda: len(self._streams), time.monotonic)
        self._outgoing: Outgoing[worker_pb2.SessionRequest] = Outgoing(worker_pb2.SessionRequest, pace, MESSAGES_MAX)
        if on_load is not None:
            self._outgoing.message(ASK_BYTES).load_interval_ms = max(1, round(on_load.interval_s * 1e3))
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
        return self._outgoing.has_room

    async def room(self) -> None:
        """Wait until it has room or has ended: an instance that takes nothing for ``WRITE_S`` ends it."""
        await self._outgoing.room()

    def open(self, size_bytes: int, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """A stream, and the submission to fill in before the loop turns: it is part of the next message.

        Raises :class:`Unavailable` when the session has ended.
        """
        if self._stream.ending:
            raise Unavailable(f"no session to the instance at {self.address}")
        stream = self._streams.open(gap_s)
        return stream, self._outgoing.message(size_bytes).submissions.add(stream_id=stream.stream_id)

    def _cancel(self, stream_id: int) -> None:
        if not self._stream.ending:  # else it is gone, and with it all it did for us
            self._outgoing.message(CANCEL_BYTES).cancel_stream_ids.append(stream_id)

    async def close(self) -> None:
        """End the session; its requests fail as if the instance had gone."""
        self._stream.end(Cancelled("closed"))
        await asyncio.wait({self._task})

    # -- the stream

    async def _run(self) -> None:
        reason = "the stream ended"
        try:
            self._outgoing.by(self._stream)
            await self._stream.run(self._take, self._outgoing)
        except PinyonError as error:
            reason = error.grpc_code
        finally:
            self._end(reason)

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        self._streams.take(message.updates)
        if self._on_load is not None and message.HasField("load"):
            self.heard = True
            self._on_load(self, message.load)

    def unseen(self, load: worker_pb2.Load) -> int:
        """Submissions that were on their way to the instance when it said that."""
        return max(0, self._streams.opened - load.received)

    def _end(self, reason: str) -> None:
        self._outgoing.close()
        self._on_end(self)
        error = Unavailable(f"The instance at {self.address} went away.")
        if count := self._streams.end(error, self._stream.connected):
            _log.warning("lost the instance at %s: %s", self.address, reason, extra={"requests": count})
