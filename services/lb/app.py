"""The load balancer's composition root."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.decisions import JOURNAL_TYPES, FrontConfig, FrontDecisions, journal_header
from pinyon.model import load_card
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.rates import Rates
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.journal_file import JournalFile
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.admission import Admission
from services.lb.auth import load_api_keys
from services.lb.conductor_session import ConductorSession
from services.lb.dispatcher import Dispatcher
from services.lb.http_app import HttpApp, HttpLimits
from services.lb.http_completions import Completions
from services.lb.http_server import HttpServer
from services.lb.instances import InstanceView
from services.lb.line import Line
from services.lb.metrics import LbMetrics
from services.lb.prompts import Prompts
from services.lb.servicer import LbServicer
from services.lb.settings import LbSettings
from services.lb.worker_sessions import WorkerSessions

__all__ = ["Lb", "build", "run"]


@dataclass(frozen=True)
class Lb:
    """The parts of one load balancer, wired. ``start`` → ``close``."""

    view: InstanceView
    line: Line
    conductor: ConductorSession
    workers: WorkerSessions
    prompts: Prompts
    dispatcher: Dispatcher
    app: HttpApp
    http: HttpServer
    grpc: GrpcServer
    journal: JournalFile | None

    async def start(self) -> dict[str, str]:
        """Bound endpoints by name."""
        self.conductor.start()
        try:
            return {"http": await self.http.start(), "grpc": await self.grpc.start()}
        except BaseException:
            await self.close(0)
            raise

    async def close(self, drain_s: float) -> None:
        """Take nothing new, let what runs finish for ``drain_s``, then end it; leaves nothing."""
        self.app.draining = True
        await self.grpc.begin_drain()
        started_s = time.monotonic()
        await self.http.drain(drain_s)
        await self.grpc.drain(max(0.0, drain_s - (time.monotonic() - started_s)))
        await self.workers.close()
        await self.conductor.close()
        self.prompts.close()
        if self.journal is not None:
            self.journal.close()


def build(
    settings: LbSettings,
    instance_id: str,
    registry: CollectorRegistry,
    telemetry: Telemetry,
    clock: Clock = time.monotonic,
) -> Lb:
    """Wire a load balancer; nothing is started. Raises :class:`PinyonError` for a bad model folder or keys file."""
    card = load_card(settings.model or None, settings.served_model_name or None)
    keys = load_api_keys(settings.api_keys_file)
    view = InstanceView(ROUTING_POLICIES.make(settings.routing), settings.instances_grace_s)
    workers = WorkerSessions(settings.unread_tokens, clock)

    def on_instances(message: conductor_pb2.InstanceList, first: bool) -> None:
        view.update(message, clock(), first)
        workers.keep_only(view.addresses, view.renewed, view.restarted)

    config = FrontConfig(settings.in_flight_limit, settings.queue_limit)
    journal = settings.open_journal(JOURNAL_TYPES, journal_header(config, service="lb", instance_id=instance_id), clock)
    decisions = FrontDecisions(config, journal)
    line = Line(decisions.queue, clock)
    conductor = ConductorSession(
        settings.conductor, instance_id, on_instances, settings.conductor_timeout_s, lambda: line.in_flight
    )
    metrics = LbMetrics(registry, line, conductor, workers, view)
    show_policies(registry, "lb", routing=settings.routing)
    prompts = Prompts(card, view, settings.chat_max_tokens, settings.chars_per_token_max)
    default = Rates(settings.tenant_rpm, settings.tenant_tpm)
    admission = Admission(line, decisions.rates, default, metrics, clock)
    dispatcher = Dispatcher(
        conductor,
        workers,
        view,
        metrics,
        telemetry,
        clock,
        settings.attempts,
        settings.placement_wait_s,
    )
    app = HttpApp(
        Completions(admission, dispatcher, prompts, settings.request_timeout_s, clock),
        prompts,
        lambda: view.servable(card.name, clock()),
        keys,
        metrics,
        registry,
        HttpLimits(settings.body_limit_bytes, settings.head_limit_bytes),
    )
    http = HttpServer(
        app,
        settings.http_listen,
        connections=metrics.http_connections,
        connections_limit=settings.connections_limit,
        keep_alive_s=settings.keep_alive_s,
        request_timeout_s=settings.body_timeout_s,
        write_stall_s=settings.write_stall_s,
    )
    server = GrpcServer(settings.listen)
    server.add(
        lb_pb2_grpc.add_LbServiceServicer_to_server,
        LbServicer(admission, dispatcher, prompts, keys, settings.request_timeout_s, clock),
        lb_pb2.DESCRIPTOR.services_by_name["LbService"],
    )
    return Lb(view, line, conductor, workers, prompts, dispatcher, app, http, server, journal)


async def run(settings: LbSettings, context: ServiceContext) -> None:
    """Serve until told to stop."""
    lb = build(settings, context.instance_id, context.registry, context.telemetry)
    endpoints = await lb.start()
    context.ready({name: settings.reachable(address) for name, address in endpoints.items()})
    try:
        await context.stopping.wait()
    finally:
        await lb.close(settings.drain_s)
