"""The controller's composition root."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.clock import Clock
from pinyon.federation.distances import Pair, parse_distances
from pinyon.federation.registry import VERSION_MAX, LbRegistry
from pinyon.routing.geography import ANYWHERE, Geography, parse_geography
from pinyon.runtime.admin import add_admin
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.pages import PageServer
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.settings import read_json
from services.controller.control import EPOCH_BYTES, Control
from services.controller.metrics import ControllerMetrics
from services.controller.servicer import CONTROLLER_CALLERS, ControllerServicer
from services.controller.settings import ControllerSettings
from services.controller.state_file import read_state

DRAIN_S = 2.0
"""The maximum time that a drain may take, in seconds: sessions end only when their load balancers do."""


@dataclass
class Controller:
    """The parts of a controller, wired. ``start`` → ``close``."""

    settings: ControllerSettings
    security: Security
    registry: LbRegistry
    control: Control
    server: GrpcServer
    pages: PageServer | None = None

    async def start(self) -> dict[str, str]:
        """Starts all parts. Returns the bound endpoints by name."""
        endpoints = {"grpc": await self.server.start()}
        self.control.start()
        if listen := self.settings.http_listen:
            self.pages = PageServer("regions", listen, self.control.page, self.security, ask_clients=False)
            endpoints["http"] = self.pages.address
        return endpoints

    async def close(self, drain_s: float) -> None:
        if self.pages is not None:
            await asyncio.to_thread(self.pages.close)
        await self.server.drain(min(drain_s, DRAIN_S))
        await self.control.close()


def build(
    settings: ControllerSettings,
    metrics_registry: CollectorRegistry,
    clock: Clock = time.monotonic,
    security: Security = NO_SECURITY,
) -> Controller:
    """Wires a controller; nothing is started. Raises :class:`PinyonError` for files that cannot be used."""
    state = read_state(Path(settings.state_file)) if settings.state_file else None
    # Versions counted on from one beyond all measure could not be sent some day, so numbering begins anew.
    epoch = state.epoch if state is not None and state.version <= VERSION_MAX else secrets.token_hex(EPOCH_BYTES)
    registry = LbRegistry(
        epoch, clock(), settings.timing(), load_geography(settings), load_distances(settings), settings.lbs_max
    )
    if state is not None:
        registry.recover(state, clock())
    metrics = ControllerMetrics(metrics_registry, registry, clock)
    control = Control(registry, settings, metrics, security.channels, clock, remembered=state)
    server = GrpcServer(settings.listen, security.tls)
    server.add(
        ControllerServicer(control, metrics, clock),
        controller_pb2.DESCRIPTOR.services_by_name["ControllerService"],
        CONTROLLER_CALLERS,
    )
    add_admin(server, [])
    return Controller(settings, security, registry, control, server)


def load_geography(settings: ControllerSettings) -> Geography:
    """Loads the policy of regions. Raises :class:`InvalidArgument`."""
    return read_json(settings.geography, "geography", parse_geography, ANYWHERE)


def load_distances(settings: ControllerSettings) -> dict[Pair, float]:
    """Loads the table of distances. Raises :class:`InvalidArgument`."""
    return read_json(settings.distances, "distances", parse_distances, {})


async def run(settings: ControllerSettings, context: ServiceContext) -> None:
    """Serves until told to stop."""

    def use_geography(geography: Geography) -> None:
        controller.registry.geography = geography

    def use_distances(table: dict[Pair, float]) -> None:
        controller.registry.table = table

    # The files are watched before they are read, so that no change falls between.
    if path := settings.geography:
        context.files.add("policy of regions", [Path(path)], lambda: load_geography(settings), use_geography)
    if path := settings.distances:
        context.files.add("distances", [Path(path)], lambda: load_distances(settings), use_distances)
    controller = build(settings, context.registry, security=context.security)
    try:
        endpoints = await controller.start()
        context.ready({name: settings.reachable(address) for name, address in endpoints.items()})
        await context.stopping.wait()
    finally:
        await controller.close(settings.drain_s)
