"""The gRPC door for load balancers of other regions: sessions with them, reports about this region, and their requests.
Subclasses know what the requests consist of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PermissionDenied,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)
from pinyon.core.request import check_geography
from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.admission import ForwardedPlace
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.readiness import Readiness
from pinyon.frontdoor.regions.links import PEER_VERSION
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.served_models import ServedModels
from pinyon.http.answer import error_status
from pinyon.http.budget import Budget, Share
from pinyon.messages.checks import check_id
from pinyon.runtime.callers import Callers
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import LB, check_claim, check_region_claim
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import FRAME_BYTES, Outgoing, Pace
from pinyon.runtime.tasks import ended

STATE_S = 0.1
"""The time between two states, if something has changed (SkyWalker §4.1)."""
STATE_TICKS_MAX = 5
"""The ticks after which an unchanged state is sent again, as a sign of life."""
REQUESTS_MAX = 4096
"""The maximum number of requests in one session at once."""
MESSAGES_MAX = 16
"""The messages, of at most 2 MiB and ``PARTS_MAX`` parts, that may wait for a caller which takes none."""
PARTS_MAX = 4096
FIRST_S = 5.0
SESSIONS_MAX = 256
LB_ID_CHARS_MAX = 128
FAREWELL_S = 0.2
SILENT_TICKS = 60
"""The ticks of :data:`STATE_S` after which a silent caller counts as frozen or cut off, as it probes each second.
Otherwise its requests would never end, and it would keep its share of the room."""
PEER_CALLERS: Callers = {"Session": frozenset({LB})}

_log = get_logger("lb.regions")


@dataclass(eq=False)
class Serving(peer_pb2_grpc.PeerServiceServicer):
    """The part of a load balancer that serves other regions' requests, over ``sessions``: the gRPC service, and the
    checks of each request, whatever it consists of. Each kind of target has a subclass.

    With TLS, callers are load balancers certified for the region they name, without TLS anybody."""

    own: PeerBalancer
    line: Line
    metrics: DoorMetrics[Any]
    readiness: Readiness
    models: ServedModels
    access: AccessLog
    budget: Budget
    """The budget of bytes that requests of other regions hold here."""
    timeout_s: float
    clock: Clock
    sessions: set[InboundSession[Any]] = field(default_factory=set, init=False)
    ending: bool = field(default=False, init=False)
    """True once sessions end as soon as they have no requests."""
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SESSIONS_MAX), init=False)
    """The places of callers, those without a session among them."""

    def session(self, peer: PeerBalancer) -> InboundSession[Any]:
        """Returns a session that has just begun."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """The number of requests from other regions."""
        return sum(session.running for session in self.sessions)

    def end(self) -> None:
        """Ends each session as soon as it has no requests; called when the load balancer takes no new ones."""
        self.ending = True
        for session in list(self.sessions):
            session.end_if_idle()

    def states(self, sharing: int, region: str) -> list[peer_pb2.ModelState]:
        """Returns each served model's state for a load balancer of that region, one of ``sharing`` that may send."""
        now_s = self.clock()
        return [
            peer_pb2.ModelState(
                model=model,
                instances=room.targets,
                available_instances=room.available,
                # If there is room, the waiting requests must not be served here, so they do not wait for it.
                queued=0 if room.share or room.share is None else self.line.queued,
                running=room.running,
                credits=room.share,
            )
            for model, served in self.models.by_name.items()
            if not served.by_servers and (room := served.layers.room_for(region, sharing, now_s)) is not None
        ]

    def admit(self, sender: PeerBalancer, hops: int, geographies: Collection[str], tenant: str) -> ForwardedPlace:
        """Returns a place in the line. Raises :class:`ResourceExhausted` with :data:`REGION_FIELD` when there is no
        room, with :data:`REJECTED_FIELD` when it may not be served here; :class:`FailedPrecondition` for a second
        hop."""
        if hops != 1:
            raise FailedPrecondition(f"it has come through {hops} regions, only one is allowed")
        # Refuses again what the sender must not send, or this region must not serve.
        verdict = self.models.geography.may(sender.region, self.own.region, geographies, tenant)
        if not verdict.allowed:
            raise ResourceExhausted(f"Not served in {self.own.region}: {verdict.reason}.", field=REJECTED_FIELD)
        if self.readiness.draining:
            raise ResourceExhausted("the region's load balancer is about to end", field=REGION_FIELD)
        try:
            place = ForwardedPlace(self.line, tenant)
        except ResourceExhausted as full:
            raise ResourceExhausted(full.message, field=REGION_FIELD, retry_after_s=full.retry_after_s) from None
        self.metrics.accepted.add((sender.region,))
        return place

    # -- the gRPC service

    async def Session(self, _: object, context: Any) -> None:
        if not self.own.region:
            raise FailedPrecondition("this load balancer is of no region: --region names it")
        if self._places.locked():
            raise ResourceExhausted("too many load balancers are connected", retry_after_s=1.0)
        async with self._places:
            await self._converse(context)

    async def _converse(self, context: Any) -> None:
        own = self.own
        stream = Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest](context)
        first = await stream.first(FIRST_S)
        if first is None:
            return
        peer = self._checked(first.hello, context)
        welcome = peer_pb2.PeerWelcome(region=own.region, lb_id=own.name, version=PEER_VERSION, kind=own.kind)
        await self.session(peer).run(stream, welcome)

    def _checked(self, hello: peer_pb2.PeerHello, context: Any) -> PeerBalancer:
        """Returns the caller. Raises :class:`PinyonError` for callers that may not have a session."""
        if hello.version != PEER_VERSION:
            raise FailedPrecondition(f"version {hello.version} is not spoken here, but {PEER_VERSION}", field="version")
        if hello.kind != self.own.kind:
            raise FailedPrecondition(
                "one of us is in front of servers of others (--upstream), and one is not", field="kind"
            )
        check_geography(hello.region, "region")
        if not hello.lb_id or len(hello.lb_id) > LB_ID_CHARS_MAX or not hello.lb_id.isprintable():
            raise InvalidArgument(f"lb_id has 1 to {LB_ID_CHARS_MAX} characters", field="lb_id")
        check_claim(context, LB, hello.lb_id)
        check_region_claim(context, hello.region)
        verdict = self.models.geography.sends(hello.region, self.own.region)
        if not verdict.allowed:
            raise PermissionDenied(f"{hello.region} may not send to {self.own.region}: {verdict.reason}")
        return PeerBalancer(hello.lb_id, hello.region, "")


