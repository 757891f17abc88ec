"""OpenAI servers, and other regions that have such servers, as targets: whole HTTP exchanges, retried while no byte of
an answer has come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from math import inf
from typing import Any, ClassVar, Final, Protocol

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError, ResourceExhausted
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import REGION_FIELD, Absent, Broke, ConnectionsFull, NoRoom, Refused
from pinyon.frontdoor.request_loop import TRIES_MAX, LoopLimits
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.clusters import UpstreamClusters
from pinyon.frontdoor.upstreams.fields import from_server
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.frontdoor.upstreams.metrics import UpstreamMetrics
from pinyon.frontdoor.upstreams.passing import Passing
from pinyon.frontdoor.upstreams.regions import RegionTargets
from pinyon.http.answer import JSON, HttpError
from pinyon.openai.format import error_body
from pinyon.routing.two_layers import RoutingChoice, Where
from pinyon.runtime.logging import get_logger

NO_ROOM: Final = frozenset((429, 502, 503))
"""The statuses for which another server may have room."""
REFUSED: Final = "The server refused the request."
REFUSAL_BYTES: Final = 64 << 10
REFUSAL_S: Final = 1.0
"""The limits of a refusal's text. Beyond them, only the status and the retry time are passed on."""

_log = get_logger("lb.upstreams")


class Targets(Protocol):
    """The targets that an attempt may go to: the servers of one cluster, or other regions. For what the methods do, see
    :class:`pinyon.frontdoor.upstreams.fleet.ServerFleet`."""

    def sent(self, target: str, forward: Forward) -> Any: ...

    def exchange(self, target: str, forward: Forward, first_byte_s: float) -> Awaitable[Answer]: ...

    def answered(self, target: str, began_s: float) -> None: ...

    def failed(self, target: str, *, absent: bool = False) -> None: ...

    def refused(self, model: str, target: str, rest_s: float) -> None: ...

    def ended(self, target: str, sent: Any) -> None: ...


