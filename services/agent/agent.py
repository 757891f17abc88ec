"""The agent: it registers the server beside it for as long as that lives, and again after each restart."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pinyon.core.block_keys import namespace, secret_id
from pinyon.core.errors import Unavailable
from pinyon.core.layout import UNKNOWN_PACKING, KvLayout
from pinyon.core.request import Role
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.watch import ANSWER_S, PAGE_BYTES_MAX, discover_capacity, discover_models
from pinyon.placement.instances import InstanceInfo
from pinyon.routing.server_load import ServerKind, kind_of_page
from pinyon.runtime.channel import OpenSession
from pinyon.runtime.logging import get_logger
from pinyon.runtime.report_session import ReportSession
from pinyon.runtime.tasks import ended
from services.agent.engine_blocks import COUNTED, EngineBlocks
from services.agent.feed import EventFeed
from services.agent.report import ServerReport, engines, read_cache
from services.agent.settings import AgentSettings

POLL_S = 0.5
"""The time between two questions for health and metrics."""
HEALTH_S = 2.0
"""The time in which a server that lives answers them."""
ADAPTERS_S = 10.0
"""The time between two questions for the adapters that it has loaded."""
MISSED = 2
"""The number of questions for health without a good answer, one after the other, from which on a server drains."""
WARNING_S = 60.0
"""The shortest time between two warnings about batches that make no sense."""
COPIES_MAX = 1 << 20
"""The limit of stored and not removed copies of blocks where the server does not tell how many it has."""

_log = get_logger("agent")


@dataclass(eq=False)
class Agent:
    """The agent of one server, which load balancers reach at ``url``."""

    settings: AgentSettings
    server: Server
    url: str
    instance_id: str
    secret: bytes = field(repr=False)
    connect: OpenSession
    held: EngineBlocks | None = None
    session: ReportSession | None = None
    """The session with the conductor while the server lives."""
    adapters: dict[str, str] = field(default_factory=dict)
    """The paths of the adapters that the server lists, by name."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    async def run(self) -> None:
        """Reports every life of the server, until it is cancelled."""
        why = ""
        while True:
            try:
                info, kind = await self._describe()
            except Unavailable as error:
                if error.message != why:
                    why = error.message
                    _log.warning("%s is not registered: %s", self.url, why)
            else:
                why = ""
                await self._live(info, kind)
            await asyncio.sleep(POLL_S)

    async def _describe(self) -> tuple[InstanceInfo, ServerKind | None]:
        """Returns the registration of the server and its kind, None if it shows no load. Raises :class:`Unavailable`
        that says why it cannot be registered."""
        settings, url = self.settings, self.server.url
        if await self._get(b"/health") is None:
            raise Unavailable("its /health does not answer 200")
        models = await discover_models(self.server)
        if isinstance(models, str):
            raise Unavailable(models)
        name = settings.model or next((name for name, each in models.items() if not each.get("parent")), "")
        if name not in models:
            raise Unavailable(f"it does not list the model {name!r}")
        page = await self._get(b"/metrics") or b""
        if (count := engines(page)) > 1:
            raise Unavailable(f"it has {count} engines: start each as a server of its own, with an agent")
        self.adapters = _adapters(models)
        size, blocks = read_cache(page)
        if not (settings.block_tokens or size):
            raise Unavailable("its metrics do not tell the size of a block: give --block-tokens")
        kind, host = kind_of_page(page), settings.advertise_host or url.host
        context, weights = models[name].get("max_model_len"), f"{name}\0{models[name].get('root')}"
        return InstanceInfo(
            self.instance_id,
            secrets.token_hex(16),
            Role.MIXED,
            f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}",
            name,
            settings.fingerprint or hashlib.sha256(weights.encode("utf-8", "replace")).hexdigest()[:32],
            KvLayout(1, 1, 1, settings.block_tokens or size, "unknown", UNKNOWN_PACKING, 1),
            capacity_blocks=blocks,
            max_batch=0 if kind is None else await discover_capacity(self.server, kind),
            max_context_tokens=context if type(context) is int and 0 < context < 1 << 31 else 0,
            key_secret_id=secret_id(self.secret),
            server_url=self.url,
            keeps_to_itself=True,
        ), kind

    async def _live(self, info: InstanceInfo, kind: ServerKind | None) -> None:
        """Reports one life of the server."""
        settings, layout = self.settings, info.layout
        assert layout is not None
        start = partial(namespace, info.model_fingerprint, layout.layout_id, "", self.secret)
        # Twice the blocks that there are: events that mean something else would make the tables grow.
        copies_max = 2 * info.capacity_blocks or COPIES_MAX
        held = EngineBlocks(start, layout.block_tokens, copies_max, self.counts, self.adapters)
        report = ServerReport(kind, info.capacity_blocks, held)
        session = ReportSession(settings.conductor, info, report, connect=self.connect)
        feed = EventFeed(held, settings.events, settings.replay, settings.topic, session.wake)
        reading = asyncio.create_task(feed.run(), name="events") if settings.events else None
        shown = "no load" if kind is None else f"the load of {kind.name}"
        _log.info("%s serves %s in blocks of %d tokens and shows %s", self.url, info.model, layout.block_tokens, shown)
        session.start()
        self.held, self.session = held, session
        asking = asyncio.create_task(self._ask_adapters(), name="adapters")
        try:
            await self._watch(report, session)
        finally:
            self.held = self.session = None
            await ended(asking)
            await ended(reading)
            await session.close()

    async def _watch(self, report: ServerReport, session: ReportSession) -> None:
        """Reads the server's load, and returns when this life of it is over."""
        clock = asyncio.get_running_loop().time
        heard_s, warned_s, malformed, missed = clock(), -WARNING_S, self.counts["malformed_batches"], 0
        while True:
            well = await self._get(b"/health", HEALTH_S) is not None
            page = await self._get(b"/metrics", HEALTH_S)
            if page and not report.read(page, clock()):
                self.counts["restarts"] += 1
                _log.warning("%s has restarted", self.url)
                return
            heard_s = clock() if well else heard_s
            if clock() - heard_s >= self.settings.gone_s:
                _log.warning("%s is gone", self.url)
                return
            missed = 0 if well else missed + 1
            if report.draining != (missed >= MISSED):
                report.draining = not report.draining
                session.wake()
            if self.counts["malformed_batches"] > malformed and clock() - warned_s >= WARNING_S:
                warned_s, malformed = clock(), self.counts["malformed_batches"]
                _log.warning("%s: %d batches made no sense so far", self.settings.events, malformed)
            await asyncio.sleep(POLL_S)

    async def _ask_adapters(self) -> None:
        """Keeps the table of the adapters as the server's, until it is cancelled."""
        while True:
            await asyncio.sleep(ADAPTERS_S)
            with suppress(Unavailable):
                if not isinstance(models := await discover_models(self.server), str):
                    self.adapters.clear()
                    self.adapters.update(_adapters(models))

    async def _get(self, path: bytes, timeout_s: float = ANSWER_S) -> bytes | None:
        """Returns what the server answers; None if it refuses or does not answer."""
        try:
            status, body = await self.server.ask(path, timeout_s, PAGE_BYTES_MAX)
        except Unavailable:
            return None
        return body if status == 200 else None


def _adapters(models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the paths of the adapters among these models, by name."""
    return {name: str(said.get("root") or "") for name, said in models.items() if said.get("parent")}
