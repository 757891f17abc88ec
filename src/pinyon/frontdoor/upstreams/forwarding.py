"""The handling of requests for other people's servers: read, run by the loop, and answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.frontdoor.admission import TenantAdmission
from pinyon.frontdoor.auth import PUBLIC
from pinyon.frontdoor.failures import Refused, broken_by
from pinyon.frontdoor.head import Head, allowed_geographies
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.request_loop import RequestLoop
from pinyon.frontdoor.served_model import ServedModel
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.fields import to_server
from pinyon.frontdoor.upstreams.forward import Forward, Incoming
from pinyon.frontdoor.upstreams.passing import stream_error
from pinyon.frontdoor.upstreams.reading import read_asked
from pinyon.http.answer import HttpError, Reply
from pinyon.openai.large import is_large
from pinyon.routing.target import Routed
from pinyon.runtime.deadlines import TimeLimit

SHOWN_CHARS: Final = 200


class Forwarding:
    """The handler of requests, one per load balancer. A whole request may take ``request_s``; ``default_tokens`` count
    as generated if a client sets no limit. Routing keys start from ``secret``."""

    def __init__(
        self,
        admission: TenantAdmission,
        models: ServedModels,
        loop: RequestLoop[Forward],
        off_loop: OffLoop,
        request_s: float,
        default_tokens: int,
        secret: bytes,
        clock: Clock,
    ) -> None:
        self.admission, self.models, self.loop, self.off_loop = admission, models, loop, off_loop
        self.request_s, self.default_tokens, self.secret, self.clock = request_s, default_tokens, secret, clock

    async def serve(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Serves a request and returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        with self.admission.admit(head.client) as ticket:
            return await self.serve_forwarded(head, body, reply, Incoming(ticket, self.request_s))

    async def serve_forwarded(self, head: Head, body: bytes | bytearray, reply: Reply, incoming: Incoming) -> int:
        """Serves a request that the caller has admitted; one from another region goes to a server of this region, or
        fails. Raises :class:`PinyonError`, even in the middle of an answer."""
        return await self.run(head, reply, incoming, partial(self._read, head, body, incoming, reply))

    async def run(self, head: Head, reply: Reply, incoming: Incoming, read: Callable[[], Awaitable[Forward]]) -> int:
        """Serves the request that ``read`` returns; see :meth:`serve_forwarded`."""
        limit_s = incoming.limit_s
        deadline_s = head.arrived_s + limit_s
        forward: Forward | None = None
        try:
            with TimeLimit(deadline_s - self.clock()):
                forward = await read()
                head.facts = forward.facts
                await self.loop.run(forward, incoming.ticket)
                return forward.status
        except Refused as refusal:
            fields = refusal.fields + incoming.ticket.rate_fields
            error: PinyonError = refusal
            if not reply.begun:
                reply.whole(refusal.status, refusal.body, refusal.kind, fields)
                return refusal.status
        except Exception as raised:
            error = broken_by(raised, reply, limit_s, head.log_id)
        assert forward is not None
        return await self._break_off(forward, error)

    async def _break_off(self, forward: Forward, error: PinyonError) -> int:
        """Ends an answer whose status line has gone out. A stream gets the error as an event. Any other answer stays
        incomplete, so that the connection ends, too."""
        passing, head, reply = forward.passing, forward.head, forward.reply
        assert passing is not None
        if passing.is_stream and passing.said_all:
            await reply.end(b"")
            return passing.answer.status
        head.broken = error.grpc_code.lower()
        if forward.sender:
            raise error  # the region of the client's connection reports it
        if passing.is_stream:
            await reply.end(stream_error(head.path, error))
        return passing.answer.status

    async def _read(self, head: Head, body: bytes | bytearray, incoming: Incoming, reply: Reply) -> Forward:
        assert head.raw is not None
        if not head.raw.target.startswith(b"/v1/") or b"#" in head.raw.target:
            # Absolute or disguised targets are refused: the server must be asked for the path that was checked here.
            raise HttpError(404, f"Invalid URL (POST {head.path[:SHOWN_CHARS]})")
        arguments = (head.path, head.raw.content_type, body, self.secret, self.default_tokens)
        if is_large(body):
            asked = await self.off_loop.run(head.client.holder, partial(read_asked, large=True), *arguments)
        else:
            asked = read_asked(*arguments)
        forward = Forward(head, body, asked, server_fields(head), reply, incoming)
        self.depart(forward, self.models.of(asked.model or incoming.model))
        return forward

    def depart(self, forward: Forward, served: ServedModel) -> None:
        """Sets the model that the request is for, and what its target is chosen by."""
        head, asked = forward.head, forward.asked
        whose = head.labels.session or head.labels.user or asked.user
        if not whose and head.client is not PUBLIC:
            whose = head.client.tenant
        geographies = allowed_geographies(head.labels, head.client)
        if not self.models.region:
            geographies = ()  # this region has no name
        forward.depart(served, Routed(asked.keys, whose), geographies, head.client.tenant)


def server_fields(head: Head) -> bytes:
    """Returns the lines of a request's head that go on to a server."""
    assert head.raw is not None
    fields = to_server(head.raw.fields)
    fields.append(b"x-request-id: %b\r\n" % head.log_id.encode("ascii"))
    return b"".join(fields)
