"""Load balancers of several regions in this process, each in front of a hand-written inference server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from tests.integration.lb_harness import spin
from tests.integration.regions_harness import Regions
from tests.integration.upstream_parts import MODEL, FakeServer, after, running_upstreams

STREAM = json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()


class UpstreamRegions(Regions):
    model = MODEL

    def asked(self) -> dict[str, int]:
        """Returns the number of requests that the server of each region got."""
        return {name: len(bench.servers[0].asked) for name, bench in self.items()}

    async def full(self, region: str, *, full: bool = True) -> None:
        """Makes all servers of a region report that they are full or not, and waits until its load balancer knows."""
        bench = self[region]
        for server in bench.servers:
            server.waiting = int(full)
        await bench.until(lambda: all(each.report.pending == int(full) for each in bench.lb.fleet.servers.values()))

    async def ask(self, region: str, headers: dict[str, str] | None = None) -> Any:
        return await self[region].chat(headers=headers)

    async def held(self, region: str) -> tuple[asyncio.Future[Any], Callable[[], None]]:
        """Starts a request, which the region's server answers when the returned function is called."""
        (server,), go = self[region].servers, asyncio.Event()
        server.answer = after(go)
        running = asyncio.ensure_future(self.ask(region))
        await spin(lambda: server.open == 1)
        return running, go.set


@contextlib.asynccontextmanager
async def running_upstream_regions(*names: str, linked: bool = True, **settings: Any):
    """Yields a load balancer in front of one server in each region; each knows the others."""
    async with contextlib.AsyncExitStack() as stack:
        regions = UpstreamRegions()
        for name in names:
            options = {"pushing": "pending:stale_s=3600"} | settings
            one = running_upstreams(FakeServer(), name=f"lb-{name}", region=name, **options)
            regions[name] = await stack.enter_async_context(one)
        if linked:
            await regions.meet()
        yield regions
