"""The composition root of a load balancer in front of other makers' servers."""

from __future__ import annotations

import ssl
import time

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.request_loop import LoopLimits, RequestLoop
from pinyon.frontdoor.upstreams.clusters import UpstreamClusters
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.forwarding import Forwarding
from pinyon.frontdoor.upstreams.kind import UpstreamKind
from pinyon.frontdoor.upstreams.metrics import UpstreamMetrics
from pinyon.frontdoor.upstreams.regions import RegionTargets
from pinyon.frontdoor.upstreams.routes import UpstreamRoutes
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.serving import RawServing
from pinyon.frontdoor.upstreams.url import UpstreamKeys, UpstreamUrl, parse_upstreams, read_upstream_keys
from pinyon.frontdoor.upstreams.watch import WatchTimes
from pinyon.messages.federation import UPSTREAMS_MAX, check_url
from pinyon.runtime.logging import get_logger
from pinyon.runtime.service import ServiceContext
from services.lb.balancer import LoadBalancer
from services.lb.settings import LbSettings

_log = get_logger("lb.upstreams")


class UpstreamLb(LoadBalancer):
    """A load balancer in front of OpenAI servers of other makers."""

    kind = peer_pb2.PEER_KIND_UPSTREAM

    def __init__(self, settings: LbSettings, context: ServiceContext, clock: Clock = time.monotonic) -> None:
        """Builds the parts. Raises :class:`PinyonError` for missing or invalid files."""
        super().__init__(settings, context, clock)
        models, urls = self.models, parse_upstreams(settings.upstream)
        self._keys = read_upstream_keys(settings.upstream_api_key_file)
        self._named = frozenset(map(str, urls))
        self._tls: ssl.SSLContext | None = None
        self._check_servers()
        times = WatchTimes(settings.upstream_probe_s, settings.upstream_health_s, settings.upstream_health_timeout_s)
        self.clusters: UpstreamClusters = UpstreamClusters(urls, models, self._make_server, times, clock)
        self.fleet = self.clusters.fleet
        metrics = UpstreamMetrics(context.registry, self.line, self.clusters.servers)
        regions = RegionTargets(models, self.regions, metrics, clock)
        limits = LoopLimits(settings.attempts, settings.placement_wait_s, settings.in_flight_limit)
        kind = UpstreamKind(models, self.clusters, regions, metrics, limits, settings.upstream_first_byte_s, clock)
        loop = RequestLoop(models, kind, metrics, context.telemetry, limits, clock)
        forwarding = Forwarding(
            self.admission(metrics), models, loop, self.off_loop, settings.request_timeout_s, settings.chat_max_tokens,
            context.security.secret, clock,
        )  # fmt: skip
        self.open_doors(UpstreamRoutes(forwarding, models, self.fleet), self.fleet, metrics)
        serving = RawServing(
            self.own, self.line, metrics, self.readiness, models, self.access, self.bodies, settings.request_timeout_s,
            clock, forwarding, settings.http_limits(),
        )  # fmt: skip
        self.join(serving, metrics)

    def use_keys(self, keys: UpstreamKeys) -> None:
        """Makes all servers use these API keys from now on."""
        self._keys = keys
        for _, server in self.clusters.servers():
            server.use_key(self._key_of(server.name))

    def _check_servers(self) -> None:
        """Raises :class:`InvalidArgument` if the settings' servers and keys do not fit together."""
        if not self.settings.controller:
            # A controller may assign other servers to this load balancer, and those have keys, too.
            for unknown in [name for name in self._keys.by_server if name not in self._named]:
                raise InvalidArgument(
                    f"the upstream API key file has a key for {unknown}, which is not in --upstream",
                    field="upstream_api_key_file",
                )
            return
        if len(self._named) > UPSTREAMS_MAX:
            raise InvalidArgument(f"with --controller at most {UPSTREAMS_MAX} servers may be named", field="upstream")
        for name in self._named:
            check_url(name, "upstream")

    def _key_of(self, server: str) -> str:
        """Returns the API key for a server; empty if there is none."""
        own = server in self._named
        key = self._keys.of(server, own=own)
        if not key and not own and self._keys.default:
            _log.warning("%s is shown no API key: neither --upstream nor the key file names it", server)
        return key

    def _make_server(self, url: UpstreamUrl) -> Server:
        """Returns a server, whether the settings name it or it is adopted."""
        settings = self.settings
        if url.tls and self._tls is None:
            self._tls = _tls(settings.upstream_ca_file)
        limits = ConnectionLimits(
            settings.upstream_connect_s, settings.upstream_keep_alive_s, settings.upstream_stall_s
        )
        return Server(
            url, limits, settings.upstream_connections, settings.upstream_capacity, self._key_of(str(url)), self._tls,
            settings.upstream_sharers,
        )  # fmt: skip


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # includes ssl's errors
        raise InvalidArgument(f"cannot be used: {error.strerror or error}", field="upstream_ca_file") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
