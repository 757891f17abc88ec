"""The membership of this load balancer in the federation: reports to the controller, and reactions to its answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pinyon.api.controller.v1 import controller_pb2
from pinyon.federation.view import Federation, LbInfo, LbState
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.controller_session import ControllerSession
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.served_models import ServedModels
from pinyon.messages.federation import INSTANCES_MAX, REGIONS_MAX
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

LOOK_S = 1.0

_log = get_logger("lb.regions")


@dataclass(slots=True, eq=False)
class RegionMembership:
    """The membership: ``start`` with its addresses → ``close``. ``session`` is the one with the controller."""

    models: ServedModels
    line: Line
    links: RegionLinks
    metrics: DoorMetrics[Any]
    clusters: Adopted[Any]
    session: ControllerSession = field(init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self, info: LbInfo) -> None:
        self.session.start(info)
        self._task = asyncio.create_task(self._watch(), name="adoptions")

    async def close(self) -> None:
        await ended(self._task)
        await self.session.close()

    # -- what the controller says

    def told(self, federation: Federation) -> None:
        """Takes a changed federation."""
        self.links.know(
            [
                PeerBalancer(each.info.lb_id, each.info.region, each.info.grpc_address)
                for each in federation.peers_of(self.links.own.name)
                if each.state is not LbState.LEFT
            ]
        )
        self.clusters.own(federation.owned_by(self.links.own.name))
        self._adopt()

    def _adopt(self) -> None:
        reachable = [link.peer.name for link in self.links.links if link.connected]
        adopted = self.session.adopted(reachable)
        self.clusters.adopt({f"{each.region}/{each.name}": each for each in adopted})

    async def _watch(self) -> None:
        """Checks regularly what is served for others, as it changes by itself while the controller is silent."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._adopt()
            except Exception:
                _log.exception("what is served for others cannot be found out")

    # -- what the controller is told

    def load(self) -> controller_pb2.LoadBalancerLoad:
        """Returns the load report, without instances and regions beyond its limits."""
        hits, asked = self.models.hits()
        instances = [
            controller_pb2.InstanceLoad(
                name=target.name,
                pending=max(0, target.report.pending),
                running=max(0, target.report.running),
                outstanding=target.outstanding,
                available=available,
            )
            for target, available in self.models.instances()
        ]
        forwarded, accepted = self.metrics.forwarded.by_label(), self.metrics.accepted.by_label()
        return controller_pb2.LoadBalancerLoad(
            queue=self.line.queued,
            in_flight=self.line.in_flight,
            available_instances=sum(each.available for each in instances),
            instances=len(instances),
            forwarded_total=sum(forwarded.values()),
            accepted_total=sum(accepted.values()),
            hit_chunks_total=hits,
            asked_chunks_total=asked,
            forwarded_by_region=dict(islice(forwarded.items(), REGIONS_MAX)),
            accepted_by_region=dict(islice(accepted.items(), REGIONS_MAX)),
            per_instance=instances[:INSTANCES_MAX],
        )

    def latencies_ms(self) -> dict[str, float]:
        """Returns the measured round-trip times to other load balancers."""
        return {link.peer.name: link.distance_s * 1e3 for link in self.links.links if link.distance_s}
