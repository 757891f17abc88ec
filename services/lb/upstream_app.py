"""The composition root of a load balancer in front of other people's servers."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
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
from pinyon.frontdoor.upstreams.clusters import UpstreamClusters
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.exchange import Targets
from pinyon.frontdoor.upstreams.fleet import Fleet
from pinyon.frontdoor.upstreams.forwarding import Forwarding, ForwardingLimits
from pinyon.frontdoor.upstreams.keys import UpstreamKeys, read_upstream_keys
from pinyon.frontdoor.upstreams.metrics import UpstreamMetrics
from pinyon.frontdoor.upstreams.readiness import UpstreamReadiness
from pinyon.frontdoor.upstreams.regions import RegionTargets
from pinyon.frontdoor.upstreams.routes import UpstreamRoutes
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.serving import RawServing
from pinyon.frontdoor.upstreams.watch import WatchTimes
from pinyon.http.budget import Budget
from pinyon.http.server import HttpServer
from pinyon.http.url import UpstreamUrl, parse_upstreams
from pinyon.messages.federation import UPSTREAMS_MAX, check_url
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.rates import Rates
from pinyon.routing.two_layers import Where
from pinyon.runtime.admin import add_admin, changeable_flag, changeable_policy
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.journal_file import JournalFile
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.telemetry import Telemetry
from services.lb.federation import load_federation
from services.lb.info import lb_info
from services.lb.servers import make_servers
from services.lb.settings import LbSettings

__all__ = ["UpstreamLb", "build_upstream_lb"]

_log = get_logger("lb.upstreams")

CHANGES_S = 0.002
"""Those who wait are looked at once for so many reports."""


@dataclass(frozen=True)
class UpstreamLb:
    """The parts, wired. ``start`` → ``close``."""

    fleet: Fleet
    clusters: UpstreamClusters
    servers: _Servers
    line: Line
    models: ServedModels
    regions: RegionLinks
    inbound: InboundParts
    peers: list[Peer]
    membership: Membership
    about: Callable[[dict[str, str]], LbInfo]
    off_loop: OffLoop
    app: HttpApp
    http: HttpServer
    grpc: GrpcServer
    https: Https | None
    keys: ApiKeys
    journal: JournalFile | None
    changes: Coalesced
    readiness: UpstreamReadiness

    async def start(self) -> dict[str, str]:
        """Bound endpoints by name."""
        if self.peers:
            self.regions.know(self.peers)
        try:
            endpoints = {"http": await self.http.start(), "grpc": await self.grpc.start(serving=False)}
            self.clusters.start()
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
        self.http.announce()
        await self.grpc.begin_drain()
        wanted = await wait(lame_duck_s)
        ports = asyncio.ensure_future(self.grpc.drain(drain_s)) if wanted else None
        started_s = time.monotonic()
        await self.http.drain(drain_s)
        self.inbound.end()
        await self.grpc.drain(max(0.0, drain_s - (time.monotonic() - started_s)) if self.inbound.requests else 0)
        if ports is not None:
            await ports
        await self.membership.close()
        await self.regions.close()
        await self.readiness.close()
        await self.clusters.close()
        self.models.close()
        self.changes.close()
        self.off_loop.close()
        if self.journal is not None:
            self.journal.close()

    def use_keys(self, keys: UpstreamKeys) -> None:
        """From now on servers are shown these."""
        self.servers.use_keys(keys)
        for _, server in self.clusters.servers():
            server.use_key(self.servers.key_of(server.name))


def build_upstream_lb(
    settings: LbSettings,
    instance_id: str,
    registry: CollectorRegistry,
    telemetry: Telemetry,
    clock: Clock = time.monotonic,
    security: Security = NO_SECURITY,
) -> UpstreamLb:
    """Wire it; nothing is started. Raises :class:`PinyonError` for files that are not as they should be."""
    keys = load_api_keys(settings.api_keys_file)
    federation = load_federation(settings, security)
    models = ServedModels(federation, clock, settings.placement_wait_s)
    servers = _Servers(settings)
    fleet = Fleet([servers.make(url) for url in servers.urls], models, clock)
    times = WatchTimes(settings.upstream_probe_s, settings.upstream_health_s, settings.upstream_health_timeout_s)
    clusters = UpstreamClusters(fleet, servers.urls, models, servers.make, times, clock)
    config = FrontConfig(settings.in_flight_limit, settings.queue_limit)
    journal = settings.open_journal(JOURNAL_TYPES, journal_header(config, service="lb", instance_id=instance_id), clock)
    decisions = FrontDecisions(config, journal)
    line = Line(decisions.queue, clock, models.is_open, models.granted)
    changes = Coalesced(line.availability_changed, CHANGES_S, lambda: line.queued)
    models.changed, models.waiting = changes, lambda: line.waiting_demands
    line.on_put_back = changes.wanted_now
    metrics = UpstreamMetrics(registry, line, clusters.servers)
    show = show_policies(registry, "lb", routing=settings.routing, pushing=settings.pushing_choice)
    off_loop = OffLoop()
    admission = Admission(line, decisions.rates, Rates(settings.tenant_rpm, settings.tenant_tpm), metrics, clock)
    bodies = Budget(settings.bodies_limit_mib << 20)
    access = AccessLog(settings.access_log, clock)
    limits = ForwardingLimits(
        settings.request_timeout_s,
        settings.attempts,
        settings.upstream_first_byte_s,
        settings.placement_wait_s,
        settings.chat_max_tokens,
        settings.in_flight_limit,
    )
    own = Peer(instance_id, settings.region, "")
    remote = RegionTargets(models, metrics, clock, signed=bool(federation.secret))
    regions = remote.links = RegionLinks(
        own, models, federation.secret, 0, clock, security.channels,
        parse_delays(settings.test_region_delays_ms), RawServing.kind,
    )  # fmt: skip

    def targets(where: Where, cluster: str) -> Targets:
        if where is Where.REMOTE:
            return remote
        return clusters.targets(cluster) if where is Where.ADOPTED else fleet

    forwarding = Forwarding(
        admission, models, targets, off_loop, metrics, telemetry, limits, federation.secret or security.secret, clock
    )
    app = HttpApp(
        UpstreamRoutes(forwarding, models, fleet),
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
    http, grpc, https = make_servers(settings, app, bodies, metrics.http_connections, access, security)
    readiness = UpstreamReadiness(fleet, grpc.set_serving, lambda: app.draining)

    serving = RawServing(
        Arrivals(own, lambda: federation.geography, line, metrics, lambda: app.draining),
        federation.secret, forwarding, models, settings.http_limits(), bodies, access,
        settings.request_timeout_s, clock,
    )  # fmt: skip
    inbound = InboundParts(own, federation.secret, serving, lambda: app.draining)
    serve_peers(grpc, inbound)
    membership = Membership(instance_id, models, line, regions, metrics, clusters)
    models.told = join_controller(membership, settings.controller, lambda: app.draining, security, clock)
    boot_id = secrets.token_hex(8)

    def about(endpoints: dict[str, str]) -> LbInfo:
        return lb_info(settings, instance_id, boot_id, endpoints, https=https is not None)

    # Each model has a policy of its own, so the choice is what changes.
    def use_routing(_: str, choice: str) -> None:
        models.use(routing=choice)
        show("routing", choice)

    def use_pushing(_: str, choice: str) -> None:
        models.use(pushing=choice)
        show("pushing", choice)

    def drain(draining: bool) -> None:
        app.draining = draining

    add_admin(
        grpc,
        [
            changeable_policy(ROUTING_POLICIES, settings.routing, use_routing, ROUTING_POLICIES.checked),
            changeable_policy(PUSHING_RULES, settings.pushing_choice, use_pushing, PUSHING_RULES.checked),
            changeable_flag("draining", lambda: app.draining, drain),
        ],
    )
    return UpstreamLb(
        fleet, clusters, servers, line, models, regions, inbound, parse_peers(settings.peers), membership, about,
        off_loop, app, http, grpc, https, keys, journal, changes, readiness,
    )  # fmt: skip


class _Servers:
    """Makes those that settings name, and others as they are."""

    def __init__(self, settings: LbSettings) -> None:
        """Raises :class:`InvalidArgument`."""
        self.urls = parse_upstreams(settings.upstream)
        self._settings = settings
        self._keys = read_upstream_keys(settings.upstream_api_key_file)
        self._names = names = frozenset(map(str, self.urls))
        for named in self._keys.by_server:
            # A controller may give it other servers, and those have keys, too.
            if named not in names and not settings.controller:
                raise InvalidArgument(
                    f"the upstream API key file has a key for {named}, which is not in --upstream",
                    field="upstream_api_key_file",
                )
        if settings.controller:
            if len(names) > UPSTREAMS_MAX:
                raise InvalidArgument(
                    f"with --controller at most {UPSTREAMS_MAX} servers may be named", field="upstream"
                )
            for name in names:
                check_url(name, "upstream")
        self._tls = _tls(settings.upstream_ca_file) if any(url.tls for url in self.urls) else None

    def use_keys(self, keys: UpstreamKeys) -> None:
        self._keys = keys

    def key_of(self, server: str) -> str:
        """Empty: it is shown none."""
        own = server in self._names
        key = self._keys.of(server, own=own)
        if not key and not own and self._keys.default:
            _log.warning("%s is shown no API key: neither --upstream nor the key file names it", server)
        return key

    def make(self, url: UpstreamUrl) -> Server:
        settings = self._settings
        if url.tls and self._tls is None:
            self._tls = _tls(settings.upstream_ca_file)
        limits = ConnectionLimits(
            settings.upstream_connect_s, settings.upstream_keep_alive_s, settings.upstream_stall_s
        )
        key = self.key_of(str(url))
        return Server(
            url, limits, settings.upstream_connections, settings.upstream_capacity, key, self._tls,
            settings.upstream_sharers,
        )  # fmt: skip


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # ssl's errors among them
        raise InvalidArgument(f"cannot be used: {error.strerror or error}", field="upstream_ca_file") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
