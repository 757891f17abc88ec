"""The membership of this load balancer in the federation: a stream to the regional controller, for reports of its
identity and load, and for news of the federation.

No request waits for the controller. While it is away, the load balancer goes on with the last federation. For how long
it keeps adopted clusters then, :meth:`pinyon.federation.view.Federation.adopted_now` says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.federation.registry import LATENCIES_MAX
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.readiness import Readiness
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.served_models import ServedModels
from pinyon.messages.federation import (
    INSTANCES_MAX,
    REGIONS_MAX,
    federation_from_proto,
    federation_to_proto,
    lb_info_to_proto,
)
from pinyon.runtime.channel import OpenSession
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

LOOK_S = 1.0
PERIOD_S = 1.0
GAP_S = 0.05
"""The minimum time between two reports; changes in between travel together."""
LEASE_S = 5.0
"""The lease until the controller names another one."""
LATENCY_CHANGE = 0.1
"""A round trip is reported again when it differs by this share from the reported value."""

Request = controller_pb2.SessionRequest
Response = controller_pb2.SessionResponse
METHOD = Method("/pinyon.api.controller.v1.ControllerService/Session", Request, Response)

_log = get_logger("lb.controller")


@dataclass(eq=False)
class RegionMembership:
    """The membership: ``start`` with its addresses → (``wake`` at a change) → ``close``. Without the controller's
    ``address`` it does nothing."""

    address: str
    models: ServedModels
    line: Line
    links: RegionLinks
    metrics: DoorMetrics[Any]
    clusters: Adopted[Any]
    readiness: Readiness
    connect: OpenSession
    clock: Clock
    period_s: float = PERIOD_S
    federation: Federation | None = field(default=None, init=False)
    """The last federation that the controller sent; None before the first."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stream: Dialed[Request, Response] | None = field(default=None, init=False)
    _told_ms: dict[str, float] = field(default_factory=dict, init=False)
    """The round trips that were reported in this session."""
    _lease_s: float = field(default=LEASE_S, init=False)
    _heard_s: float = field(default=-math.inf, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._link = Redialer("controller", self.address, METHOD, self._converse, connect=self.connect, log=_log)

    @property
    def connected(self) -> bool:
        """True once a controller has answered on the present stream."""
        return self._stream is not None

    def start(self, info: LbInfo) -> None:
        """Starts the session, once the load balancer's addresses are known."""
        self._info = info
        if self.address:
            self._link.start()
            self._task = asyncio.create_task(self._watch(), name="adoptions")

    def wake(self) -> None:
        """Reports a change soon."""
        self._wake.set()

    async def close(self, farewell_s: float = 1.0) -> None:
        """Reports that the load balancer leaves, if a controller listens, and ends the session."""
        await ended(self._task)
        self._wake.set()
        await self._link.close(farewell_s if self.connected else 0.0)

    # -- what the controller says

    def told(self, federation: Federation) -> None:
        """Takes a changed federation."""
        self.links.know(
            [
                PeerBalancer(each.info.lb_id, each.info.region, each.info.grpc_address)
                for each in federation.members
                if each.state is not LbState.LEFT
            ]
        )
        self.clusters.own(federation.owned_by(self.links.own.name))
        self._adopt()

    def adopted(self, reachable: Collection[str] = ()) -> tuple[Cluster, ...]:
        """Returns the clusters served for others now; ``reachable`` are the ids of load balancers with open streams.

        The answer changes when the controller is silent for longer than its lease: ask when a peer comes or goes."""
        if self.federation is None:
            return ()
        silent_s = self.clock() - self._heard_s
        return self.federation.adopted_now(self.links.own.name, silent_s, self._lease_s, reachable)

    def _adopt(self) -> None:
        adopted = self.adopted([link.peer.name for link in self.links.links if link.connected])
        self.clusters.adopt({f"{each.region}/{each.name}": each for each in adopted})

    async def _watch(self) -> None:
        """Checks regularly what is served for others, as it changes by itself while the controller is silent."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._adopt()
            except Exception:
                _log.exception("what is served for others cannot be found out")

    async def _converse(self, stream: Dialed[Request, Response]) -> None:
        self._told_ms.clear()
        try:
            await stream.run(lambda message: self._take(stream, message), self._reports())
        finally:
            self._stream = None

    def _take(self, stream: Dialed[Request, Response], message: Response) -> None:
        if self._stream is None:
            self._stream = stream
            _log.info("registered with the controller at %s", self.address)
        self._heard_s = self.clock()
        if message.lease_ms:
            self._lease_s = message.lease_ms / 1e3
        if not message.HasField("federation"):
            return
        try:
            federation = federation_from_proto(message.federation)
        except PinyonError as error:
            _log.warning("cannot take what the controller says: %s", error.message)
            return
        if not federation.follows(self.federation):
            return  # no newer version of the same epoch
        self.federation = federation
        try:
            self.told(federation)
        except Exception:  # the stream must survive a defect of ours
            _log.exception("cannot take the controller's federation")

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

    async def _reports(self) -> AsyncGenerator[Request, None]:
        """Yields all reports of one stream, the farewell last."""
        first = self._report()
        first.registration.CopyFrom(lb_info_to_proto(self._info))
        if self.federation is not None:
            first.known.CopyFrom(federation_to_proto(self.federation))
        yield first
        leaving = False
        while not leaving:
            if not self._link.closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.period_s):
                        await self._wake.wait()
            self._wake.clear()
            report = self._report()
            report.leaving = leaving = self._link.closing
            yield report
            if not leaving:
                await asyncio.sleep(GAP_S)

    def _report(self) -> Request:
        latencies_ms = dict(islice(self.latencies_ms().items(), LATENCIES_MAX))
        told_ms = {lb_id: self._told_ms[lb_id] for lb_id in latencies_ms if lb_id in self._told_ms}
        news = {
            lb_id: now_ms
            for lb_id, now_ms in latencies_ms.items()
            if lb_id not in told_ms or abs(now_ms - told_ms[lb_id]) > LATENCY_CHANGE * told_ms[lb_id]
        }
        self._told_ms = told_ms | news
        return Request(load=self.load(), latencies_ms=news, draining=self.readiness.draining)
