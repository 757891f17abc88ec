"""The metrics of a store node for Prometheus, exact because they are read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pinyon.runtime.eviction import show_eviction
from pinyon.runtime.metrics import Figures
from services.kvstore.node import StoreNode
from services.kvstore.publisher import MetadataPublisher


def register_metrics(
    registry: CollectorRegistry, node: StoreNode, publisher: MetadataPublisher, sessions: Callable[[], float]
) -> None:
    """Registers the metrics; ``sessions`` tells whether the conductor knows this node now (0 or 1)."""
    table, counters, metadata = node.table, node.table.counters, publisher.metadata
    registry.register(
        Figures(
            "pinyon_kvstore",
            gauges=[
                ("objects", "Readable objects", lambda: len(table)),
                ("leased_objects", "Objects being read", lambda: table.leased_objects),
                ("reserved_objects", "Objects being put", lambda: table.reserved_objects),
                ("capacity_bytes", "Size of the pool", lambda: table.capacity_bytes),
                ("used_bytes", "Bytes taken by objects and reservations", lambda: table.used_bytes),
                ("lost_bytes", "Bytes whose writer could not be shut out", lambda: table.lost_bytes),
                ("leases", "Live leases of readers", lambda: table.leases),
                ("open_puts", "Puts begun and not ended", lambda: table.open_puts),
                ("writer_keys", "Keys that open memory to writers", lambda: len(node.writers)),
                ("reader_keys", "Keys that open memory to readers", lambda: len(node.readers)),
                ("listed_blocks", "Blocks listed in Redis", lambda: publisher.listed),
                ("report_sessions", "Conductors that know this node", sessions),
            ],
            counters=[
                ("hit_blocks", "Blocks asked for and leased", lambda: counters.hits),
                ("miss_blocks", "Blocks asked for and not held", lambda: counters.misses),
                ("put_objects", "Objects that became readable", lambda: counters.stored),
                ("put_bytes", "Bytes of objects that became readable", lambda: counters.stored_bytes),
                ("get_bytes", "Bytes of objects that were leased", lambda: counters.leased_bytes),
                ("refused_objects", "Objects for which no room could be made", lambda: counters.refused_slots),
                ("expired_leases", "Leases that ended by their time", lambda: counters.expired_leases),
                ("expired_puts", "Puts that ended by their timeout", lambda: counters.expired_puts),
                ("metadata_failures", "Times that Redis could not be told", lambda: publisher.failures),
                ("metadata_losses", "Times that Redis had lost something", lambda: publisher.losses),
                ("metadata_purged_blocks", "Entries of dead nodes removed from Redis", lambda: publisher.purged),
                ("metadata_malformed_values", "Values in Redis that made no sense", lambda: metadata.malformed),
            ],
        )
    )
    show_eviction(registry, "kvstore", "objects", table.eviction)
