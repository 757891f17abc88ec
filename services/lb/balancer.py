"""The parts of every load balancer, whatever its targets are."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.decisions import JOURNAL_TYPES, FrontConfig, FrontDecisions, journal_header
from pinyon.federation.distances import parse_position
from pinyon.federation.view import LbInfo, OwnedCluster
from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.admission import TenantAdmission
from pinyon.frontdoor.app import HttpApp
from pinyon.frontdoor.auth import ApiKeys, load_api_keys
from pinyon.frontdoor.clusters import Adopted
from pinyon.frontdoor.cors import Cors
from pinyon.frontdoor.gzip import Inflater
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.frontdoor.readiness import Readiness, Watched
from pinyon.frontdoor.regions.inbound import PEER_CALLERS, Serving
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.regions.membership import RegionMembership
from pinyon.frontdoor.regions.peer import PeerBalancer, parse_peers
from pinyon.frontdoor.routes import Routes
from pinyon.frontdoor.served_models import ServedModels
from pinyon.frontdoor.upstreams.url import parse_upstreams
from pinyon.http.budget import Budget
from pinyon.http.peers import PeerPlaces, TrustedProxies
from pinyon.http.server import HttpServer
from pinyon.http.state import HttpState
from pinyon.routing.geography import ANYWHERE, parse_geography
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.routing.rates import Rates
from pinyon.runtime.admin import add_admin, changeable_flag, changeable_policy
from pinyon.runtime.channel import PATIENT_KEEPALIVE_OPTIONS, OpenSession
from pinyon.runtime.distance import delayed, parse_delays
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import ANY, CONTROLLER, check_region_name, peer_name, region_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.security import Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.settings import read_json
from services.lb.settings import LbSettings

_log = get_logger("lb.regions")


class LoadBalancer:
    """The parts of a load balancer, wired but not started; used as ``start`` → ``close``.

    Each kind of load balancer adds the targets of its requests: its constructor calls :meth:`open_doors` and then
    :meth:`join`."""

    kind: ClassVar[peer_pb2.PeerKind] = peer_pb2.PEER_KIND_UNSPECIFIED
    """The kind of targets behind the load balancer."""
    clusters: Adopted[Any]
    """The targets of requests in this region."""

    def __init__(
        self, settings: LbSettings, context: ServiceContext, clock: Clock, own_models: Iterable[str] = ()
    ) -> None:
        """Builds the common parts. Raises :class:`PinyonError` for missing or invalid files."""
        self.settings, self.context, self.clock = settings, context, clock
        self.keys = load_keys(settings)
        check_region(settings, context.security)
        self.models = ServedModels(
            settings.region,
            clock,
            geography=read_json(settings.geography_file, "geography_file", parse_geography, ANYWHERE),
            pushing=settings.pushing_choice,
            routing=settings.routing,
            wait_s=settings.placement_wait_s,
            own=own_models,
        )
        config = FrontConfig(settings.in_flight_limit, settings.queue_limit)
        header = journal_header(config, service="lb", instance_id=context.instance_id)
        self.journal = settings.open_journal(JOURNAL_TYPES, header, clock)
        decisions = FrontDecisions(config, self.journal)
        self.line = Line(decisions.queue, clock, self.models.is_open, self.models.granted)
        self.models.changed, self.models.waiting = self.line.look, lambda: self.line.waiting_demands
        self.off_loop = OffLoop()
        self.bodies = Budget(settings.bodies_limit_mib << 20)
        self.access = AccessLog(settings.access_log, clock)
        self.own = PeerBalancer(context.instance_id, settings.region, "", self.kind)
        delays_s = parse_delays(settings.test_region_delays_ms)

        def sessions_to(region: str) -> OpenSession:
            return delayed(context.security.channels.sessions_to(region_name(region)), delays_s.get(region, 0.0))

        self.regions = RegionLinks(self.own, self.models, settings.unread_tokens, clock, sessions_to)
        self._rates = decisions.rates
        self._peers = parse_peers(settings.peers)
        self._boot_id = secrets.token_hex(8)

    # -- for the constructor of a kind

    def admission(self, metrics: DoorMetrics[Any]) -> TenantAdmission:
        settings = self.settings
        default = Rates(settings.tenant_rpm, settings.tenant_tpm)
        return TenantAdmission(self.line, self._rates, default, metrics, self.clock)

    def open_doors(self, routes: Routes, watched: Watched, metrics: DoorMetrics[Any]) -> None:
        """Makes the HTTP and gRPC servers; they report ready while ``watched`` serves."""
        context, settings = self.context, self.settings
        self.readiness = Readiness(watched)
        if settings.http_reuse_port:
            metrics.page_registry = None
        self.app = HttpApp(
            routes,
            self.readiness,
            self.keys,
            metrics,
            Inflater(self.off_loop, self.bodies, settings.body_limit_bytes),
            Cors(settings.cors_origins),
            self.clock,
            self.access,
        )
        state = HttpState(
            self.app,
            settings.http_limits(),
            self.bodies,
            metrics.http_connections,
            TrustedProxies(settings.trusted_proxies, settings.forwarded_field),
            settings.proxy_protocol,
            PeerPlaces(settings.connections_per_peer),
            PeerPlaces(settings.requests_per_peer),
        )
        self.https = https = Https.of(settings.http_tls_cert, settings.http_tls_key, context.security)
        tls = None if https is None else lambda: https.context
        self.http = HttpServer(state, settings.http_listen, tls, reuse_port=settings.http_reuse_port)
        self.grpc = GrpcServer(
            settings.listen,
            context.security.tls,
            admin_listen=settings.admin_listen,
            message_s=settings.body_timeout_s,
            keepalive=PATIENT_KEEPALIVE_OPTIONS,
            outermost=(self.access.around,),
        )

    def join(
        self, serving: Serving, metrics: DoorMetrics[Any], record: Any = None, pushed: Callable[[], None] = lambda: None
    ) -> None:
        """Becomes a member of the federation; requests of other regions go to ``serving``. Adds the settings that
        operators can change at run time; a new pushing rule calls ``pushed``."""
        context, settings, controller = self.context, self.settings, self.settings.controller
        self.serving = serving
        self.grpc.add(serving, peer_pb2.DESCRIPTOR.services_by_name["PeerService"], PEER_CALLERS)
        self.membership = member = RegionMembership(
            controller, self.models, self.line, self.regions, metrics, self.clusters, self.readiness,
            context.security.channels.sessions_to(peer_name(CONTROLLER)), self.clock,
        )  # fmt: skip
        self.models.told = lambda: not controller or member.federation is not None
        show = show_policies(self.context.registry, "lb", routing=settings.routing, pushing=settings.pushing_choice)

        # Each model has its own policy object, so the change passes the policy's name, not an object.
        def use_routing(_: object, choice: str) -> None:
            self.models.use(routing=choice)
            show("routing", choice)

        def use_pushing(_: object, choice: str) -> None:
            self.models.use(pushing=choice)
            pushed()
            show("pushing", choice)

        def drain(draining: bool) -> None:
            self.readiness.draining = draining
            member.wake()

        add_admin(
            self.grpc,
            [
                changeable_policy(ROUTING_POLICIES, settings.routing, use_routing, ROUTING_POLICIES.checked),
                changeable_policy(PUSHING_RULES, settings.pushing_choice, use_pushing, PUSHING_RULES.checked),
                changeable_flag("draining", lambda: self.readiness.draining, drain),
            ],
            record=record,
        )

    # -- life

    async def start(self) -> dict[str, str]:
        """Starts all parts and returns the bound endpoints by name."""
        if self._peers:
            self.regions.know(self._peers)
        try:
            self.clusters.start()
            endpoints = {"http": await self.http.start(), "grpc": await self.grpc.start(serving=False)}
            self.readiness.start(self.grpc.set_serving)
            admin = self.grpc.admin_address
            self.membership.start(self._about(endpoints | {"admin": admin or endpoints["grpc"]}))
            return endpoints | ({"admin": admin} if admin else {})
        except BaseException:
            await self.close(0)
            raise

    def _about(self, endpoints: dict[str, str]) -> LbInfo:
        """Returns the facts about this load balancer, bound at ``endpoints``, for the controller."""
        settings, scheme = self.settings, "http" if self.https is None else "https"
        urls = tuple([str(url) for url in parse_upstreams(settings.upstream)]) if settings.upstream else ()
        return LbInfo(
            self.context.instance_id,
            self._boot_id,
            settings.region,
            settings.reachable(endpoints["admin"]),
            settings.http_url or f"{scheme}://{settings.reachable(endpoints['http'])}",
            (OwnedCluster(settings.region, settings.conductor, urls),) if settings.conductor or urls else (),
            parse_position(settings.position),
        )

    async def close(
        self, drain_s: float, lame_duck_s: float = 0.0, wait: Callable[[float], Awaitable[bool | None]] = asyncio.sleep
    ) -> None:
        """Drains and ends the load balancer.

        For ``lame_duck_s`` it announces its end and still serves. Then it accepts nothing new, lets running requests
        finish for ``drain_s`` and ends the rest. ``wait`` may return earlier, with True if another process wants its
        ports."""
        self.readiness.draining = True
        self.membership.wake()  # another load balancer must take over its targets before it ends
        self.http.announce()
        await self.grpc.begin_drain()
        wanted = await wait(lame_duck_s)
        ports = asyncio.ensure_future(self.grpc.drain(drain_s)) if wanted else None
        started_s = time.monotonic()
        await self.http.drain(drain_s)
        self.serving.end()
        await self.grpc.drain(self.last_calls_s(max(0.0, drain_s - (time.monotonic() - started_s))))
        if ports is not None:
            await ports
        await self.membership.close()
        await self.readiness.close()
        await self.regions.close()
        await self.close_targets()
        self.models.close()
        self.line.close()
        self.off_loop.close()
        if self.journal is not None:
            self.journal.close()

    def last_calls_s(self, left_s: float) -> float:
        """Returns how long gRPC calls may still take when ``left_s`` of the drain is left; ends traces' recordings."""
        return left_s if self.serving.running else 0.0

    async def close_targets(self) -> None:
        """Closes the targets of requests."""
        await self.clusters.close()


