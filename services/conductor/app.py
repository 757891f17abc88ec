"""The conductor's composition root."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.clock import Clock
from pinyon.placement.cost_priors import parse_priors
from pinyon.placement.decision_log import DecisionLog
from pinyon.placement.fleet import Fleet
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.planned_fetches import PlannedFetches
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.scaling import ScalingSettings, parse_sizes
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.admin import add_admin, changeable_policy
from pinyon.runtime.big_memory import prefer_huge_pages
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.tasks import ended
from pinyon.runtime.telemetry import Telemetry
from services.conductor.intake import ReportIntake
from services.conductor.listing import Listing
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer
from services.conductor.servicer import CONDUCTOR_CALLERS, ConductorServicer
from services.conductor.settings import ConductorSettings
from services.conductor.sizing import Sizing

# Each request is answered in the event loop turn in which it arrives, so that a drain waits only for endless streams.
DRAIN_S = 0.25
FETCHES_EACH = 4
"""The planned fetches per placement, on average, for which the record has room until they are reported."""

_log = get_logger("conductor")


@dataclass(frozen=True)
class Conductor:
    """The parts of one conductor, connected to each other."""

    fleet: Fleet
    membership: Membership
    servicer: ConductorServicer
    server: GrpcServer
    clock: Clock
    planned: PlannedFetches
    sizing: Sizing | None = None

    def sweep(self) -> bool:
        """Removes instances without recent reports and placements that are too old, and updates the sizing.

        Returns whether the block index has more to clear away, so that the next sweep should follow soon."""
        self.membership.expire()
        self.fleet.inflight.expire(self.clock())
        self.planned.expire(self.clock())
        if self.sizing is not None:
            self.sizing.look()
        return self.fleet.index.collect()


def build(
    settings: ConductorSettings,
    registry: CollectorRegistry,
    telemetry: Telemetry,
    clock: Clock = time.monotonic,
    security: Security = NO_SECURITY,
) -> Conductor:
    """Returns a conductor whose server is not started yet."""
    inflight = InFlightTable(
        settings.inflight_max, settings.inflight_unclaimed_s, settings.inflight_prefill_s, settings.inflight_decode_s
    )
    priors = parse_priors(settings.profile)
    fleet = Fleet(
        BlockIndex(settings.index_keys_max, advise=prefer_huge_pages),
        inflight,
        settings.instances_max,
        priors=priors,
        stride_tokens=settings.index_stride_tokens,
    )
    membership = Membership(fleet, clock, settings.lease_ms / 1e3, settings.settle_ms / 1e3)
    metrics = ConductorMetrics(registry, fleet, membership)
    show_policy = show_policies(registry, "conductor", placement=settings.placement)
    scheduler = Scheduler(fleet, PLACEMENT_POLICIES.make(settings.placement))
    ttft_slo_s = settings.ttft_slo_ms / 1e3
    sizing = None
    if (sizes := parse_sizes(settings.sizes)) is not None:
        scaling = ScalingSettings(*sizes, slo_s=ttft_slo_s) if ttft_slo_s else ScalingSettings(*sizes)
        sizing = Sizing(fleet, scaling, metrics.instances_wanted, clock)
    log = None
    if settings.explain_max:
        log = DecisionLog(settings.explain_max, settings.explain_mib << 20, 1 + secrets.randbits(62))
    planned = PlannedFetches(FETCHES_EACH * settings.inflight_max, settings.inflight_prefill_s)
    placer = Placer(
        *(scheduler, inflight, metrics, telemetry, clock),
        ttft_slo_s=ttft_slo_s,
        tbt_slo_s=settings.tbt_slo_ms / 1e3,
        sizing=sizing,
        log=log,
        planned=planned,
    )
    intake = ReportIntake(fleet, membership, metrics, clock, planned, security.secret, log)
    listing = Listing(fleet, membership, clock, asyncio.sleep)
    servicer = ConductorServicer(
        fleet, membership, listing, intake, placer, log, clock, metrics, settings.lb_sessions_max
    )
    server = GrpcServer(settings.listen, security.tls, sessions=True)
    server.add(servicer, conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"], CONDUCTOR_CALLERS)

    def use(policy: PlacementPolicy, choice: str) -> None:
        scheduler.use(policy)
        show_policy("placement", choice)

    add_admin(server, [changeable_policy(PLACEMENT_POLICIES, settings.placement, use)])
    return Conductor(fleet, membership, servicer, server, clock, planned, sizing)


async def _sweep_forever(conductor: Conductor, period_s: float) -> None:
    more = False
    while True:
        pause_s = 0.0 if more else period_s
        before_s = conductor.clock()
        await asyncio.sleep(pause_s)
        late_s = conductor.clock() - before_s - pause_s
        try:
            if late_s > period_s:
                conductor.membership.stood_still(late_s)
            more = conductor.sweep()
        except Exception:
            more = False
            _log.exception("sweep failed")


async def run(settings: ConductorSettings, context: ServiceContext) -> None:
    """Serves until the context says that the process stops."""
    conductor = build(settings, context.registry, context.telemetry, security=context.security)
    address = await conductor.server.start()
    sweeper = asyncio.create_task(_sweep_forever(conductor, settings.lease_ms / 4e3))
    context.ready({"grpc": settings.reachable(address)})
    try:
        await context.stopping.wait()
    finally:
        await ended(sweeper)
        await conductor.server.drain(min(settings.drain_s, DRAIN_S))
