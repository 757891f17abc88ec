"""One load balancer's stream: submissions in, all tokens of one engine step out in one message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import InvalidArgument, PinyonError, ResourceExhausted
from pinyon.core.request import FinishReason
from pinyon.messages.enums import finish_reason_to_proto
from pinyon.messages.error import error_to_proto
from pinyon.runtime.outgoing import Pace
from services.worker.decode.decodes import Decodes
from services.worker.decode.load_news import LoadNews
from services.worker.decode.outgoing_updates import LbStream, OutgoingUpdates
from services.worker.decode.request import DecodeRequest

SESSIONS_MAX = 1024


class LbSessions:
    """All sessions, for the metrics; ``load`` is what load balancers are told, without their session's own fields."""

    def __init__(self, decodes: Decodes, load: Callable[[], worker_pb2.Load]) -> None:
        self.decodes = decodes
        self.load = load
        self._open: set[LbSession] = set()
        self.cut = 0
        """The number of sessions ended because the load balancer read too slowly."""

    @property
    def count(self) -> int:
        return len(self._open)

    @property
    def told(self) -> int:
        """Load balancers that have asked for the load, and push by it."""
        return sum([session.tells for session in self._open])

    @property
    def unsent(self) -> int:
        """Changes that wait to be sent, over all sessions."""
        return sum(session.updates.unsent for session in list(self._open))

    async def run(self, context: Any) -> None:
        """Serves a session. Raises :class:`ResourceExhausted` for too many or a load balancer that reads too slowly."""
        if len(self._open) >= SESSIONS_MAX:
            raise ResourceExhausted(f"{SESSIONS_MAX} load balancers are connected", retry_after_s=1.0)
        session = LbSession(self)
        self._open.add(session)
        try:
            await session.run(context)
        except ResourceExhausted:
            self.cut += 1
            raise
        finally:
            self._open.discard(session)


class LbSession:
    """A session, which ends when the load balancer has closed its side and all is answered, or when it is gone."""

    def __init__(self, sessions: LbSessions) -> None:
        limits = sessions.decodes.parts.limits
        pace = Pace(lambda: len(self._requests), time.monotonic)
        self.updates = OutgoingUpdates(limits.outbox_tokens, pace, self._load)
        self._write_timeout_s = limits.write_timeout_s
        self._sessions = sessions
        self._decodes = sessions.decodes
        self._news: LoadNews | None = None
        """The news of the load, once the load balancer has asked for it."""
        self._received = 0
        """The number of submissions received."""
        self._requests: dict[int, DecodeRequest] = {}

    async def run(self, context: Any) -> None:
        """Serves the stream. Raises :class:`ResourceExhausted` if the load balancer reads too slowly."""
        stream = LbStream(context, self._write_timeout_s)
        self.updates.overflow.add_done_callback(lambda overflow: stream.end(cast("PinyonError", overflow.exception())))
        self.updates.by(stream)
        try:
            await stream.run(self._take, self.updates, self._drain)
        finally:
            if self._news is not None:
                self._news.close()
            for request in list(self._requests.values()):
                self._decodes.cancel(request, "the load balancer went away")
            self.updates.close(discard=True)

    def _take(self, message: worker_pb2.SessionRequest) -> None:
        self._received += len(message.submissions)
        for submission in message.submissions:
            self._submit(submission)
        for stream_id in message.cancel_stream_ids:
            request = self._requests.get(stream_id)
            if request is not None:
                self._decodes.cancel(request, "cancelled by the load balancer")
        if message.load_interval_ms and self._news is None:
            parts = self._decodes.parts
            interval_s = max(parts.limits.load_interval_s, message.load_interval_ms / 1e3)
            self._news = LoadNews(self._told, interval_s, self.updates.nudge, parts.clock)
            self._news.start()

    @property
    def tells(self) -> bool:
        return self._news is not None

    def _told(self) -> worker_pb2.Load:
        load = self._sessions.load()
        load.received = self._received
        # If each of several load balancers took all the room, all would send as much. Each gets one place at least, so
        # that none waits for a place that the others leave free.
        load.room = max(1, load.room // max(1, self._sessions.told)) if load.room else 0
        return load

    def _load(self) -> worker_pb2.Load | None:
        return None if self._news is None else self._news.take()

    async def _drain(self) -> None:
        """Answers the requests that are here, as no more come in."""
        if self._requests:
            await asyncio.wait([request.ended for request in self._requests.values()])
        self.updates.close()

    def _submit(self, submission: worker_pb2.Submission) -> None:
        stream_id = submission.stream_id
        try:
            if stream_id in self._requests:
                raise InvalidArgument(f"stream {stream_id} is in use", field="stream_id")
            request = self._decodes.submit(submission, self.updates)
        except PinyonError as error:
            update = self.updates.apart(stream_id)  # the stream may be another submission's
            update.finish_reason = finish_reason_to_proto(FinishReason.ERROR)
            update.error.CopyFrom(error_to_proto(error))
            return
        self._requests[stream_id] = request
        request.ended.add_done_callback(lambda _: self._requests.pop(stream_id))
