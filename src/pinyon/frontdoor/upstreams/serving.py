"""HTTP requests that other regions send: served by this region's servers, or refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PinyonError,
    ResourceExhausted,
)
from pinyon.frontdoor.auth import PUBLIC, Client
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.head import Head, Labels, traceparent
from pinyon.frontdoor.regions.inbound import InboundSession, Serving
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.regions.raw_streams import PIECE_BYTES, read_fields
from pinyon.frontdoor.upstreams.forward import Incoming
from pinyon.frontdoor.upstreams.forwarding import Forwarding
from pinyon.frontdoor.upstreams.peer_reply import PeerReply
from pinyon.frontdoor.upstreams.routes import passes
from pinyon.http.answer import HttpError
from pinyon.http.budget import HttpLimits, Share
from pinyon.http.request import parse_head
from pinyon.messages.request_class import class_from_proto

ADDED_FIELDS: Final = 4
"""The number of fields that a load balancer adds to those that a client may send."""


@dataclass(eq=False)
class RawServing(Serving):
    """The serving of other regions' requests by other people's servers."""

    forwarding: Forwarding
    limits: HttpLimits

    def session(self, peer: PeerBalancer) -> InboundSession[RawServing]:
        return _RawInbound(self, peer)


class _RawInbound(InboundSession[RawServing]):
    def __init__(self, serving: RawServing, peer: PeerBalancer) -> None:
        super().__init__(serving, peer)
        self._requests: dict[int, tuple[_Arriving, PeerReply]] = {}
        """The bodies and answers of the requests that are here."""

    def take(self, message: peer_pb2.SessionRequest) -> None:
        if message.requests:
            raise FailedPrecondition("requests are HTTP here", field="requests")
        for request in message.raw_requests:
            self._begin(request)
        for body in message.raw_bodies:
            if body.stream_id in self._requests:  # otherwise it has been refused already
                self._requests[body.stream_id][0].add(body.data)
        for taken in message.raw_taken:
            if taken.stream_id in self._requests:
                self._requests[taken.stream_id][1].taken(taken.bytes)

    def add(self, message: peer_pb2.SessionResponse, part: Any) -> None:
        message.raw_pieces.append(part)

    def told(self, error: PinyonError) -> PinyonError:
        if isinstance(error, (NotFound, HttpError)) or error.field == REJECTED_FIELD:
            return ResourceExhausted(error.message, field=REJECTED_FIELD)
        return ResourceExhausted(error.message, field=REGION_FIELD) if isinstance(error, ResourceExhausted) else error

    def fail(self, stream_id: int, error: PinyonError) -> None:
        self._requests[stream_id][1].fail(error)

    def _begin(self, request: peer_pb2.RawRequest) -> None:
        head = peer_pb2.RawHead()
        try:
            head.ParseFromString(request.head)
        except Exception:  # the library's own error is no public class
            raise InvalidArgument("a request that cannot be read", field="head") from None
        stream_id = head.stream_id
        arriving, reply = _Arriving(head.body_length), PeerReply(self, stream_id)
        arriving.add(request.body)
        self._requests[stream_id] = arriving, reply
        run = partial(self._run, head, request.hops, arriving, reply)
        self.begin(stream_id, head.request_id, run, lambda: self._requests.pop(stream_id, None))

    async def _run(
        self, message: peer_pb2.RawHead, hops: int, arriving: _Arriving, reply: PeerReply, head: Head, share: Share
    ) -> int:
        serving, peer = self.serving, self.peer
        whose = class_from_proto(message.request_class)
        head.holder = whose.tenant
        head.client = PUBLIC if whose.tenant == PUBLIC.tenant else Client(whose.tenant)
        most = serving.limits.body_bytes
        if message.body_length > most:
            raise ResourceExhausted(f"its body is larger than {most} bytes", field=REJECTED_FIELD)
        self.hold(share, whose.tenant, message.body_length)
        _fill(head, message, serving.limits)
        head.labels = Labels(
            session=whose.session, user=whose.user, priority=whose.priority, geographies=whose.geographies
        )
        limit_s = min(message.timeout_ms / 1e3 or serving.timeout_s, serving.timeout_s)
        with serving.admit(peer, hops, whose.geographies, whose.tenant) as place:
            try:
                async with asyncio.timeout(limit_s):
                    body = await arriving.readexactly(message.body_length)
            except TimeoutError:
                raise DeadlineExceeded("its body did not come in time") from None
            incoming = Incoming(place, limit_s, peer.region, message.model)
            return await serving.forwarding.serve_forwarded(head, body, reply, incoming)


class _Arriving(asyncio.StreamReader):
    """The body of a request while it arrives, of a known length in bytes."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._left = length

    def add(self, data: bytes) -> None:
        """Adds a piece. Raises :class:`InvalidArgument` for more bytes than announced."""
        self._left -= len(data)
        if self._left < 0 or len(data) > PIECE_BYTES:
            raise InvalidArgument("a body that is larger than it was said to be", field="body")
        self.feed_data(data)


def _fill(head: Head, message: peer_pb2.RawHead, limits: HttpLimits) -> None:
    """Fills the head as if the request had come by HTTP. Raises :class:`InvalidArgument`, and :class:`HttpError`."""
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
