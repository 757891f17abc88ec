"""Load balancers of several regions in this process, each in front of a hand-written inference server."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from pinyon.frontdoor.regions.peer import PeerBalancer
from tests.integration.upstream_parts import MODEL, Bench, FakeServer, running_upstreams

STREAM = json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()


class Regions(dict[str, Bench]):
    """The regions by name."""

    def asked(self) -> dict[str, int]:
        """Returns the number of requests that the server of each region got."""
        return {name: len(bench.servers[0].asked) for name, bench in self.items()}

    async def knows(self, region: str, other: str, *, room: bool, model: str = MODEL) -> None:
        """Waits until ``region`` has heard that ``other`` has room, or has none."""

        def heard() -> bool:
            remote = self[region].remote(model)
            return any(each.region == other and each.live and (each.report.available > 0) is room for each in remote)

        await self[region].until(heard)

    async def full(self, region: str, *, full: bool = True) -> None:
        """Makes all servers of a region report that they are full or not, and waits until its load balancer knows."""
        bench = self[region]
        for server in bench.servers:
            server.waiting = int(full)
        await bench.until(lambda: all(each.report.pending == int(full) for each in bench.lb.fleet.servers.values()))

    async def idle(self) -> None:
        for bench in self.values():
            await bench.idle()


def peer_of(name: str, bench: Bench) -> PeerBalancer:
    return PeerBalancer(f"lb-{name}", name, bench.endpoints["grpc"])


@contextlib.asynccontextmanager
async def running_upstream_regions(*names: str, linked: bool = True, **settings: Any):
    """Yields a load balancer in front of one server in each region; each knows the others."""
    async with contextlib.AsyncExitStack() as stack:
        regions = Regions()
        for name in names:
            options = {"pushing": "pending:stale_s=3600"} | settings
            one = running_upstreams(FakeServer(), name=f"lb-{name}", region=name, **options)
            regions[name] = await stack.enter_async_context(one)
        if linked:
            for name, bench in regions.items():
                bench.lb.regions.know([peer_of(other, there) for other, there in regions.items() if other != name])
            for name in names:
                for other in names:
                    if other != name:
                        await regions.knows(name, other, room=True)
        yield regions
