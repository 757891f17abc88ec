"""Several regions in this process: one load balancer each, between hand-written conductors and workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from pinyon.core.clock import Clock
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.routing.target import Report
from tests.integration.lb_harness import MODEL, Bench, running_lb, spin

FULL, ROOMY = Report(pending=1, running=1), Report(pending=0, running=0, room=4)
PUSHING = "pending:stale_s=3600"
"""A policy for which the last report counts during a whole test: hand-written instances send none by themselves."""


class Regions(dict[str, Bench]):
    """The regions by name."""

    def say(self, region: str, report: Report) -> None:
        """Makes all instances of a region report this."""
        lb = self[region].lb
        for worker in self[region].workers:
            lb.view.heard(worker.address, report, lb.clock())
        lb.models.tell()

    async def knows(self, region: str, other: str, report: Report) -> None:
        """Waits until ``region`` has heard that ``other`` has room, or has none."""
        two = self[region].lb.models.of(MODEL).layers
        assert two is not None
        available = int(report.pending == 0)

        def heard() -> bool:
            return any(
                each.region == other and each.live and bool(each.report.available > 0) is bool(available)
                for each in two.remote
            )

        await spin(heard)

    async def idle(self) -> None:
        for bench in self.values():
            await bench.idle()


def peer_of(name: str, bench: Bench) -> PeerBalancer:
    return PeerBalancer(f"lb-{name}", name, bench.endpoints["grpc"])


@contextlib.asynccontextmanager
async def running_regions(
    *names: str,
    workers: int = 1,
    linked: bool = True,
    clocks: Mapping[str, Clock] | None = None,
    **settings: object,
) -> AsyncIterator[Regions]:
    """Yields regions that know each other."""
    async with contextlib.AsyncExitStack() as stack:
        regions = Regions()
        for name in names:
            options: dict[str, object] = {"pushing": PUSHING} | settings
            clock = (clocks or {}).get(name, time.monotonic)
            one = running_lb(workers, region=name, clock=clock, name=f"lb-{name}", **options)
            regions[name] = await stack.enter_async_context(one)
            regions.say(name, ROOMY)
        if linked:
            for name, bench in regions.items():
                bench.lb.regions.know([peer_of(other, there) for other, there in regions.items() if other != name])
            for name in names:
                for other in names:
                    if other != name:
                        await regions.knows(name, other, ROOMY)
        yield regions
