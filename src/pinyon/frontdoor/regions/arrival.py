"""What is looked at of each request from another region before it is served here, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import FailedPrecondition, ResourceExhausted
from pinyon.frontdoor.admission import ForwardedPlace
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.regions.peer import Peer
from pinyon.routing.geography import Geography
from pinyon.routing.two_layers import Room


@dataclass(slots=True, eq=False)
class Arrivals:
    """Of one load balancer."""

    own: Peer
    geography: Callable[[], Geography]
    """Who may send to whom, as this region has it."""
    line: Line
    metrics: DoorMetrics
    draining: Callable[[], bool]

    def admit(self, sender: Peer, hops: int, geographies: Collection[str], tenant: str) -> ForwardedPlace:
        """A place in the line. Raises :class:`ResourceExhausted`: with :data:`REGION_FIELD` there is no room now, with
        :data:`REJECTED_FIELD` it may not be served here; and :class:`FailedPrecondition` for a second hop."""
        if hops != 1:
            raise FailedPrecondition(f"it has come through {hops} regions, only one is allowed")
        # What the sender must not send, or this region must not serve, is refused here again.
        verdict = self.geography().may(sender.region, self.own.region, geographies, tenant)
        if not verdict.allowed:
            raise ResourceExhausted(f"Not served in {self.own.region}: {verdict.reason}.", field=REJECTED_FIELD)
        if self.draining():
            raise ResourceExhausted("the region's load balancer is about to end", field=REGION_FIELD)
        try:
            place = ForwardedPlace(self.line, tenant)
        except ResourceExhausted as full:
            raise ResourceExhausted(full.message, field=REGION_FIELD, retry_after_s=full.retry_after_s) from None
        self.metrics.accepted(sender.region)
        return place

    def state(self, model: str, room: Room) -> peer_pb2.ModelState:
        """What others are told of it."""
        # While there is room here, nobody waits for it: those who do must not be served here.
        queued = 0 if room.share or room.share is None else self.line.queued
        return peer_pb2.ModelState(
            model=model,
            instances=room.targets,
            available_instances=room.available,
            queued=queued,
            running=room.running,
            credits=room.share,
        )
