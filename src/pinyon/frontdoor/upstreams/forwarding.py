"""A request's life in front of other people's servers: read, wait for its turn and for room, sent, and sent again
elsewhere as long as no byte of an answer has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final, NamedTuple

from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, Internal, PinyonError
from pinyon.frontdoor.admission import Admission, LimitedTurn
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.auth import PUBLIC, Client
from pinyon.frontdoor.failures import Absent, Broke, ConnectionsFull, NoRoom
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.labels import allowed_geographies
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.rate_limits import rate_fields
from pinyon.frontdoor.seekers import Seekers
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.time_limit import TimeLimits
from pinyon.frontdoor.upstreams.exchange import Outgoing, Targets
from pinyon.frontdoor.upstreams.fields import from_server, to_server
from pinyon.frontdoor.upstreams.forward import Forward, Refusal
from pinyon.frontdoor.upstreams.metrics import UpstreamMetrics
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.frontdoor.upstreams.placing import Placing
from pinyon.frontdoor.upstreams.reading import read_asked
from pinyon.frontdoor.upstreams.stream_error import stream_error
from pinyon.http.answer import JSON, Reply
from pinyon.http.error import HttpError
from pinyon.openai.format import error_body
from pinyon.openai.large import is_large
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import Choice, Where
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Telemetry

__all__ = ["Forwarding", "ForwardingLimits", "Incoming"]

NO_ROOM: Final = frozenset((429, 502, 503))
"""Another server may have some."""
REFUSAL_BYTES: Final = 64 << 10
REFUSAL_S: Final = 1.0
"""Of a refusal whose text is larger or takes longer only the status is passed on, and when to ask again."""
TRIES_MAX: Final = 64
SHOWN_CHARS: Final = 200

_log = get_logger("lb.upstreams")


@dataclass(frozen=True, slots=True)
class ForwardingLimits:
    """``request_s`` is for a whole request. ``attempts`` may be cost servers. ``first_byte_s`` is how long a stream may
    take to begin, ``wait_s`` how long somebody else is waited for who may take a request that failed.
    ``default_tokens`` count as generated where a client names no limit. ``slots`` are the queue's."""

    request_s: float = 600.0
    attempts: int = 3
    first_byte_s: float = 120.0
    wait_s: float = 10.0
    default_tokens: int = 256
    slots: int = 1024


class Incoming(NamedTuple):
    """How a request has come: its place in the line, how long it may take (s), and of one from another region which one
    that is, and the model that it is for."""

    ticket: LimitedTurn
    limit_s: float
    sender: str = ""
    model: str = ""


