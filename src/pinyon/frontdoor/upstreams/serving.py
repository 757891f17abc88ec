"""HTTP requests that other regions send: served by this region's servers, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)
from pinyon.frontdoor.access_log import AccessLog, Answered
from pinyon.frontdoor.auth import PUBLIC, Client
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.head import Head, traceparent
from pinyon.frontdoor.labels import Labels
from pinyon.frontdoor.regions.arrival import Arrivals, ForwardedTurn
from pinyon.frontdoor.regions.inbound import REQUESTS_MAX, Inbound
from pinyon.frontdoor.regions.raw_streams import PIECE_BYTES, read_fields
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.forward import Incoming
from pinyon.frontdoor.upstreams.forwarding import Forwarding
from pinyon.frontdoor.upstreams.peer_reply import PeerReply
from pinyon.frontdoor.upstreams.routes import passes
from pinyon.http.answer import error_status
from pinyon.http.budget import Budget, Share
from pinyon.http.error import HttpError
from pinyon.http.limits import HttpLimits
from pinyon.http.request import parse_head
from pinyon.messages.checks import check_id
from pinyon.messages.request_class import class_from_proto
from pinyon.routing.geography import Geography
from pinyon.runtime.logging import get_logger

__all__ = ["RawServing"]

ADDED_FIELDS: Final = 4
"""To those that the client may send."""

_log = get_logger("lb.regions")


class RawServing:
    """The :class:`pinyon.frontdoor.regions.inbound.Serving` in front of other people's servers."""

    def __init__(
        self,
        arrivals: Arrivals,
        forwarding: Forwarding,
        models: ServedModels,
        limits: HttpLimits,
        bodies: Budget,
        access: AccessLog,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self.arrivals = arrivals
        self.forwarding = forwarding
        self.models = models
        self.limits = limits
        self.bodies = bodies
        self.access = access
        self.timeout_s = timeout_s
        self.clock = clock

    @property
    def geography(self) -> Geography:
        return self.arrivals.geography

    def requests(self, session: Inbound) -> _RawRequests:
        return _RawRequests(self, session)

    def states(self, sharing: int, region: str) -> list[peer_pb2.ModelState]:
        return [self.arrivals.state(model, room) for model, room in self.models.rooms(sharing, region)]


class _RawRequests:
    """Of one session."""

    def __init__(self, parts: RawServing, session: Inbound) -> None:
        self._parts = parts
        self._session = session
        self._last = 0
        """Number of the last request."""
        self._arriving: dict[int, _Arriving] = {}
        """Those whose bodies are not here yet."""
        self._replies: dict[int, PeerReply] = {}

    def take(self, message: peer_pb2.SessionRequest) -> None:
        if message.requests:
            raise FailedPrecondition("requests are HTTP here", field="requests")
        for request in message.raw_requests:
            self._session.received += 1
            self._begin(request)
        for body in message.raw_bodies:
            arriving = self._arriving.get(body.stream_id)
            if arriving is not None:  # or it has been refused already
                arriving.add(body.data)
        for taken in message.raw_taken:
            reply = self._replies.get(taken.stream_id)
            if reply is not None:
                reply.taken(taken.bytes)

    def response(self, parts: Sequence[Any]) -> peer_pb2.SessionResponse:
        return peer_pb2.SessionResponse(raw_pieces=parts)

    def _begin(self, request: peer_pb2.RawRequest) -> None:
        """Raises :class:`PinyonError`, which ends the session, for what no load balancer of ours sends."""
        parts, session = self._parts, self._session
        head = peer_pb2.RawHead()
        try:
            head.ParseFromString(request.head)
        except Exception:  # the library's own error is no public class
            raise InvalidArgument("a request that cannot be read", field="head") from None
        stream_id = head.stream_id
        if stream_id <= self._last:
            raise InvalidArgument(f"stream {stream_id} is not a new one", field="stream_id")
        self._last = stream_id
        reply = PeerReply(session, stream_id)
        if session.running >= REQUESTS_MAX:
            reply.fail(ResourceExhausted(f"{REQUESTS_MAX} requests are here", field=REGION_FIELD))
            return
        if head.body_length > parts.limits.body_bytes:
            most = parts.limits.body_bytes
            reply.fail(ResourceExhausted(f"its body is larger than {most} bytes", field=REJECTED_FIELD))
            return
        arriving = _Arriving(head.body_length)
        arriving.add(request.body)
        self._arriving[stream_id], self._replies[stream_id] = arriving, reply
        serving = self._serve(head, request.hops, arriving, reply)
        session.begin(stream_id, serving, head.request_id, lambda: self._ended(stream_id))

    def _ended(self, stream_id: int) -> None:
        self._arriving.pop(stream_id, None)
        self._replies.pop(stream_id, None)

    async def _serve(self, message: peer_pb2.RawHead, hops: int, arriving: _Arriving, reply: PeerReply) -> None:
        parts, peer = self._parts, self._session.peer
        head = Head("", parts.clock())
        status = 0
        share = Share(parts.bodies)
        try:
            whose = class_from_proto(message.request_class)
            share.rename(whose.tenant)
            if not share.hold(message.body_length):
                raise ResourceExhausted("too many large requests are here", field=REGION_FIELD)
            _fill(head, message, parts.limits)
            head.client = PUBLIC if whose.tenant == PUBLIC.tenant else Client(whose.tenant)
            head.labels = Labels(
                session=whose.session, user=whose.user, priority=whose.priority, geographies=whose.geographies
            )
            limit_s = min(message.timeout_ms / 1e3 or parts.timeout_s, parts.timeout_s)
            with parts.arrivals.admit(peer, hops, whose.geographies, whose.tenant) as place:
                async with asyncio.timeout(limit_s):
                    body = await arriving.whole()
                incoming = Incoming(ForwardedTurn(place), limit_s, peer.region, message.model)
                status = await parts.forwarding.serve_forwarded(head, body, reply, incoming)
        except asyncio.CancelledError:
            status = Cancelled.http_status
            reply.fail(Unavailable("cancelled"))
            raise
        except TimeoutError:
            status = 504
            reply.fail(Unavailable("its body did not come in time"))
        except PinyonError as error:
            status = error_status(error)
            reply.fail(_told(error))
        except Exception:
            status = Internal.http_status
            _log.exception("a forwarded request failed", extra={"request_id": head.log_id})
            reply.fail(Internal("internal error"))
        finally:
            share.hold(0)
            seen = Answered(
                "FORWARDED",
                peer.region,
                status,
                head.arrived_s,
                head.log_id,
                head.client.tenant,
                head.broken,
                head.facts,
            )
            parts.access.answered(seen)


def _told(error: PinyonError) -> PinyonError:
    """Returns what the region is told that has sent the request: another one may have what it needs."""
    if isinstance(error, (NotFound, HttpError)) or error.field == REJECTED_FIELD:
        return ResourceExhausted(error.message, field=REJECTED_FIELD)
    return ResourceExhausted(error.message, field=REGION_FIELD) if isinstance(error, ResourceExhausted) else error


class _Arriving:
    """A body, of so many bytes."""

    __slots__ = ("_complete", "_left", "_pieces")

    def __init__(self, length: int) -> None:
        self._left = length
        self._pieces: list[bytes] = []
        self._complete = asyncio.Event()

    def add(self, data: bytes) -> None:
        """Raises :class:`InvalidArgument` for more than was said."""
        self._left -= len(data)
        if self._left < 0 or len(data) > PIECE_BYTES:
            raise InvalidArgument("a body that is larger than it was said to be", field="body")
        self._pieces.append(data)
        if not self._left:
            self._complete.set()

    async def whole(self) -> bytes:
        await self._complete.wait()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _fill(head: Head, message: peer_pb2.RawHead, limits: HttpLimits) -> None:
    """As if it had come by HTTP. Raises :class:`InvalidArgument`, and :class:`HttpError`."""
    head.unique = head.request_id = check_id(message.request_id, "request_id")
    if not head.unique.isascii() or not head.unique.isprintable():
        raise InvalidArgument("request_id is not printable", field="request_id")
    read_fields(message.fields)
    if not message.target.startswith(b"/") or not message.target.isascii() or len(message.target.split()) != 1:
        raise InvalidArgument("that is no target", field="target")
    limits = replace(limits, head_fields=limits.head_fields + ADDED_FIELDS)
    head.raw = parse_head(b"POST %b HTTP/1.1\r\nhost: peer\r\n%b\r\n" % (message.target, message.fields), limits)
    head.path = head.raw.path
    if not passes(head.path):
        raise HttpError(404, "That is not served to other regions.")
    for name, value in head.raw.fields:
        if name == b"traceparent":
            head.traceparent = traceparent(value.decode("latin-1"))
