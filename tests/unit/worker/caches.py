"""A worker's KV cache over a pool of its own."""

from __future__ import annotations

from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations
from services.worker.kv.cache import KvCache


def new_cache(layout: KvLayout, blocks: int, clock: Clock) -> KvCache:
    pool = BlockPool(blocks, Lru())
    return KvCache(layout, pool, Reservations(pool, LeaseTable()), clock)