class Forwarding:
    """One per load balancer. ``targets``: servers are ``LOCAL``, those of a named cluster ``ADOPTED``, other regions
    ``REMOTE``. ``secret`` is what routing keys start from."""

    def __init__(
        self,
        admission: Admission,
        models: ServedModels,
        targets: Callable[[Where, str], Targets],
        off_loop: OffLoop,
        metrics: UpstreamMetrics,
        telemetry: Telemetry,
        limits: ForwardingLimits,
        secret: bytes,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._models = models
        self._targets = targets
        self._off_loop = off_loop
        self._metrics = metrics
        self._telemetry = telemetry
        self._limits = limits
        self._secret = secret
        self._clock = clock
        self._time_limits = TimeLimits(clock)
        self._placing = Placing(models, limits.wait_s, clock, Seekers(limits.slots))

    def check_place(self, client: Client) -> None:
        """Raises :class:`ResourceExhausted` if there is no place in the queue."""
        self._admission.check(client)

    async def serve(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Returns the status. Raises :class:`PinyonError` while the answer has not begun."""
        with self._admission.admit(head.client) as ticket:
            return await self.serve_forwarded(head, body, reply, Incoming(ticket, self._limits.request_s))

    async def serve_forwarded(self, head: Head, body: bytes | bytearray, reply: Reply, incoming: Incoming) -> int:
        """One that another region has sent, and the caller has let in. It goes to a server of this region, or fails.
        Raises :class:`PinyonError`, also in the middle of an answer."""
        limit_s = incoming.limit_s
        deadline_s = head.arrived_s + limit_s
        forward: Forward | None = None
        try:
            with self._time_limits.until(deadline_s):
                forward = await self._begin(head, body, incoming, reply, deadline_s)
                await self._run(forward, body)
                return forward.status
        except TimeoutError:
            error: PinyonError = DeadlineExceeded(
                f"The request took longer than {limit_s:g} s, the load balancer's --request-timeout-s."
            )
        except PinyonError as raised:
            error = raised
        except Exception:
            if forward is None or forward.passing is None or not forward.passing.begun:
                raise
            _log.exception("uncaught error in an answer", extra={"request_id": head.log_id})
            error = Internal("internal error")
        if forward is None or forward.passing is None or not forward.passing.begun:
            raise error
        return await self._break_off(forward, error)

    async def _break_off(self, forward: Forward, error: PinyonError) -> int:
        """The status line has gone out: in a stream the error is an event. Anything else just ends, and as it is not
        complete, the connection does so, too."""
        passing, head, reply = forward.passing, forward.head, forward.reply
        assert passing is not None
        if passing.is_stream and passing.said_all:
            await reply.end(b"")
            return passing.status
        head.broken = error.grpc_code.lower()
        self._metrics.broken(head.broken)
        if forward.sender:
            raise error  # it is the region that the client is connected to which says so
        if passing.is_stream:
            await reply.end(stream_error(head.path, error))
        return passing.status

    async def _begin(
        self, head: Head, body: bytes | bytearray, incoming: Incoming, reply: Reply, deadline_s: float
    ) -> Forward:
        assert head.raw is not None
        if not head.raw.target.startswith(b"/v1/") or b"#" in head.raw.target:
            # An absolute one, or one that hides what it is: a server is asked for what was looked at here.
            raise HttpError(404, f"Invalid URL (POST {head.path[:SHOWN_CHARS]})")
        arguments = (head.path, head.raw.content_type, body, self._secret, self._limits.default_tokens)
        if is_large(body):
            asked = await self._off_loop.run(head.client.holder, partial(read_asked, large=True), *arguments)
        else:
            asked = read_asked(*arguments)
        served = self._models.of(asked.model or incoming.model)
        geographies = allowed_geographies(head.labels, head.client)
        if not self._models.region:
            geographies = ()  # nobody has said where this is
        fields = to_server(head.raw.fields)
        log_id = head.log_id
        fields.append(b"x-request-id: %b\r\n" % log_id.encode("ascii"))
        whose = head.labels.session or head.labels.user or asked.user
        if not whose and head.client is not PUBLIC:
            whose = head.client.tenant
        outgoing = Outgoing(head.raw.target, b"".join(fields))
        routed = Routed(asked.keys, whose)
        return Forward(
            head, log_id, asked, served, incoming.ticket, reply, outgoing, routed, geographies, deadline_s,
            incoming.sender,
        )  # fmt: skip

    async def _run(self, forward: Forward, body: bytes | bytearray) -> None:
        """Until it is answered. Raises :class:`PinyonError`."""
        head, finish = forward.head, "cancelled"
        with self._telemetry.span("lb.request", head.traceparent, request_id=forward.log_id) as span:
            if parent := span.traceparent or head.traceparent:
                line = b"traceparent: %b\r\n" % parent.encode("ascii")
                forward.outgoing = forward.outgoing._replace(fields=forward.outgoing.fields + line)
            try:
                self._placing.check_law(forward)
                now = self._placing.now(forward)
                if not forward.enter(self._models.demand(forward.served, forward.route), room=now is not None):
                    now = None
                    await forward.wait()
                while not await self._attempt(forward, body, now):
                    now = None
                    self._metrics.retries.add()
                finish = _finish(forward.status)
            except PinyonError as error:
                finish = error.grpc_code.lower()
                raise
            finally:
                passing = forward.passing
                if passing is not None:
                    forward.used = passing.used()
                forward.ticket.leave(forward.used_tokens)
                now_s = self._clock()
                if finish == "cancelled" and now_s >= forward.deadline_s:
                    finish = "deadline_exceeded"
                first_s = passing.first_s - head.arrived_s if passing is not None and passing.first_s else 0.0
                self._metrics.ended(forward.served.name, finish, first_s, now_s - head.arrived_s, forward.used)
                span.set("outcome", finish)
                head.facts = forward.facts

    def _attempts(self, forward: Forward) -> int:
        """One of a forwarded request, whose own region has more: they would multiply."""
        return 1 if forward.sender else self._limits.attempts

    async def _attempt(self, forward: Forward, body: bytes | bytearray, choice: Choice | None) -> bool:
        """Whether it is answered; if not, another attempt is worthwhile. ``choice``: where it goes, if that is known.
        Raises :class:`PinyonError`."""
        if choice is None:
            choice = await self._placing.place(forward)
        if choice is None:
            self._pass_refusal(forward)
            return True
        forward.choice = choice
        forward.tries += 1
        targets = self._targets(choice.where, forward.cluster)
        name, here = choice.target, choice.where is not Where.REMOTE
        sent = targets.sent(forward.served, name, forward.routed)
        began_s = self._clock()
        first_byte_s = self._limits.first_byte_s if forward.asked.stream else inf
        outgoing = forward.outgoing
        if not here:
            outgoing = outgoing._replace(request_id=forward.log_id, model=forward.served.name, whose=forward.whose())
        try:
            answer = await targets.exchange(name, outgoing, body, forward.deadline_s, first_byte_s)
            try:
                if here:
                    self._metrics.got_answer(name, answer.status)
                if answer.status in NO_ROOM:
                    await self._refused(forward, answer, targets)
                    return self._gives_up(forward)
                forward.status = answer.status
                forward.passing = Passing(answer, forward.reply, rate_fields(forward.ticket.levels), self._clock)
                await forward.passing.run()
            finally:
                answer.close()
            if answer.status < 500:
                targets.answered(name, began_s)
            else:
                targets.failed(name)
            return True
        except NoRoom as refusal:
            forward.error = refusal
            forward.tries -= 1
            if refusal.lasting:
                forward.exclude.add(name)
            else:
                targets.refused(forward.served.name, name, 0)  # it may go there when that says again that it has room
            return False
        except (Absent, Broke, ConnectionsFull) as error:
            if here:
                self._metrics.got_answer(name, 0)
            _log.warning("%s failed a request: %s", name, error.message, extra={"request_id": forward.log_id})
            forward.error = error
            if not isinstance(error, ConnectionsFull):
                targets.failed(name, absent=isinstance(error, Absent))
            if isinstance(error, Broke):
                forward.attempts += error.sends
            if not isinstance(error, Absent) or not here:
                forward.exclude.add(name)  # who is absent gets nothing before it is back
            begun = isinstance(error, Broke) and error.begun
            if begun or forward.attempts >= self._attempts(forward) or forward.tries >= TRIES_MAX:
                raise
            return False
        finally:
            targets.ended(name, sent)

    async def _refused(self, forward: Forward, answer: Answer, targets: Targets) -> None:
        """Keep what it says, should nobody else have room."""
        body, fields = await _refusal_text(answer), answer.fields
        if body is None:
            fields = [each for each in fields if each[0] == b"retry-after"] + [(b"content-type", JSON)]
            body = error_body(HttpError(answer.status, "The server refused the request."), answer.status)
        kind, lines = from_server(fields, own_rates=True)
        forward.refusal = Refusal(answer.status, body, kind, lines)
        name, rest_s = forward.choice.target, _retry_after_s(answer.fields)
        forward.attempts += 1
        forward.exclude.add(name)
        if answer.status == 429 or rest_s:
            targets.refused(forward.served.name, name, rest_s)
        else:
            targets.failed(name)

    def _gives_up(self, forward: Forward) -> bool:
        if forward.attempts < self._attempts(forward) and forward.tries < TRIES_MAX:
            return False
        self._pass_refusal(forward)
        return True

    def _pass_refusal(self, forward: Forward) -> None:
        refusal = forward.refusal
        assert refusal is not None
        forward.status = refusal.status
        fields = refusal.fields + rate_fields(forward.ticket.levels)
        forward.reply.whole(refusal.status, refusal.body, refusal.kind, fields)


async def _refusal_text(answer: Answer) -> bytes | None:
    """Returns the text of a refusal; ``None`` if it is too large, or did not come whole and soon."""
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(REFUSAL_S):
            while piece := await answer.read():
                pieces.append(piece)
                size += len(piece)
                if size > REFUSAL_BYTES:
                    return None
    except (Broke, TimeoutError):
        return None
    return b"".join(pieces)


def _finish(status: int) -> str:
    if status < 400:
        return "answered"
    return "refused" if status < 500 else "failed"


def _retry_after_s(fields: list[tuple[bytes, bytes]]) -> float:
    """0: it does not say, or not in seconds."""
    for name, value in fields:
        if name == b"retry-after":
            digits = value.strip()
            return float(digits) if digits.isdigit() and len(digits) < 9 else 0.0
    return 0.0
