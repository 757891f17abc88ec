"""Other regions as targets: their load balancers, each of which serves requests on its own servers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Any

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Absent, Broke
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.messages.request_class import class_to_proto
from pinyon.routing.layer import Layer
from pinyon.routing.target import Target


@dataclass(slots=True, eq=False)
class RegionTargets:
    """The load balancers of other regions, with the methods of a
    :class:`pinyon.frontdoor.upstreams.fleet.ServerFleet`."""

    models: ServedModels
    links: RegionLinks
    metrics: DoorMetrics[Any]
    clock: Clock

    async def exchange(self, target: str, forward: Forward, first_byte_s: float) -> Answer:
        """Sends a request as a fleet does. Raises :class:`NoRoom` as well."""
        head = peer_pb2.RawHead(
            request_id=forward.name,
            target=forward.url,
            fields=forward.fields,
            body_length=len(forward.body),
            model=forward.served.name,
            timeout_ms=max(1, round((forward.deadline_s - self.clock()) * 1e3)),
            request_class=class_to_proto(forward.whose()),
        )
        try:
            answer = self.links.talk(target).raw.open(head, forward.body)
        except Unavailable as away:
            raise Absent(away.message, retry_after_s=away.retry_after_s) from None
        self.models.under_way(forward.served.name, target)
        self.metrics.forwarded.add((self.links.region_of(target),))
        try:
            async with asyncio.timeout(first_byte_s if first_byte_s < inf else None):
                await answer.head()
        except BaseException as error:
            answer.close()
            if isinstance(error, TimeoutError):
                raise Broke("The other region did not answer in time.", begun=False) from None
            raise
        return answer

    def sent(self, target: str, forward: Forward) -> Target | None:
        return forward.served.layers.remote.sent(forward.route.routed, target)

    def ended(self, target: str, sent: Target | None) -> None:
        Layer.ended(sent)
        self.models.tell()

    def answered(self, target: str, began_s: float) -> None:
        """Records that the region serves a request sent at ``began_s``; its own reports give its state."""
        self.models.accepted(target, began_s)

    def failed(self, target: str, *, absent: bool = False) -> None:
        """Does nothing: the other load balancer watches its own servers, and a session's end is noticed."""

    def refused(self, model: str, target: str, rest_s: float) -> None:
        """Marks the region as full, until it reports room again and is believed again."""
        self.models.refused(model, target)
