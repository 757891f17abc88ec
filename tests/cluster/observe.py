"""A check that an idle cluster holds nothing of its requests."""

from __future__ import annotations

import asyncio
import time

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from tests.idle import IDLE_GAUGES
from tests.waiting import WAIT_S


def leftovers(cluster: LocalCluster) -> dict[str, float]:
    """Returns gauges that should be zero on an idle cluster and are not."""
    scrape = Scrape(cluster, metrics=IDLE_GAUGES)
    return {name: value for name in IDLE_GAUGES if (value := scrape.total(name))}


async def until_idle(cluster: LocalCluster, timeout_s: float = WAIT_S) -> tuple[float, dict[str, float]]:
    """Waits until no leftovers are there; returns for how long, and those that are left at the deadline.

    Metrics have no event, so it polls, less and less often. It sleeps before each look, as the event loop must close
    dropped sockets first."""
    started_s, pause_s = time.monotonic(), 0.05
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.3)
        left = await asyncio.to_thread(leftovers, cluster)
        waited_s = time.monotonic() - started_s
        if not left or waited_s > timeout_s:
            return waited_s, left


async def wait_idle(cluster: LocalCluster, timeout_s: float = WAIT_S) -> None:
    _, left = await until_idle(cluster, timeout_s)
    assert not left, f"left on an idle cluster: {left}"