class ExchangeKind:
    """The part that kinds of target have in common whose attempts are HTTP exchanges. A stream must begin within
    ``first_byte_s``."""

    elsewhere: ClassVar[frozenset[int]] = NO_ROOM
    """The statuses after which another server is asked."""

    def __init__(self, models: ServedModels, limits: LoopLimits, first_byte_s: float, clock: Clock) -> None:
        self.models, self.limits, self.first_byte_s, self.clock = models, limits, first_byte_s, clock

    def targets(self, forward: Forward) -> Targets:
        """Returns the targets among which the present attempt's was chosen."""
        raise NotImplementedError

    def got_answer(self, forward: Forward, status: int) -> None:
        """Counts the answer of an attempt; the status is 0 if none came."""

    def passing(self, forward: Forward, answer: Answer) -> Passing:
        return Passing(answer, forward.reply, forward.ticket.rate_fields, self.clock)

    async def attempt(self, forward: Forward) -> None:
        forward.tries += 1
        forward.error = None
        name, targets = forward.choice.target, self.targets(forward)
        sent = targets.sent(name, forward)
        began_s = self.clock()
        first_byte_s = self.first_byte_s if forward.asked.stream else inf
        try:
            answer = await targets.exchange(name, forward, first_byte_s)
            try:
                self.got_answer(forward, answer.status)
                if answer.status in self.elsewhere:
                    await self._refused(forward, answer, targets)
                    return
                forward.passing = self.passing(forward, answer)
                await forward.passing.run()
                forward.status = answer.status
            finally:
                answer.close()
            if answer.status < 500:
                targets.answered(name, began_s)
            else:
                targets.failed(name)
        except NoRoom as no_room:
            forward.error = no_room
            if no_room.lasting:
                forward.exclude.add(name)
            else:
                targets.refused(forward.served.name, name, 0)  # it gets requests again when it reports room
        except (Absent, Broke, ConnectionsFull) as failure:
            self._failed(forward, failure, targets)
        finally:
            targets.ended(name, sent)

    def _failed(self, forward: Forward, error: Absent | Broke | ConnectionsFull, targets: Targets) -> None:
        name = forward.choice.target
        self.got_answer(forward, 0)
        _log.warning("%s failed a request: %s", name, error.message, extra={"request_id": forward.name})
        forward.error = error
        if not isinstance(error, ConnectionsFull) and getattr(error, "its_fault", True):
            targets.failed(name, absent=isinstance(error, Absent))
        if isinstance(error, Broke):
            forward.paid += error.sends
            forward.final = error.begun
        if not isinstance(error, Absent) or not forward.here:
            forward.exclude.add(name)  # absent targets here get nothing until they are back anyway

    async def _refused(self, forward: Forward, answer: Answer, targets: Targets) -> None:
        """Stores the refusal, in case no other target has room."""
        fields = answer.fields
        try:
            async with asyncio.timeout(REFUSAL_S):
                body = await answer.whole(REFUSAL_BYTES)
        except (Broke, TimeoutError):
            body = None
        if body is None:  # the body is too large, incomplete or late
            fields = [each for each in fields if each[0] == b"retry-after"] + [(b"content-type", JSON)]
            body = error_body(HttpError(answer.status, REFUSED), answer.status)
        kind, lines = from_server(fields, own_rates=True)
        forward.error = forward.full = Refused(REFUSED, answer.status, body, kind, lines)
        forward.paid += 1
        name, rest_s = forward.choice.target, _retry_after_s(answer.fields)
        forward.exclude.add(name)
        if answer.status == 429 or rest_s:
            targets.refused(forward.served.name, name, rest_s)
        elif answer.status != 500:  # which the request may be to blame for
            targets.failed(name)

    def retries(self, forward: Forward) -> PinyonError | None:
        if isinstance(forward.error, NoRoom) and forward.tries < TRIES_MAX:
            return None
        # A forwarded request has one costly attempt here, as its own region retries it: attempts would multiply.
        most = 1 if forward.sender else self.limits.attempts
        return forward.error if forward.final or forward.paid >= most or forward.tries >= TRIES_MAX else None

    def gives_up(self, forward: Forward) -> bool:
        """Returns True for a request of another region, which retries it, and if all live servers have failed it."""
        return bool(forward.sender) or (bool(forward.exclude) and not forward.served.others(forward.exclude))

    def nobody(self, forward: Forward, error: PinyonError) -> PinyonError:
        if forward.sender and forward.error is None:
            return ResourceExhausted(forward.served.nobody().message, field=REGION_FIELD)
        return error

    async def wait_change(self, forward: Forward, timeout_s: float) -> None:
        """Keeps all exclusions: a server that failed the request is not asked twice, even if it is back."""
        await self.models.wait_news(timeout_s)


class UpstreamKind(ExchangeKind):
    """The :class:`pinyon.frontdoor.request_loop.TargetKind` of requests for other people's servers."""

    def __init__(
        self,
        models: ServedModels,
        clusters: UpstreamClusters,
        regions: RegionTargets,
        metrics: UpstreamMetrics,
        limits: LoopLimits,
        first_byte_s: float,
        clock: Clock,
    ) -> None:
        super().__init__(models, limits, first_byte_s, clock)
        self.clusters, self.regions, self.metrics = clusters, regions, metrics

    async def place(self, forward: Forward, choice: RoutingChoice) -> PinyonError | None:
        forward.cluster = ""
        if choice.where is Where.ADOPTED:
            forward.cluster = choice.target
            layer = forward.served.layers.adopted[choice.target][1]
            target = layer.choose(forward.route.routed, self.clock(), exclude=forward.exclude)
            choice = RoutingChoice(Where.WAIT) if target is None else RoutingChoice(Where.ADOPTED, target.name)
        if choice.where is Where.WAIT:
            return forward.error or forward.served.nobody()
        forward.choice = choice
        return None

    def queues(self, forward: Forward) -> bool:
        return True

    def targets(self, forward: Forward) -> Targets:
        return self.clusters.targets(forward.cluster) if forward.here else self.regions

    def got_answer(self, forward: Forward, status: int) -> None:
        if forward.here:
            self.metrics.got_answer(forward.choice.target, status)


def _retry_after_s(fields: list[tuple[bytes, bytes]]) -> float:
    """Returns the pause that a server asks for; 0 if it names none, or not in seconds."""
    digits = next((value for name, value in fields if name == b"retry-after"), b"").strip()
    return float(digits) if digits.isdigit() and len(digits) < 9 else 0.0