class Https:
    """The TLS context of the HTTP server, with a certificate of its own or the cluster's. Connections made after
    :meth:`renew` get the new one."""

    context: ssl.SSLContext
    """The context of new connections."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Loads the files. Raises :class:`InvalidArgument`."""
        self.files = (certificate, key)
        self.renew()

    @classmethod
    def of(cls, certificate: str, key: str, security: Security) -> Https | None:
        """Returns the certificate to use, or None for plain HTTP. Raises :class:`InvalidArgument`."""
        if certificate:
            try:
                return cls(Path(certificate), Path(key))
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="http_tls_cert") from None
        return None if security.tls is None else cls(security.tls.certificate, security.tls.key)

    def renew(self) -> None:
        """Loads the files again, from any thread. Raises :class:`InvalidArgument`; the old certificate stays then."""
        from pinyon.runtime.tls import server_context  # imported with TLS only, as it imports cryptography

        # A new context: in the old one, handshakes on the event loop could meet a half-loaded certificate.
        self.context = server_context(*self.files)


def load_keys(settings: LbSettings) -> ApiKeys:
    """Loads the API keys. Raises :class:`InvalidArgument`."""
    return load_api_keys(settings.api_keys_file, shared=settings.http_reuse_port)


def check_region(settings: LbSettings, security: Security) -> None:
    """Raises :class:`InvalidArgument`, with TLS, for a region that no certificate can name; warns if ours lacks it."""
    if not settings.region or security.tls is None:
        return
    check_region_name(settings.region, "region")
    if region_name(settings.region) not in security.tls.material.names:
        _log.warning(
            "%s does not name the region %s: the controller and load balancers of other regions will refuse this "
            "one; make it with pinyon certs DIR lb/%s@%s",
            security.tls.certificate,
            settings.region,
            security.tls.material.identity.instance_id or ANY,
            settings.region,
        )
