"""OpenAI servers, and other regions that have such servers, as targets: whole HTTP exchanges, retried while no byte of
an answer has come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Final

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError, ResourceExhausted
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import REGION_FIELD, Absent, Broke, ConnectionsFull, NoRoom, Refused
from pinyon.frontdoor.request_loop import TRIES_MAX, LoopLimits
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.clusters import UpstreamClusters
from pinyon.frontdoor.upstreams.fields import from_server
from pinyon.frontdoor.upstreams.fleet import ServerFleet
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


@dataclass(slots=True, eq=False)
class UpstreamKind:
    """The :class:`pinyon.frontdoor.request_loop.TargetKind` of requests for other people's servers."""

    models: ServedModels
    clusters: UpstreamClusters
    regions: RegionTargets
    metrics: UpstreamMetrics
    limits: LoopLimits
    first_byte_s: float
    """The time within which a stream must begin."""
    clock: Clock

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

    async def attempt(self, forward: Forward) -> None:
        forward.tries += 1
        forward.error = None
        name, here = forward.choice.target, forward.here
        targets: ServerFleet | RegionTargets = self.clusters.targets(forward.cluster) if here else self.regions
        sent = targets.sent(name, forward)
        began_s = self.clock()
        first_byte_s = self.first_byte_s if forward.asked.stream else inf
        try:
            answer = await targets.exchange(name, forward, first_byte_s)
            try:
                if here:
                    self.metrics.got_answer(name, answer.status)
                if answer.status in NO_ROOM:
                    await self._refused(forward, answer, targets)
                    return
                forward.passing = Passing(answer, forward.reply, forward.ticket.rate_fields, self.clock)
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

    def _failed(
        self, forward: Forward, error: Absent | Broke | ConnectionsFull, targets: ServerFleet | RegionTargets
    ) -> None:
        name = forward.choice.target
        if forward.here:
            self.metrics.got_answer(name, 0)
        _log.warning("%s failed a request: %s", name, error.message, extra={"request_id": forward.name})
        forward.error = error
        if not isinstance(error, ConnectionsFull):
            targets.failed(name, absent=isinstance(error, Absent))
        if isinstance(error, Broke):
            forward.paid += error.sends
            forward.final = error.begun
        if not isinstance(error, Absent) or not forward.here:
            forward.exclude.add(name)  # absent targets here get nothing until they are back anyway

    async def _refused(self, forward: Forward, answer: Answer, targets: ServerFleet | RegionTargets) -> None:
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
        else:
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


def _retry_after_s(fields: list[tuple[bytes, bytes]]) -> float:
    """Returns the pause that a server asks for; 0 if it names none, or not in seconds."""
    digits = next((value for name, value in fields if name == b"retry-after"), b"").strip()
    return float(digits) if digits.isdigit() and len(digits) < 9 else 0.0
