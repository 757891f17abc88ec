"""The load balancer's stream to the conductor: requests of one event-loop turn travel in one message.

While no conductor answers, the session reconnects with growing pauses. Meanwhile the load balancer itself places
requests, on the instances that were listed last."""

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
from pinyon.runtime.outgoing import FRAME_BYTES, Outgoing, Pace

MESSAGES_MAX = 1024
"""The number of messages that wait for a conductor which does not keep up."""
PARTS_PER_MESSAGE = 64

SessionRequest = conductor_pb2.ScheduleSessionRequest
SessionResponse = conductor_pb2.ScheduleSessionResponse
METHOD = Method("/pinyon.api.conductor.v1.ConductorService/ScheduleSession", SessionRequest, SessionResponse)

_log = get_logger("lb.conductor")


class ConductorAway(Unavailable):
    """The conductor does not answer, so the load balancer has to choose instances itself."""


class ConductorSession:
    """The session with a conductor: ``start`` → ``place`` and ``release`` → ``close``. ``on_instances`` gets each new
    list, and whether it is the first of its session.

    ``in_flight`` returns this load balancer's requests: if they are many, they travel together to the conductor, and
    from there to the workers."""

    def __init__(
        self,
        address: str,
        lb_id: str,
        on_instances: Callable[[conductor_pb2.InstanceList, bool], None],
        answer_timeout_s: float,
        in_flight: Callable[[], int],
        connect: OpenSession = open_session,
    ) -> None:
        self.address = address
        self._lb_id = lb_id
        self._on_instances = on_instances
        self._answer_timeout_s = answer_timeout_s
        self._in_flight = in_flight
        self._link = Redialer("conductor", address, METHOD, self._converse, connect=connect, log=_log)
        self._stream: Dialed[SessionRequest, SessionResponse]
        self._heard = 0
        self._listed = False
        """True once the conductor has sent a list in this session."""
        self._outgoing: Outgoing[SessionRequest]
        self.connected = False
        """True while the conductor answers; only then are placements requested."""
        self._pending: dict[str, tuple[asyncio.Future[conductor_pb2.ScheduleResponse | None], float]] = {}
        """The pending placements by request, in the order of their deadlines (time of the event loop): the future
        answer, which is None when the deadline has passed."""
        self._watch: int | None = None
        """The handle of the timer that watches all deadlines, if there are any."""
        self.sessions = 0
        """The number of sessions that a conductor has answered."""

    @property
    def pending(self) -> int:
        """The number of requests that wait for their placement."""
        return len(self._pending)

    def start(self) -> None:
        if self.address:
            self._link.start()

    async def close(self) -> None:
        await self._link.close()
        if self._watch is not None:
            deadlines_of(asyncio.get_running_loop()).remove(self, self._watch)

    async def place(self, request: conductor_pb2.ScheduleRequest, size_bytes: int) -> common_pb2.Placement:
        """Returns where the request runs. ``size_bytes`` is the most that the request takes in the message.

        Raises :class:`ConductorAway` when no conductor answers in time, else the :class:`PinyonError` it answered with.
        A placement that comes too late, or after a cancel, is given back."""
        if not self.connected:
            raise ConductorAway("the conductor is away")
        if not self._outgoing.has_room:
            raise ConductorAway("the conductor does not keep up")
        request_id = request.request_id
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[conductor_pb2.ScheduleResponse | None] = loop.create_future()
        self._outgoing.message(FRAME_BYTES + size_bytes).requests.append(request)
        if (before := self._pending.pop(request_id, None)) is not None and not before[0].done():
            # Other regions choose ids as well; an answer to this id belongs to the later request.
            before[0].set_exception(ConductorAway("another request has its id"))
        self._pending[request_id] = answer, loop.time() + self._answer_timeout_s
        if self._watch is None:
            self._watch = deadlines_of(loop).add(self, loop.time() + self._answer_timeout_s)
        stream, heard = self._stream, self._heard
        try:
            response = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result() is not None:
                self.release(request_id)
            raise
        finally:
            if (waits := self._pending.get(request_id)) is not None and waits[0] is answer:
                del self._pending[request_id]
        if response is None:
            if heard == self._heard and not stream.ending:
                _log.info("the conductor at %s is silent", self.address)
                stream.end(Unavailable("it is silent"))  # so that not every request waits this long
            raise ConductorAway(f"the conductor gave no answer within {self._answer_timeout_s:g} s")
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return response.placement

    def is_over(self) -> None:
        """Ends the waits whose deadline has passed; called by the timer."""
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
        """Gives back a placement that is not used (any more), if a conductor is there and keeps up."""
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
            except Exception:  # a bad list must not lose the requests that wait for placements
                _log.exception("cannot take the conductor's list of instances")
        for response in message.responses:
            waiting = self._pending.get(response.request_id)
            if waiting is not None and not waiting[0].done():
                waiting[0].set_result(response)
            elif response.HasField("placement"):
                self.release(response.request_id)  # no request waits for it any more

    def _disconnected(self) -> None:
        self.connected = False
        self._outgoing.close()
        for answer, _ in self._pending.values():
            if not answer.done():
                answer.set_exception(ConductorAway("the conductor went away"))
