"""The load balancer's composition root."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.more_models import parse_more_models
from pinyon.decisions import JOURNAL_TYPES, FrontConfig, FrontDecisions, journal_header
from pinyon.federation.members import LbInfo
from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.admission import Admission
from pinyon.frontdoor.app import HttpApp
from pinyon.frontdoor.auth import ApiKeys, load_api_keys
from pinyon.frontdoor.coalesced import Coalesced
from pinyon.frontdoor.cors import Cors
from pinyon.frontdoor.gzip import Inflater
from pinyon.frontdoor.https import Https
from pinyon.frontdoor.instances.clusters import Clusters
from pinyon.frontdoor.instances.completions import Completions
from pinyon.frontdoor.instances.conductor_session import ConductorSession
from pinyon.frontdoor.instances.dispatcher import Dispatcher
from pinyon.frontdoor.instances.instances import InstanceView
from pinyon.frontdoor.instances.key_chains import KeyChains
from pinyon.frontdoor.instances.metrics import LbMetrics
from pinyon.frontdoor.instances.models import Models
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.instances.readiness import Readiness
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.routes import OwnRoutes
from pinyon.frontdoor.instances.routing import Routing
from pinyon.frontdoor.instances.serving import TokenServing
from pinyon.frontdoor.instances.tokenize import Tokenization
from pinyon.frontdoor.instances.tokenizer_process import strftime_now
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.regions.arrival import Arrivals
from pinyon.frontdoor.regions.inbound import InboundParts
from pinyon.frontdoor.regions.joining import join_controller, serve_peers
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.regions.membership import Membership
from pinyon.frontdoor.regions.named import parse_delays, parse_peers
from pinyon.frontdoor.regions.peer import Peer
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.keys import read_upstream_keys
from pinyon.http.budget import Budget
from pinyon.http.server import HttpServer
from pinyon.model import ModelCard, load_card
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.rates import Rates
from pinyon.runtime.admin import add_admin, changeable_flag, changeable_policy
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.journal_file import JournalFile
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from services.lb.callers import LB_CALLERS
from services.lb.federation import load_federation
from services.lb.heartbeat import Heartbeat
from services.lb.info import lb_info
from services.lb.servers import make_servers
from services.lb.servicer import LbServicer
from services.lb.settings import LbSettings
from services.lb.shares import check_clients
from services.lb.upstream_app import UpstreamLb, build_upstream_lb

__all__ = ["Lb", "build", "run"]

_log = get_logger("lb")
CHANGES_S = 0.002
"""Instances say how they are many times a second; whoever waits for room hears of it together."""
TELL_S = 1.0
"""For those who record a trace to be told the rest of it, at least."""


@dataclass(frozen=True)
class Lb:
    """The parts of one load balancer, wired. ``start`` → ``close``."""

    view: InstanceView
    line: Line
    conductor: ConductorSession
    clusters: Clusters
    workers: WorkerSessions
    ways: ServedModels
    regions: RegionLinks
    inbound: InboundParts
    peers: list[Peer]
    membership: Membership
    about: Callable[[dict[str, str]], LbInfo]
    models: Models
    off_loop: OffLoop
    dispatcher: Dispatcher
    app: HttpApp
    http: HttpServer
    grpc: GrpcServer
    https: Https | None
    keys: ApiKeys
    journal: JournalFile | None
    readiness: Readiness
    recorder: Recorder

    async def start(self) -> dict[str, str]:
        """Bound endpoints by name."""
        self.clusters.start()
        if self.peers:
            self.regions.know(self.peers)
        try:
            endpoints = {"http": await self.http.start(), "grpc": await self.grpc.start(serving=False)}
            self.readiness.start()
            self.membership.start(self.about(endpoints | {"admin": self.grpc.admin_address or endpoints["grpc"]}))
            return endpoints | ({"admin": self.grpc.admin_address} if self.grpc.admin_address else {})
        except BaseException:
            await self.close(0)
            raise

    async def close(
        self, drain_s: float, lame_duck_s: float = 0.0, wait: Callable[[float], Awaitable[bool | None]] = asyncio.sleep
    ) -> None:
        """Say for ``lame_duck_s`` that it ends, and serve; then take nothing new, let what runs finish for ``drain_s``,
        and end it; leaves nothing. ``wait`` may end sooner and say that somebody else wants its ports."""
        self.app.draining = True
        self.membership.session.wake()  # somebody else is to serve its instances by the time it is gone
        self.http.announce()
        await self.grpc.begin_drain()
        wanted = await wait(lame_duck_s)
        ports = asyncio.ensure_future(self.grpc.drain(drain_s)) if wanted else None
        started_s = time.monotonic()
        await self.http.drain(drain_s)
        # Also when all of the time is used up: what an ended call had not sent yet would be lost.
        tell_s = TELL_S if self.recorder.recordings else 0.0
        self.recorder.close()
        self.inbound.end()
        await self.grpc.drain(max(tell_s, drain_s - (time.monotonic() - started_s)))
        if ports is not None:
            await ports
        await self.membership.close()
        await self.readiness.close()
        await self.regions.close()
        await self.workers.close()
        await self.clusters.close()
        await self.models.close()
        self.off_loop.close()
        if self.journal is not None:
            self.journal.close()


def load_cards(settings: LbSettings) -> dict[str, ModelCard]:
    """By name, the first for who names none. Raises :class:`PinyonError`."""
    first = load_card(settings.model or None, settings.served_model_name or None, strftime_now)
    cards = {first.name: first}
    for name, folder in parse_more_models(settings.more_models).items():
        if name in cards:
            raise InvalidArgument(f"two models are called {name!r}; see --served-model-name", field="more_models")
        cards[name] = load_card(folder, name, strftime_now)
    for card in cards.values():
        if not card.own_chat_template:
            _log.warning("%s has no chat template: conversations are written as plain 'role: text' lines", card.name)
    return cards


def build(
    settings: LbSettings,
    instance_id: str,
    registry: CollectorRegistry,
    telemetry: Telemetry,
    clock: Clock = time.monotonic,
    security: Security = NO_SECURITY,
) -> Lb:
    """Wire a load balancer; nothing is started. Raises :class:`PinyonError` for a bad model folder or keys file."""
    cards = load_cards(settings)
    keys = _load_keys(settings)
    federation = load_federation(settings, security)
    ways = ServedModels(federation, clock, own=cards)
    config = FrontConfig(settings.in_flight_limit, settings.queue_limit)
    journal = settings.open_journal(JOURNAL_TYPES, journal_header(config, service="lb", instance_id=instance_id), clock)
    decisions = FrontDecisions(config, journal)
    line = Line(decisions.queue, clock, ways.is_open, ways.granted)
    # While nobody waits there is nobody to hand room to: who comes later looks for it.
    ways.changed = changes = Coalesced(line.availability_changed, CHANGES_S, lambda: line.queued)
    line.on_put_back = changes.wanted_now
    ways.waiting = lambda: line.waiting_demands
    own = Peer(instance_id, settings.region, "")
    regions = RegionLinks(
        own, ways, federation.secret, settings.unread_tokens, clock, security.channels,
        parse_delays(settings.test_region_delays_ms),
    )  # fmt: skip
    workers = WorkerSessions(
        settings.unread_tokens,
        clock,
        security.channels,
        lambda *heard: clusters.load(*heard),
        lambda *lost: clusters.silent(*lost),
        delays_s=parse_delays(settings.test_instance_delays_ms),
    )

    def make_conductor(
        address: str, on_instances: Callable[[conductor_pb2.InstanceList, bool], None]
    ) -> ConductorSession:
        return ConductorSession(
            address,
            instance_id,
            on_instances,
            settings.conductor_timeout_s,
            lambda: line.in_flight,
            security.channels.sessions_to(peer_name(CONDUCTOR)),
        )

    def make_view(cluster: str) -> InstanceView:
        layer = partial(ways.layer, cluster=cluster)
        return InstanceView(layer, settings.instances_grace_s, security.secret)

    clusters = Clusters(ways, workers, settings.conductor, make_conductor, make_view, clock)
    view, conductor = clusters.home.view, clusters.home.conductor
    metrics = LbMetrics(registry, tuple(cards), line, conductor, workers, view)
    show_policy = show_policies(registry, "lb", routing=settings.routing, pushing=settings.pushing_choice)
    off_loop = OffLoop()
    chains = KeyChains()
    models = Models(
        [
            Prompts(card, view, off_loop, chains, settings.chat_max_tokens, settings.chars_per_token_max)
            for card in cards.values()
        ]
    )
    default = Rates(settings.tenant_rpm, settings.tenant_tpm)
    admission = Admission(line, decisions.rates, default, metrics, clock)
    recorder = Recorder(clock)
    dispatcher = Dispatcher(
        clusters,
        workers,
        ways,
        Routing(ways, federation.secret),
        regions,
        metrics,
        recorder,
        telemetry,
        clock,
        settings.attempts,
        settings.placement_wait_s,
        settings.place_by == "routing",
        settings.in_flight_limit,
    )
    bodies = Budget(settings.bodies_limit_mib << 20)
    access = AccessLog(settings.access_log, clock)
    app = HttpApp(
        OwnRoutes(
            Completions(admission, dispatcher, models, off_loop, metrics.broken, settings.request_timeout_s, clock),
            Tokenization(admission, models, off_loop),
            models,
        ),
        lambda: readiness.lacks(),
        lambda: readiness.missing(),
        keys,
        metrics,
        None if settings.http_reuse_port else registry,
        Inflater(off_loop, bodies, settings.body_limit_bytes),
        Cors(settings.cors_origins),
        clock,
        access,
    )
    http, server, https = make_servers(settings, app, bodies, metrics.http_connections, access, security)
    readiness = Readiness(
        models.names,
        view,
        conductor,
        security.channels,
        server.set_serving,
        lambda: app.draining,
        clock,
        ways.serves_elsewhere,
    )
    servicer = LbServicer(admission, dispatcher, models, keys, ways, settings.request_timeout_s, clock)
    server.add(
        lb_pb2_grpc.add_LbServiceServicer_to_server,
        servicer,
        lb_pb2.DESCRIPTOR.services_by_name["LbService"],
        LB_CALLERS,
        servicer.doors,
    )

    arrivals = Arrivals(own, lambda: ways.geography, line, metrics, lambda: app.draining)
    serving = TokenServing(
        arrivals,
        federation.secret,
        ways,
        models,
        dispatcher,
        access,
        Budget(settings.bodies_limit_mib << 20),
        settings.request_timeout_s,
        clock,
    )
    inbound = InboundParts(own, federation.secret, serving, lambda: app.draining)
    serve_peers(server, inbound)

    membership = Membership(instance_id, ways, line, regions, metrics, clusters)
    ways.told = join_controller(membership, settings.controller, lambda: app.draining, security, clock)
    boot_id = secrets.token_hex(8)

    def about(endpoints: dict[str, str]) -> LbInfo:
        return lb_info(settings, instance_id, boot_id, endpoints, https=https is not None)

    def use(_: object, choice: str) -> None:
        ways.use(routing=choice)
        show_policy("routing", choice)

    def push(_: object, choice: str) -> None:
        ways.use(pushing=choice)
        clusters.watch()
        show_policy("pushing", choice)

    def drain(draining: bool) -> None:
        app.draining = draining
        membership.session.wake()

    add_admin(
        server,
        [
            changeable_policy(ROUTING_POLICIES, settings.routing, use),
            changeable_policy(PUSHING_RULES, settings.pushing_choice, push),
            changeable_flag("draining", lambda: app.draining, drain),
        ],
        record=recorder.record,
    )
    return Lb(
        view,
        line,
        conductor,
        clusters,
        workers,
        ways,
        regions,
        inbound,
        parse_peers(settings.peers),
        membership,
        about,
        models,
        off_loop,
        dispatcher,
        app,
        http,
        server,
        https,
        keys,
        journal,
        readiness,
        recorder,
    )


def _load_keys(settings: LbSettings) -> ApiKeys:
    """Raises :class:`InvalidArgument`."""
    keys = load_api_keys(settings.api_keys_file)
    if settings.http_reuse_port:
        check_clients(keys.clients)
    return keys


async def run(settings: LbSettings, context: ServiceContext) -> None:
    """Serve until told to stop."""
    make = build_upstream_lb if settings.upstream else build
    lb = make(settings, context.instance_id, context.registry, context.telemetry, security=context.security)
    if lb.https is not None:
        context.files.add("HTTPS certificate", lb.https.files, lb.https.renew, lambda _: None)
    if settings.api_keys_file:
        context.files.add("API keys file", [Path(settings.api_keys_file)], partial(_load_keys, settings), lb.keys.renew)
    if (upstream_keys := settings.upstream_api_key_file) and isinstance(lb, UpstreamLb):
        context.files.add(
            "upstream API key file", [Path(upstream_keys)], partial(read_upstream_keys, upstream_keys), lb.use_keys
        )
    heartbeat = Heartbeat(settings.heartbeat_fd)
    try:
        endpoints = await lb.start()
        heartbeat.start()
        context.ready({name: settings.reachable(address) for name, address in endpoints.items()})
        try:
            await context.stopping.wait()
        finally:
            await lb.close(settings.drain_s, settings.lame_duck_s, heartbeat.alone)
    finally:
        heartbeat.close()
