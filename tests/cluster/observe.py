"""Looking at a running cluster from outside: its metrics, and whether anything is left when it is idle."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families

from services.cluster import LocalCluster


class Scrape:
    """The metrics of every living service of a cluster, or of those in ``only``, at one moment."""

    def __init__(self, cluster: LocalCluster, only: Collection[str] | None = None) -> None:
        self.samples: dict[tuple[str, str, tuple[str, ...]], float] = {}
        for name, service in cluster.services.items():
            if not service.alive or (only is not None and name not in only):
                continue
            with urllib.request.urlopen(f"http://{service.endpoints['metrics']}/metrics", timeout=5) as reply:
                for family in text_string_to_metric_families(reply.read().decode()):
                    for sample in family.samples:
                        key = (name, sample.name, tuple(sample.labels.values()))
                        self.samples[key] = self.samples.get(key, 0.0) + sample.value

    def total(self, metric: str) -> float:
        """Sum over services and labels. A metric nobody has is an error: a misspelt name must not read as zero."""
        values = [value for (_, name, _), value in self.samples.items() if name == metric]
        assert values, f"no service has a metric {metric}"
        return sum(values)

    def of(self, service: str, metric: str) -> float:
        """Sum over the labels of one service's metric; it must have it."""
        values = [value for (owner, name, _), value in self.samples.items() if (owner, name) == (service, metric)]
        assert values, f"{service} has no metric {metric}"
        return sum(values)

    def labelled(self, metric: str, label: str) -> float:
        """Sum over services of the samples with this label value; 0 where it has not occurred yet."""
        return sum(value for (_, name, labels), value in self.samples.items() if name == metric and label in labels)


# What must be zero when nothing is going on, on every service: a slot, lease, buffer or queue entry that was left.
IDLE_GAUGES = (
    "pinyon_lb_queue_requests",
    "pinyon_lb_in_flight_requests",
    "pinyon_lb_placing_requests",
    "pinyon_lb_worker_streams",
    "pinyon_lb_counted_placements",
    "pinyon_conductor_inflight_prefills",
    "pinyon_conductor_inflight_placements",
    "pinyon_kvstore_leased_objects",
    "pinyon_kvstore_reserved_objects",
    "pinyon_kvstore_leases",
    "pinyon_kvstore_open_puts",
    "pinyon_kvstore_writer_regions",
    "pinyon_kvstore_lost_bytes",
    "pinyon_worker_owned_requests",
    "pinyon_worker_pending_requests",
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
    "pinyon_worker_used_blocks",
)


def leftovers(cluster: LocalCluster) -> dict[str, float]:
    """Gauges that should be zero on an idle cluster and are not."""
    scrape = Scrape(cluster)
    return {name: value for name in IDLE_GAUGES if (value := scrape.total(name))}


async def wait_idle(cluster: LocalCluster, timeout_s: float = 30.0) -> None:
    """Until no leftovers are there; fails with what is left. Metrics have no event to wait for, so it polls.

    It yields to the event loop first and between looks: a socket that was dropped is closed by the loop.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        await asyncio.sleep(0.05)
        left = await asyncio.to_thread(leftovers, cluster)
        if not left:
            return
        assert time.monotonic() < deadline, f"left on an idle cluster: {left}"
