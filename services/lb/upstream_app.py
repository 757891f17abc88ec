"""The composition root of a load balancer in front of other makers' servers."""

from __future__ import annotations

import time

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.request_loop import LoopLimits, RequestLoop
from pinyon.frontdoor.upstreams.clusters import UpstreamClusters
from pinyon.frontdoor.upstreams.forwarding import Forwarding
from pinyon.frontdoor.upstreams.kind import UpstreamKind
from pinyon.frontdoor.upstreams.metrics import UpstreamMetrics
from pinyon.frontdoor.upstreams.regions import RegionTargets
from pinyon.frontdoor.upstreams.routes import UpstreamRoutes
from pinyon.frontdoor.upstreams.serving import RawServing
from pinyon.frontdoor.upstreams.url import UpstreamKeys, parse_upstreams
from pinyon.frontdoor.upstreams.watch import WatchTimes
from pinyon.messages.federation import UPSTREAMS_MAX, check_url
from pinyon.runtime.service import ServiceContext
from services.lb.balancer import LoadBalancer
from services.lb.server_maker import ServerMaker
from services.lb.settings import LbSettings


class UpstreamLb(LoadBalancer):
    """A load balancer in front of OpenAI servers of other makers."""

    kind = peer_pb2.PEER_KIND_UPSTREAM

    def __init__(self, settings: LbSettings, context: ServiceContext, clock: Clock = time.monotonic) -> None:
        """Builds the parts. Raises :class:`PinyonError` for missing or invalid files."""
        super().__init__(settings, context, clock)
        models, urls = self.models, parse_upstreams(settings.upstream)
        self._maker = ServerMaker(settings)
        self._check_servers()
        times = WatchTimes(settings.upstream_probe_s, settings.upstream_health_s, settings.upstream_health_timeout_s)
        self.clusters: UpstreamClusters = UpstreamClusters(urls, models, self._maker.make, times, clock)
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
        self._maker.use_keys(keys, [server for _, server in self.clusters.servers()])

    def _check_servers(self) -> None:
        """Raises :class:`InvalidArgument` if the settings' servers and keys do not fit together."""
        keys, named = self._maker.keys, self._maker.named
        if not self.settings.controller:
            # A controller may assign other servers to this load balancer, and those have keys, too.
            for unknown in [name for name in keys.by_server if name not in named]:
                raise InvalidArgument(
                    f"the upstream API key file has a key for {unknown}, which is not in --upstream",
                    field="upstream_api_key_file",
                )
            return
        if len(named) > UPSTREAMS_MAX:
            raise InvalidArgument(f"with --controller at most {UPSTREAMS_MAX} servers may be named", field="upstream")
        for name in named:
            check_url(name, "upstream")
