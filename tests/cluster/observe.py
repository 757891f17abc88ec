"""A check that an idle cluster holds nothing of its requests."""

from __future__ import annotations

import asyncio
import time

from launch.cluster import LocalCluster
from launch.scrape import Scrape

# Zero on every idle service; otherwise a slot, lease, buffer or queue entry was left.
IDLE_GAUGES = (
    "pinyon_lb_queue_requests",
    "pinyon_lb_in_flight_requests",
    "pinyon_lb_placing_requests",
    "pinyon_lb_worker_streams",
    "pinyon_lb_unfinished_tokens",
    "pinyon_lb_counted_placements",
    "pinyon_conductor_inflight_prefills",
    "pinyon_conductor_inflight_placements",
    "pinyon_kvstore_leased_objects",
    "pinyon_kvstore_reserved_objects",
    "pinyon_kvstore_leases",
    "pinyon_kvstore_open_puts",
    "pinyon_kvstore_writer_keys",
    "pinyon_kvstore_reader_keys",
    "pinyon_kvstore_lost_bytes",
    "pinyon_worker_owned_requests",
    "pinyon_worker_pending_requests",
    "pinyon_worker_waiting_for_room",
    "pinyon_worker_running_requests",
    "pinyon_worker_queued_prefills",
    "pinyon_worker_running_prefills",
    "pinyon_worker_pending_prefill_tokens",
    "pinyon_worker_room_waiters",
    "pinyon_worker_pushes",
    "pinyon_worker_remote_prefills",
    "pinyon_worker_leases",
    "pinyon_worker_outbox_tokens",
    "pinyon_worker_store_queue_blocks",
    "pinyon_worker_spared_blocks",
    "pinyon_worker_used_blocks",
    "pinyon_transfer_grants",
)


def leftovers(cluster: LocalCluster) -> dict[str, float]:
    """Returns gauges that should be zero on an idle cluster and are not."""
    scrape = Scrape(cluster, metrics=IDLE_GAUGES)
    return {name: value for name in IDLE_GAUGES if (value := scrape.total(name))}


async def wait_idle(cluster: LocalCluster, timeout_s: float = 90.0) -> None:
    """Waits until no leftovers are there; fails with those left at the deadline.

    Metrics have no event, so it polls, less and less often. It sleeps before each look, as the event loop must close
    dropped sockets first.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.05
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.3)
        left = await asyncio.to_thread(leftovers, cluster)
        if not left:
            return
        assert time.monotonic() < deadline, f"left on an idle cluster: {left}"
