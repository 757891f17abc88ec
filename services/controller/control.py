"""The controller's actions: it takes in news, decides, tells, writes down, and has failed load balancers restarted."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.clock import Clock
from pinyon.federation.registry import LbRegistry
from pinyon.federation.view import Federation, LbInfo
from pinyon.messages.federation import federation_to_proto
from pinyon.runtime.channel import Channels
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from services.controller.metrics import ControllerMetrics
from services.controller.prober import Prober
from services.controller.regions_page import RegionsPage
from services.controller.restarts import LbRestarts
from services.controller.settings import ControllerSettings
from services.controller.state_file import StateFile

PERIOD_S = 0.25
LATE_S = 1.0
"""The lateness of a look, in seconds, beyond which this process itself stood still."""
EPOCH_BYTES = 8
GAP_S = 0.02
"""Seconds between two messages for one load balancer: changes close together travel together."""
PER_LEASE = 4
"""The least number of messages per lease, so that no lease runs out because one moment was lost."""

_log = get_logger("controller")


class Control:
    """The registry and all that must hear of its changes. ``start`` → ``close``; sessions call the other methods."""

    def __init__(
        self,
        registry: LbRegistry,
        settings: ControllerSettings,
        metrics: ControllerMetrics,
        channels: Channels,
        clock: Clock,
        *,
        remembered: Federation | None,
    ) -> None:
        """Takes as ``remembered`` the federation in the state file, which the registry has recovered.

        Load balancers tell what came after that; if it is None, they tell everything."""
        self.registry = registry
        self.page = RegionsPage()
        self._file = StateFile(Path(settings.state_file) if settings.state_file else None, metrics.wrote)
        self._restarts = LbRestarts(
            settings.restart_hook, settings.restart_timeout_s, settings.restart_attempts, metrics.restarted
        )
        self._prober = Prober(registry, channels, settings.probe_timeout_s, clock, self.settle, metrics.probed)
        self._clock = clock
        self._remembered = remembered
        self._began = registry.federation.version
        self._told = math.inf
        """The last version that this process told under its file's epoch; infinite while it tells more."""
        self._published = registry.federation
        self._news = asyncio.Event()
        """An event that is set when another federation is published."""
        self._built: controller_pb2.SessionResponse | None = None
        """The last message with a whole federation, which is the same for all load balancers."""
        self._shown_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._file.start()
        self._file.keep(self.registry.federation)
        self._task = asyncio.create_task(self._run(), name="controller")

    async def close(self) -> None:
        await ended(self._task)
        await self._prober.close()
        await self._restarts.close()
        await self._file.close()

    # -- sessions

    def register(self, info: LbInfo, known: Federation | None) -> int:
        """Begins a session and returns its number; raises as :meth:`LbRegistry.register` does."""
        now_s = self._clock()
        session = self.registry.register(info, now_s)
        _log.info("%s of %s is here", info.lb_id, info.region, extra={"boot_id": info.boot_id})
        if known is not None:
            self._recover(known, info, now_s)
        self.settle()
        return session

    def update(self, session: int, info: LbInfo) -> None:
        self.registry.update(session, info)
        self.settle()

    def heard(self, session: int, load: Any, latencies_ms: dict[str, float], draining: bool) -> bool:
        """Records a report. Returns False if the load balancer has a newer session."""
        before = self.registry.awaits(session, draining)
        heard = self.registry.heard(session, load, latencies_ms, draining, self._clock())
        if before:
            self.settle()
        return heard

    def left(self, session: int) -> None:
        self.registry.left(session, self._clock())
        self.settle()

    def lost(self, session: int) -> None:
        self.registry.lost(session, self._clock())
        self.settle()
        self._prober.look()

    async def messages(self) -> AsyncGenerator[controller_pb2.SessionResponse, None]:
        """Yields one load balancer's messages: the federation, again after changes, and signs of life in between."""
        told = -1
        while True:
            news = self._news
            if told != self.registry.federation.version:
                message = self._whole()
                told = message.version
                yield message
                await asyncio.sleep(GAP_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self.registry.timing.lease_s / PER_LEASE):
                    await news.wait()
                    continue
            yield self._message()

    async def written(self) -> int:
        """Returns the present version, once it has been told and is on the disk."""
        self.settle()
        version = self.registry.federation.version
        await self._file.wait(version)
        return version

    def settle(self) -> None:
        """Handles what follows from present knowledge: failures, restarts, and a new federation for all."""
        now_s = self._clock()
        for info in self.registry.sweep(now_s):
            _log.warning("%s of %s has failed: not heard, and no answer", info.lb_id, info.region)
            self._restarts.failed(info)
        for lb_id in self._restarts.restarting:
            if not self.registry.has_failed(lb_id):
                self._restarts.back(lb_id)
        federation = self.registry.federation
        if federation is not self._published:
            _log_adoptions(self._published, federation)
            self._published = federation
            self._file.keep(federation)
            self._news.set()
            self._news = asyncio.Event()
            self._shown_s = float("-inf")
        if now_s - self._shown_s >= LATE_S:
            self._shown_s = now_s
            self.page.show(federation, self.registry.geography, self.registry.distances())

    def _message(self) -> controller_pb2.SessionResponse:
        federation = self.registry.federation
        lease_ms = round(self.registry.timing.lease_s * 1e3)
        return controller_pb2.SessionResponse(epoch=federation.epoch, version=federation.version, lease_ms=lease_ms)

    def _whole(self) -> controller_pb2.SessionResponse:
        built, federation = self._built, self.registry.federation
        if built is None or (built.epoch, built.version) != (federation.epoch, federation.version):
            built = self._built = self._message()
            built.federation.CopyFrom(federation_to_proto(federation))
        return built

    def _recover(self, known: Federation, info: LbInfo, now_s: float) -> None:
        federation, state = self.registry.federation, self._remembered
        if known.epoch == federation.epoch and known.version > federation.version:
            _log.warning(
                "%s was told version %d, later than ours (%d): going on under another epoch",
                info.lb_id,
                known.version,
                federation.version,
            )
            if state is not None and known.epoch == state.epoch:
                self._told = federation.version
            self.registry.renew(secrets.token_hex(EPOCH_BYTES))
        if state is None:
            news = known.epoch != federation.epoch
        else:  # versions that were told, but had not reached the disk
            news = known.epoch == state.epoch and (
                state.version < known.version < self._began or known.version > self._told
            )
        if news and self.registry.settling(now_s):
            _log.info("recovering what %s knew: version %d of %s", info.lb_id, known.version, known.epoch)
            self.registry.recover(known, now_s, info)

    async def _run(self) -> None:
        while True:
            before_s = self._clock()
            await asyncio.sleep(PERIOD_S)
            late_s = self._clock() - before_s - PERIOD_S
            try:
                if late_s > LATE_S:
                    _log.warning("stood still for %.1f s", late_s)
                    self.registry.stood_still(late_s)
                self.settle()
                self._prober.look()
            except Exception:
                _log.exception("a look at the federation failed")


def _log_adoptions(before: Federation, after: Federation) -> None:
    adopters = {cluster.key: cluster.adopter for cluster in before.clusters}
    for cluster in after.clusters:
        was = adopters.get(cluster.key, "")
        if cluster.adopter == was:
            continue
        place = f"{cluster.region}/{cluster.name}"
        if cluster.adopter:
            _log.warning("%s serves %s for %s", cluster.adopter, place, ", ".join(cluster.owners))
        else:
            _log.warning("%s serves %s no longer", was, place)
