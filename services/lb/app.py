"""The load balancer's composition root."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from pinyon.api.lb.v1 import lb_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.core.served import parse_more_models
from pinyon.frontdoor.instances.asked_instances import AskedInstances
from pinyon.frontdoor.instances.clusters import Clusters, OnListed
from pinyon.frontdoor.instances.completions import Completions
from pinyon.frontdoor.instances.conductor_session import ConductorSession
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.kind import Dispatcher, InstanceKind
from pinyon.frontdoor.instances.metrics import LbMetrics
from pinyon.frontdoor.instances.prompts import KeyChains, Prompts
from pinyon.frontdoor.instances.recorder import Recorder
from pinyon.frontdoor.instances.serving import TokenServing
from pinyon.frontdoor.instances.tokenizer_process import strftime_now
from pinyon.frontdoor.request_loop import LoopLimits, RequestLoop
from pinyon.frontdoor.servers.door import ServerDoor
from pinyon.frontdoor.servers.instance_servers import InstanceServers
from pinyon.frontdoor.servers.kind import HttpInstanceKind
from pinyon.frontdoor.servers.routes import InstanceRoutes
from pinyon.frontdoor.upstreams.url import UpstreamKeys, read_upstream_keys
from pinyon.http.budget import Budget
from pinyon.model import ModelCard, load_card
from pinyon.runtime.heartbeat import Heartbeat
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.service import ServiceContext
from services.lb.balancer import LoadBalancer, load_keys
from services.lb.server_maker import ServerMaker
from services.lb.servicer import LB_CALLERS, LbServicer
from services.lb.settings import LbSettings
from services.lb.upstream_app import UpstreamLb

_log = get_logger("lb")
TELL_S = 1.0
"""The minimum time for sending the rest of a trace to clients that record it."""


class Lb(LoadBalancer):
    """A load balancer in front of instances of pinyon, on which a conductor places requests."""

    def __init__(self, settings: LbSettings, context: ServiceContext, clock: Clock = time.monotonic) -> None:
        """Builds the parts. Raises :class:`PinyonError` for a bad model folder or keys file, among others."""
        security = context.security
        cards = load_cards(settings)
        super().__init__(settings, context, clock, cards)
        self.clusters: Clusters = Clusters(
            self.models, settings.unread_tokens, security.channels, settings.conductor, self._make_cluster, clock
        )
        self.view, self.conductor = self.clusters.home, self.clusters.home.conductor
        metrics = LbMetrics(context.registry, tuple(cards), self.line, self.clusters)
        chains = KeyChains()
        self.prompts = {
            name: Prompts(
                card, self.view, self.off_loop, chains, settings.chat_max_tokens, settings.chars_per_token_max
            )
            for name, card in cards.items()
        }
        admission = self.admission(metrics)
        self.recorder = Recorder(clock)
        limits = LoopLimits(settings.attempts, settings.placement_wait_s, settings.in_flight_limit)
        by_routing = settings.place_by == "routing"
        instances = partial(InstanceKind, self.clusters, self.models, self.regions, metrics, limits, clock)
        loop = RequestLoop(self.models, instances(by_routing), metrics, context.telemetry, limits, clock)
        self.dispatcher = Dispatcher(loop, self.models, security.secret, self.recorder)
        timeout_s = settings.request_timeout_s
        completions = Completions(admission, self.dispatcher, self.prompts, self.off_loop, timeout_s, clock)
        self._maker = ServerMaker(settings)
        self.servers = InstanceServers(self.clusters, self.prompts, self._maker.make)
        self.clusters.changed = self.servers.update
        http_kind = HttpInstanceKind(
            instances(by_routing, over_http=True), instances(True, over_http=True), self.servers, security.secret,
            limits, settings.upstream_first_byte_s, clock,
        )  # fmt: skip
        door = ServerDoor(
            admission, self.models, RequestLoop(self.models, http_kind, metrics, context.telemetry, limits, clock),
            self.off_loop, timeout_s, settings.chat_max_tokens, security.secret, clock, self.servers, self.prompts,
        )  # fmt: skip
        asked = AskedInstances(
            self.models.by_name, self.clusters.home, security.channels, clock, self.models.serves_elsewhere
        )
        self.open_doors(InstanceRoutes(completions, door), asked, metrics)
        servicer = LbServicer(admission, self.dispatcher, self.prompts, self.keys, self.models, timeout_s, clock)
        self.grpc.add(servicer, lb_pb2.DESCRIPTOR.services_by_name["LbService"], LB_CALLERS, servicer.doors)
        serving = TokenServing(
            self.own, self.line, metrics, self.readiness, self.models, self.access,
            Budget(settings.bodies_limit_mib << 20), timeout_s, clock, self.prompts, self.dispatcher,
        )  # fmt: skip
        self.join(serving, metrics, self.recorder.record, self.clusters.update_sessions)

    def _make_cluster(self, name: str, address: str, on_listed: OnListed) -> ConductorCluster:
        settings, security = self.settings, self.context.security
        layer = partial(self.models.layer, cluster=name)
        announce = partial(self.models.add, announced=True)
        cluster = ConductorCluster(layer, settings.instances_grace_s, security.secret, announce)
        # Not at once: whoever finds out may be going through the models.
        cluster.expired = lambda: asyncio.get_running_loop().call_soon(on_listed, (), ())
        cluster.conductor = ConductorSession(
            address,
            self.context.instance_id,
            lambda message, first: on_listed(*cluster.update(message, self.clock(), first)),
            settings.conductor_timeout_s,
            lambda: self.line.in_flight,
            security.channels.sessions_to(peer_name(CONDUCTOR)),
        )
        return cluster

    def use_keys(self, keys: UpstreamKeys) -> None:
        """Makes all servers of instances use these API keys from now on."""
        self._maker.use_keys(keys, [each.server for each in self.servers])

    def last_calls_s(self, left_s: float) -> float:
        # This time is granted even if the drain has used up its own: otherwise calls would lose their unsent data.
        tell_s = TELL_S if self.recorder.recordings else 0.0
        self.recorder.close()
        return max(tell_s, left_s)

    async def close_targets(self) -> None:
        await self.clusters.close()  # no list of instances comes after that
        await self.servers.close()
        await asyncio.gather(*(each.close() for each in self.prompts.values()))


def load_cards(settings: LbSettings) -> dict[str, ModelCard]:
    """Returns the models by name, first the default for requests that name none. Raises :class:`PinyonError`."""
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


async def run(settings: LbSettings, context: ServiceContext) -> None:
    """Serves until told to stop."""
    lb = UpstreamLb(settings, context) if settings.upstream else Lb(settings, context)
    if lb.https is not None:
        context.files.add("HTTPS certificate", lb.https.files, lb.https.renew, lambda _: None)
    if settings.api_keys_file:
        context.files.add("API keys file", [Path(settings.api_keys_file)], partial(load_keys, settings), lb.keys.renew)
    if upstream_keys := settings.upstream_api_key_file:
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
