"""Several regions in this process, with one load balancer each; here between hand-written conductors and workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.frontdoor.regions.links import PEER_VERSION
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.routing.target import Report
from tests.integration.lb_harness import MODEL, running_lb, spin

FULL, ROOMY = Report(pending=1, running=1), Report(pending=0, running=0, room=4)
PUSHING = "pending:stale_s=3600"
"""A policy for which the last report counts during a whole test: hand-written instances send none by themselves."""


class Regions(dict[str, Any]):
    """The regions by name, with load balancers of either kind."""

    model = MODEL

    async def knows(self, region: str, other: str, *, room: bool, model: str = "") -> None:
        """Waits until ``region`` has heard that ``other`` has room, or has none."""

        def heard() -> bool:
            served = self[region].lb.models.by_name.get(model or self.model)
            remote = () if served is None else served.layers.remote
            return any(each.region == other and each.live and (each.report.available > 0) is room for each in remote)

        await spin(heard)

    async def meet(self) -> None:
        """Links each region to all others, and waits until they know each other."""
        for name, bench in self.items():
            bench.lb.regions.know([peer_of(other, there) for other, there in self.items() if other != name])
        for name in self:
            for other in self:
                if other != name:
                    await self.knows(name, other, room=True)

    async def idle(self) -> None:
        for bench in self.values():
            await bench.idle()


class TokenRegions(Regions):
    def say(self, region: str, report: Report) -> None:
        """Makes all instances of a region report this."""
        lb = self[region].lb
        for worker in self[region].workers:
            lb.view.heard(worker.address, report, lb.clock())
        lb.models.tell()

    # -- as regions of other makers' servers (UpstreamRegions)

    def asked(self) -> dict[str, int]:
        return {name: len(bench.workers[0].submissions) for name, bench in self.items()}

    async def full(self, region: str, *, full: bool = True) -> None:
        self.say(region, FULL if full else ROOMY)

    async def ask(self, region: str, headers: dict[str, str] | None = None) -> Any:
        return await self[region].complete(max_tokens=3, headers=headers)

    async def held(self, region: str) -> tuple[asyncio.Future[Any], Callable[[], None]]:
        return await self[region].held(max_tokens=1), self[region].workers[0].go.set


def peer_of(name: str, bench: Any) -> PeerBalancer:
    return PeerBalancer(f"lb-{name}", name, bench.endpoints["grpc"])


class PeerCaller:
    """A caller that speaks the protocol, and may act as no load balancer of ours does."""

    kind = peer_pb2.PEER_KIND_UNSPECIFIED

    def __init__(self, bench: Any) -> None:
        self._channel = grpc.aio.insecure_channel(bench.endpoints["grpc"])
        self.call = peer_pb2_grpc.PeerServiceStub(self._channel).Session()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def hello(self, **fields: object) -> None:
        values = {"region": "eu", "lb_id": "x", "version": PEER_VERSION, "kind": self.kind} | fields
        await self.call.write(peer_pb2.SessionRequest(hello=peer_pb2.PeerHello(**values)))

    async def status(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()


@contextlib.asynccontextmanager
async def running_regions(
    *names: str, workers: int = 1, linked: bool = True, clocks: Mapping[str, Clock] | None = None, **settings: object
) -> AsyncIterator[TokenRegions]:
    """Yields regions that know each other."""
    async with contextlib.AsyncExitStack() as stack:
        regions = TokenRegions()
        for name in names:
            options: dict[str, object] = {"pushing": PUSHING} | settings
            clock = (clocks or {}).get(name, time.monotonic)
            one = running_lb(workers, region=name, clock=clock, name=f"lb-{name}", **options)
            regions[name] = await stack.enter_async_context(one)
            regions.say(name, ROOMY)
        if linked:
            await regions.meet()
        yield regions
