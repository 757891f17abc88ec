"""The two servers of a load balancer, by its settings: HTTP, and gRPC with whatever is added to it."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import Gauge

from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.https import Https
from pinyon.http.budget import Budget
from pinyon.http.peers import Peers, TrustedProxies
from pinyon.http.server import HttpServer
from pinyon.http.state import App, HttpState
from pinyon.runtime.channel import PATIENT_KEEPALIVE_OPTIONS
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.security import Security
from services.lb.settings import LbSettings

__all__ = ["Servers", "make_servers"]


class Servers(NamedTuple):
    http: HttpServer
    grpc: GrpcServer
    https: Https | None
    """What the HTTP server shows its clients."""


def make_servers(
    settings: LbSettings, app: App, bodies: Budget, connections: Gauge, access: AccessLog, security: Security
) -> Servers:
    """Nothing is started. Raises :class:`InvalidArgument`."""
    shared = HttpState(
        app,
        settings.http_limits(),
        bodies,
        connections,
        TrustedProxies(settings.trusted_proxies, settings.forwarded_field),
        settings.proxy_protocol,
        Peers(settings.connections_per_peer),
        Peers(settings.requests_per_peer),
    )
    https = Https.of(settings.http_tls_cert, settings.http_tls_key, security)
    tls = None if https is None else lambda: https.context
    http = HttpServer(shared, settings.http_listen, tls, reuse_port=settings.http_reuse_port)
    grpc = GrpcServer(
        settings.listen,
        security.tls,
        admin_listen=settings.admin_listen,
        message_s=settings.body_timeout_s,
        keepalive=PATIENT_KEEPALIVE_OPTIONS,
        outermost=(access,),
    )
    return Servers(http, grpc, https)
