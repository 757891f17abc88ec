"""The composition root of an agent."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.url import parse_upstreams, read_upstream_keys
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.metrics import Figure, Figures
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.tasks import ended
from services.agent.agent import Agent
from services.agent.engine_blocks import COUNTED
from services.agent.settings import AgentSettings


async def run(settings: AgentSettings, context: ServiceContext) -> None:
    """Reports until told to stop."""
    async with serving(settings, context):
        await context.stopping.wait()


@asynccontextmanager
async def serving(settings: AgentSettings, context: ServiceContext) -> AsyncIterator[Agent]:
    """Yields an agent that reports; then stops it. If the agent fails, the process is told to stop."""
    for name in ("server", "conductor"):
        if not getattr(settings, name):
            raise InvalidArgument(f"an agent needs --{name}")
    (url,) = parse_upstreams(settings.server)
    key = read_upstream_keys(settings.upstream_api_key_file).of(str(url), own=True)
    server = Server(url, ConnectionLimits(), 1, 0, key, ssl.create_default_context() if url.tls else None)
    reached = str(replace(url, host=settings.advertise_host or url.host))
    connect = context.security.channels.sessions_to(peer_name(CONDUCTOR))
    agent = Agent(settings, server, reached, context.instance_id, context.security.secret, connect)
    gauges: list[Figure] = [
        ("held_blocks", "Blocks with a key that the server holds", lambda: len(agent.held or ())),
        (
            "report_sessions",
            "Conductors that know the server",
            lambda: bool(agent.session and agent.session.registered.is_set()),
        ),
    ]
    counters = [(name, text, partial(agent.counts.__getitem__, name)) for name, text in COUNTED.items()]
    context.registry.register(Figures("pinyon_agent", gauges, counters))
    task = asyncio.create_task(agent.run(), name="agent")
    task.add_done_callback(lambda _: context.stopping.set())
    context.ready({"server": reached})
    try:
        yield agent
    finally:
        await ended(task)
        server.close()
