"""Load balancers of several regions in this process, each in front of a hand-written inference server."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tests.integration.regions_harness import Regions
from tests.integration.upstream_parts import MODEL, FakeServer, running_upstreams

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
