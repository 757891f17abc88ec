"""The metrics of a store node for Prometheus, exact because they are read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pinyon.runtime.eviction import show_eviction
from pinyon.runtime.metrics import Figures
from services.kvstore.copier import Copier
from services.kvstore.node import StoreNode
from services.kvstore.publisher import MetadataPublisher
from services.kvstore.second_copies import SecondCopies


def register_metrics(
    registry: CollectorRegistry,
    node: StoreNode,
    publisher: MetadataPublisher,
    copier: Copier,
    second_copies: SecondCopies,
    sessions: Callable[[], float],
) -> None:
    """Registers the metrics; ``sessions`` tells whether the conductor knows this node now (0 or 1)."""
    table, counters, metadata = node.table, node.table.counters, publisher.metadata
    quotas = table.quotas
    registry.register(
        Figures(
            "pinyon_kvstore",
            gauges=[
                ("objects", "Readable objects", lambda: len(table)),
                ("leased_objects", "Objects being read", lambda: table.leased_objects),
                ("reserved_objects", "Objects being put", lambda: table.reserved_objects),
                ("pinned_bytes", "Bytes that administrators have pinned", lambda: table.pinned_bytes),
                ("capacity_bytes", "Size of the pool", lambda: table.capacity_bytes),
                ("used_bytes", "Bytes taken by objects and reservations", lambda: table.used_bytes),
                ("leased_bytes", "Bytes that may not go now: read or being saved", lambda: table.leased_bytes),
                ("reserved_bytes", "Bytes of objects being put", lambda: table.reserved_bytes),
                ("lost_bytes", "Bytes whose writer could not be shut out", lambda: table.lost_bytes),
                ("leases", "Live leases of readers", lambda: table.leases),
                ("open_puts", "Puts begun and not ended", lambda: table.open_puts),
                ("writer_keys", "Keys that open memory to writers", lambda: len(node.writers)),
                ("reader_keys", "Keys that open memory to readers", lambda: len(node.readers)),
                ("listed_blocks", "Blocks listed in Redis", lambda: publisher.listed),
                ("leaving", "1 while the node takes no puts, because it is to leave", lambda: node.leaving),
                ("report_sessions", "Conductors that know this node", sessions),
            ],
            counters=[
                ("hit_blocks", "Blocks asked for and leased", lambda: counters.hits),
                ("miss_blocks", "Blocks asked for and not held", lambda: counters.misses),
                ("put_objects", "Objects that became readable", lambda: counters.stored),
                ("put_bytes", "Bytes of objects that became readable", lambda: counters.stored_bytes),
                ("get_bytes", "Bytes of objects that were leased", lambda: counters.leased_bytes),
                ("refused_objects", "Objects for which no room could be made", lambda: counters.refused_slots),
                ("copied_objects", "Objects copied to other nodes", lambda: copier.copied),
                ("copied_bytes", "Bytes of objects copied to other nodes", lambda: copier.copied_bytes),
                ("evicted_copies", "Objects evicted because another node has them", lambda: second_copies.evicted),
                ("over_quota_objects", "Objects that a tenant's quota refused", lambda: counters.over_quota),
                ("corrupt_objects", "Objects dropped because their bytes had changed", lambda: counters.corrupt),
                ("expired_leases", "Leases that ended by their time", lambda: counters.expired_leases),
                ("expired_puts", "Puts that ended by their timeout", lambda: counters.expired_puts),
                ("metadata_failures", "Times that Redis could not be told", lambda: publisher.failures),
                ("metadata_losses", "Times that Redis had lost something", lambda: publisher.losses),
                ("metadata_forgotten_nodes", "Dead nodes removed from Redis", lambda: publisher.forgotten),
                ("metadata_malformed_values", "Values in Redis that made no sense", lambda: metadata.malformed),
            ],
            labelled=[("quota_evicted_objects", "Objects evicted for a quota", "tenant", quotas.evicted.copy)],
            labelled_gauges=[
                ("tenant_used_bytes", "Bytes held by tenants with a quota", "tenant", quotas.held_bytes),
                ("tenant_quota_bytes", "Bytes that a tenant may hold here", "tenant", quotas.limits),
            ],
        )
    )
    tier = node.tier
    if tier is not None:
        log = tier.log
        registry.register(
            Figures(
                "pinyon_kvstore_disk",
                gauges=[
                    ("objects", "Objects on the disk", lambda: len(log)),
                    ("used_bytes", "Bytes of objects on the disk", lambda: log.used_bytes),
                    ("capacity_bytes", "Bytes that the disk tier can use", lambda: log.capacity_bytes),
                    ("unsaved_objects", "Objects that wait to be saved", lambda: tier.unsaved),
                ],
                counters=[
                    ("saved_bytes", "Bytes of objects saved", lambda: tier.saved_bytes),
                    ("written_bytes", "Bytes written, with heads and padding", lambda: tier.written_bytes),
                    ("read_bytes", "Bytes of objects read", lambda: tier.read_bytes),
                    ("promoted_objects", "Objects read into memory", lambda: counters.promoted),
                    ("lost_objects", "Objects evicted before they were saved", lambda: counters.unsaved),
                    ("failures", "Reads and writes that failed", lambda: tier.failures),
                ],
            )
        )
    show_eviction(registry, "kvstore", "objects", table.eviction)