S = TypeVar("S", bound=Serving)


class InboundSession(Generic[S]):
    """One session, after its welcome, and its requests. ``run`` ends with the session and leaves nothing of it.
    Subclasses know what requests consist of, and how one is served."""

    def __init__(self, serving: S, peer: PeerBalancer) -> None:
        self.serving, self.peer = serving, peer
        self._received = self._last_id = 0
        """The number of requests received in all, and the id of the last one."""
        self._silent = self._version = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        pace = Pace(lambda: len(self._tasks), serving.clock)
        self._outgoing: Outgoing[peer_pb2.SessionResponse] = Outgoing(
            peer_pb2.SessionResponse, pace, MESSAGES_MAX, PARTS_MAX
        )
        self._stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest] | None = None

    @property
    def running(self) -> int:
        """The number of requests."""
        return len(self._tasks)

    async def run(
        self, stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest], welcome: peer_pb2.PeerWelcome
    ) -> None:
        self._stream = stream
        self._outgoing.message(welcome.ByteSize() + FRAME_BYTES).welcome.CopyFrom(welcome)
        self._outgoing.by(stream)
        self.serving.sessions.add(self)
        self.end_if_idle()
        states = asyncio.create_task(self._states(stream), name=f"states for {self.peer.name}")
        try:
            await stream.run(self._take, self._outgoing)
        finally:
            self.serving.sessions.discard(self)
            self._outgoing.close()
            await ended(states, *self._tasks.values())

    def end_if_idle(self) -> None:
        if self.serving.ending and not self._tasks and self._stream is not None:
            self._stream.end()

    # -- called by subclasses

    def begin(
        self,
        stream_id: int,
        name: str,
        run: Callable[[Head, Share], Awaitable[int]],
        over: Callable[[], object] = lambda: None,
    ) -> None:
        """Serves a new request by ``run``, which fills the head for the log and returns the status. The request may be
        cancelled at any time, even before its first step; ``over`` is called in any case. Raises
        :class:`InvalidArgument`."""
        self._received += 1
        if stream_id <= self._last_id:  # even if that request has ended
            raise InvalidArgument(f"stream {stream_id} is no new one", field="stream_id")
        self._last_id = stream_id
        if self.running >= REQUESTS_MAX:
            self.fail(stream_id, ResourceExhausted(f"{REQUESTS_MAX} requests are here", field=REGION_FIELD))
            over()
            return
        task = self._tasks[stream_id] = asyncio.create_task(self._serve(stream_id, name, run), name=name)
        task.add_done_callback(lambda _: over())
        task.add_done_callback(lambda _: self._ended(stream_id))

    async def _serve(self, stream_id: int, name: str, run: Callable[[Head, Share], Awaitable[int]]) -> None:
        head, share, status = Head("", self.serving.clock()), Share(self.serving.budget), 0
        try:
            head.unique = head.request_id = check_id(name, "request_id")
            status = await run(head, share)
        except asyncio.CancelledError:
            status = Cancelled.http_status
            self.fail(stream_id, Unavailable("cancelled"))
            raise
        except PinyonError as error:
            status = error_status(error)
            self.fail(stream_id, self.told(error))
        except Exception:
            status = Internal.http_status
            _log.exception("a forwarded request failed", extra={"request_id": head.log_id})
            self.fail(stream_id, Internal("internal error"))
        finally:
            share.hold(0)
            if head.broken:
                self.serving.metrics.broken.add((head.broken,))
            self.serving.access.answered("FORWARDED", self.peer.region, status, head)

    @staticmethod
    def hold(share: Share, name: str, size: int) -> None:
        """Holds that many bytes in that name. Raises :class:`ResourceExhausted`."""
        share.rename(name)
        if not share.hold(size):
            raise ResourceExhausted("requests of other regions hold too much", field=REGION_FIELD)

    def put(self, part: Message) -> None:
        """Sends a part to the caller, in order, unless the caller is gone."""
        stream = self._stream
        if stream is None or stream.ending:
            return
        if not self._outgoing.has_room:  # a caller that reads so slowly counts as gone
            stream.end(ResourceExhausted(f"{MESSAGES_MAX} messages wait"))
            return
        self.add(self._outgoing.message(part.ByteSize() + FRAME_BYTES), part)

    # -- implemented by subclasses

    def take(self, message: peer_pb2.SessionRequest) -> None:
        """Takes a message. Raises :class:`PinyonError`, which ends the session, if none of ours would send it."""
        raise NotImplementedError

    def add(self, message: peer_pb2.SessionResponse, part: Any) -> None:
        """Adds a part that was :meth:`put` to a message."""
        raise NotImplementedError

    def told(self, error: PinyonError) -> PinyonError:
        """Returns the error for the region that sent the request; another region may have what it needs."""
        raise NotImplementedError

    def fail(self, stream_id: int, error: PinyonError) -> None:
        """Ends a request with that error."""
        raise NotImplementedError

    # -- incoming

    def _take(self, message: peer_pb2.SessionRequest) -> None:
        self._silent = 0
        if message.probe and self._outgoing.has_room:
            self._outgoing.message(FRAME_BYTES).probe = message.probe
        self.take(message)
        for stream_id in message.cancel_stream_ids:
            task = self._tasks.get(stream_id)
            if task is not None:
                task.cancel()

    def _ended(self, stream_id: int) -> None:
        self._tasks.pop(stream_id, None)
        if self.serving.ending and not self._tasks:
            # Earlier, the caller could miss the last updates and take its request for lost.
            asyncio.get_running_loop().call_later(FAREWELL_S, self.end_if_idle)

    # -- outgoing

    async def _states(self, stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest]) -> None:
        """Sends the region's state whenever it has changed."""
        ticks = 0
        last: peer_pb2.RegionState | None = None
        while True:
            self._silent += 1
            if self._silent > SILENT_TICKS:
                stream.end(Unavailable("it is silent"))
                return
            state = self._now()
            ticks += 1
            if self._outgoing.has_room and (last is None or ticks >= STATE_TICKS_MAX or state != last):
                last, ticks = state, 0
                self._version += 1
                told = self._outgoing.message(state.ByteSize() + 2 * FRAME_BYTES).state
                told.CopyFrom(state)  # replaces a state that is still waiting
                told.version = self._version
            await asyncio.sleep(STATE_S)

    def _now(self) -> peer_pb2.RegionState:
        serving = self.serving
        models = serving.states(len(serving.sessions), self.peer.region)
        return peer_pb2.RegionState(draining=serving.readiness.draining, received=self._received, models=models)
