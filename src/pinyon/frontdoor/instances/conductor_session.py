"""The load balancer's one stream to the conductor: requests of one loop turn travel in one message.

While there is no conductor the session tries again with growing pauses; requests are then placed by the load balancer
itself on the last instances it was told of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import Unavailable
from pinyon.messages.error import error_from_proto
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.deadlines import deadlines_of
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import FRAME_BYTES
from pinyon.runtime.outgoing import Outgoing
from pinyon.runtime.pace import Pace

WRITE_S = 5.0
MESSAGES_MAX = 1024
"""That wait for a conductor which does not keep up."""
PARTS_PER_MESSAGE = 64

SessionRequest = conductor_pb2.ScheduleSessionRequest
SessionResponse = conductor_pb2.ScheduleSessionResponse
METHOD = Method("/pinyon.api.conductor.v1.ConductorService/ScheduleSession", SessionRequest, SessionResponse)

_log = get_logger("lb.conductor")


class ConductorAway(Unavailable):
    """No conductor answers: choose by yourself."""


class ConductorSession:
    """``start`` → ``place`` and ``release`` → ``close``. ``on_instances`` is called with each new list, and whether it
    is the first one of its session.

    ``in_flight`` counts this load balancer's requests: with many, they travel to the conductor together, and on from it
    to the workers.
    """

    def __init__(
        self,
        address: str,
        lb_id: str,
        on_instances: Callable[[conductor_pb2.InstanceList, bool], None],
        answer_timeout_s: float,
        in_flight: Callable[[], int],
        connect: OpenSession = open_session,
    ) -> None:
        self._address = address
        self._lb_id = lb_id
        self._on_instances = on_instances
        self._answer_timeout_s = answer_timeout_s
        self._in_flight = in_flight
        self._link = Redialer("conductor", address, METHOD, self._converse, write_s=WRITE_S, connect=connect, log=_log)
        self._stream: Dialed[SessionRequest, SessionResponse]
        self._heard = 0
        self._listed = False
        """This session's conductor has sent a list."""
        self._outgoing: Outgoing[SessionRequest]
        self.connected = False
        """It has spoken: from here on it is asked."""
        self._pending: dict[str, tuple[asyncio.Future[conductor_pb2.ScheduleResponse | None], float]] = {}
        """By request, in the order in which they are due: what will be the answer, or None when it did not come until
        then, by the loop's clock."""
        self._watch: int | None = None
        """Of the deadlines, while one looks after them: one for all."""
        self.sessions = 0
        """How often a conductor answered a new session."""

    @property
    def pending(self) -> int:
        """Requests that wait for their placement."""
        return len(self._pending)

    def start(self) -> None:
        if self._address:
            self._link.start()

    async def close(self) -> None:
        await self._link.close()
        if self._watch is not None:
            deadlines_of(asyncio.get_running_loop()).remove(self, self._watch)

    async def place(self, request: conductor_pb2.ScheduleRequest, size_bytes: int) -> common_pb2.Placement:
        """Where the request runs, which takes so many bytes at most.

        Raises :class:`ConductorAway` when no conductor answers in time, else the :class:`PinyonError` it answered with.
        A placement that comes too late, or after a cancel, is given back.
        """
        if not self.connected:
            raise ConductorAway("the conductor is away")
        if not self._outgoing.has_room:
            raise ConductorAway("the conductor does not keep up")
        request_id = request.request_id
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[conductor_pb2.ScheduleResponse | None] = loop.create_future()
        self._outgoing.message(FRAME_BYTES + size_bytes).requests.append(request)
        if (before := self._pending.pop(request_id, None)) is not None and not before[0].done():
            # Other regions choose ids as well; an answer under this one is the later request's.
            before[0].set_exception(ConductorAway("another request has its id"))
        self._pending[request_id] = answer, loop.time() + self._answer_timeout_s
        if self._watch is None:
            self._watch = deadlines_of(loop).add(self, loop.time() + self._answer_timeout_s)
        stream, heard = self._stream, self._heard
        try:
            response = await answer
        except asyncio.CancelledError:
            if _came(answer):
                self.release(request_id)
            raise
        finally:
            if (waits := self._pending.get(request_id)) is not None and waits[0] is answer:
                del self._pending[request_id]
        if response is None:
            if heard == self._heard and not stream.ending:
                _log.info("the conductor at %s is silent", self._address)
                stream.end(Unavailable("it is silent"))  # do not let every request wait this long
            raise ConductorAway(f"the conductor gave no answer within {self._answer_timeout_s:g} s")
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return response.placement

    def is_over(self) -> None:
        """Who has waited long enough is told so."""
        self._watch = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for answer, due_s in self._pending.values():
            if due_s > now_s:
                self._watch = deadlines_of(loop).add(self, due_s)
                return
            if not answer.done():
                answer.set_result(None)

    def release(self, request_id: str) -> None:
        """This placement is not used (any more). Without a conductor there is nothing to tell."""
        if self.connected and self._outgoing.has_room:
            self._outgoing.message(FRAME_BYTES + len(request_id.encode())).released_request_ids.append(request_id)

    # -- the stream

    async def _converse(self, stream: Dialed[SessionRequest, SessionResponse]) -> None:
        pace = Pace(self._in_flight, time.monotonic)
        self._outgoing = Outgoing(SessionRequest, pace, MESSAGES_MAX, PARTS_PER_MESSAGE)
        self._outgoing.message(FRAME_BYTES).lb_id = self._lb_id
        self._outgoing.by(stream)
        self._stream = stream
        self._listed = False
        try:
            await stream.run(self._take, self._outgoing)
        finally:
            self._disconnected()

    def _take(self, message: SessionResponse) -> None:
        self._heard += 1
        if not self.connected:
            self.connected = True
            self.sessions += 1
        if message.HasField("instances"):
            first, self._listed = not self._listed, True
            try:
                self._on_instances(message.instances, first)
            except Exception:  # a list that we cannot take is no reason to lose what waits for its placement
                _log.exception("cannot take the conductor's list of instances")
        for response in message.responses:
            waiting = self._pending.get(response.request_id)
            if waiting is not None and not waiting[0].done():
                waiting[0].set_result(response)
            elif response.HasField("placement"):
                self.release(response.request_id)  # nobody waits for it any more

    def _disconnected(self) -> None:
        self.connected = False
        self._outgoing.close()
        for answer, _ in self._pending.values():
            if not answer.done():
                answer.set_exception(ConductorAway("the conductor went away"))


def _came(answer: asyncio.Future[conductor_pb2.ScheduleResponse | None]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None and answer.result() is not None
