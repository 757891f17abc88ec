"""The load balancer's one stream to the conductor: requests of one loop turn travel in one message.

While there is no conductor the session tries again with growing pauses; requests are then placed by the load balancer
itself on the last instances it was told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.messages.error import error_from_proto
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import FRAME_BYTES, MESSAGE_BYTES, Outbox, OutboxClosed
from pinyon.runtime.pace import Pace

__all__ = ["ConductorAway", "ConductorSession"]

WRITE_S = 5.0
OUTBOX_LIMIT = 65_536
REQUESTS_PER_MESSAGE = 64

SessionRequest = conductor_pb2.ScheduleSessionRequest
SessionResponse = conductor_pb2.ScheduleSessionResponse
METHOD = Method("/pinyon.api.conductor.v1.ConductorService/ScheduleSession", SessionRequest, SessionResponse)
_Outbox = Outbox[conductor_pb2.ScheduleRequest | str]

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
        self._spoken: asyncio.Future[_Outbox]
        self._heard = 0
        self._listed = False
        """This session's conductor has sent a list."""
        self._outbox: _Outbox | None = None
        self._pending: dict[str, tuple[asyncio.Future[conductor_pb2.ScheduleResponse | None], float]] = {}
        """By request, in the order in which they are due: what will be the answer, or None when it did not come until
        then, by the loop's clock."""
        self._watch: asyncio.TimerHandle | None = None
        """Looks after them: one timer for all."""
        self.sessions = 0
        """How often a conductor answered a new session."""

    @property
    def connected(self) -> bool:
        return self._outbox is not None

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
            self._watch.cancel()

    async def place(self, request: conductor_pb2.ScheduleRequest) -> common_pb2.Placement:
        """Where the request runs.

        Raises :class:`ConductorAway` when no conductor answers in time, else the :class:`PinyonError` it answered with.
        A placement that comes too late, or after a cancel, is given back.
        """
        outbox = self._outbox
        if outbox is None:
            raise ConductorAway("the conductor is away")
        request_id = request.request_id
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[conductor_pb2.ScheduleResponse | None] = loop.create_future()
        try:
            outbox.put(request)
        except (OutboxClosed, ResourceExhausted):
            raise ConductorAway("the conductor does not keep up") from None
        if (before := self._pending.pop(request_id, None)) is not None and not before[0].done():
            # Other regions choose ids as well; an answer under this one is the later request's.
            before[0].set_exception(ConductorAway("another request has its id"))
        waits = self._pending[request_id] = answer, loop.time() + self._answer_timeout_s
        if self._watch is None:
            self._watch = loop.call_later(self._answer_timeout_s, self._look)
        stream, heard = self._stream, self._heard
        try:
            response = await answer
        except asyncio.CancelledError:
            if _came(answer):
                self.release(request_id)
            raise
        finally:
            if self._pending.get(request_id) is waits:
                del self._pending[request_id]
        if response is None:
            if heard == self._heard and not stream.ending:
                _log.info("the conductor at %s is silent", self._address)
                stream.end(Unavailable("it is silent"))  # do not let every request wait this long
            raise ConductorAway(f"the conductor gave no answer within {self._answer_timeout_s:g} s")
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return response.placement

    def _look(self) -> None:
        """Who has waited long enough is told so."""
        self._watch = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for answer, due_s in self._pending.values():
            if due_s > now_s:
                self._watch = loop.call_at(due_s, self._look)
                return
            if not answer.done():
                answer.set_result(None)

    def release(self, request_id: str) -> None:
        """This placement is not used (any more). Without a conductor there is nothing to tell."""
        if self._outbox is not None:
            with contextlib.suppress(OutboxClosed, PinyonError):
                self._outbox.put(request_id)

    # -- the stream

    async def _converse(self, stream: Dialed[SessionRequest, SessionResponse]) -> None:
        self._stream, self._spoken = stream, asyncio.get_running_loop().create_future()
        self._listed = False
        try:
            await stream.run(self._take, self._messages(self._spoken))
        finally:
            self._disconnected()

    def _take(self, message: SessionResponse) -> None:
        self._heard += 1
        if not self._spoken.done():  # it speaks: from here on it is asked
            self.sessions += 1
            self._outbox = Outbox(OUTBOX_LIMIT, Pace(self._in_flight, time.monotonic))
            self._spoken.set_result(self._outbox)
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

    async def _messages(self, spoken: asyncio.Future[_Outbox]) -> AsyncGenerator[SessionRequest, None]:
        yield SessionRequest(lb_id=self._lb_id)
        outbox = await spoken
        while True:
            for message in _filled(await outbox.take_all()):
                yield message

    def _disconnected(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for answer, _ in self._pending.values():
            if not answer.done():
                answer.set_exception(ConductorAway("the conductor went away"))


def _came(answer: asyncio.Future[conductor_pb2.ScheduleResponse | None]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None and answer.result() is not None


def _filled(items: Iterable[conductor_pb2.ScheduleRequest | str]) -> Iterator[SessionRequest]:
    """All of it in as few messages as the limits allow, in order."""
    message, filled = SessionRequest(), 0
    for item in items:
        size = FRAME_BYTES + (len(item.encode()) if isinstance(item, str) else item.ByteSize())
        if filled and (filled + size > MESSAGE_BYTES or len(message.requests) >= REQUESTS_PER_MESSAGE):
            yield message
            message, filled = SessionRequest(), 0
        filled += size
        if isinstance(item, str):
            message.released_request_ids.append(item)
        else:
            message.requests.append(item)
    if filled:
        yield message
