"""A worker's KV cache over a pool of its own, whose readers the test plays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations
from pinyon.store.lease_keys import LeaseKeys
from pinyon.transfer import Access, RegionDescriptor, TransferLimitReached
from services.worker.kv.cache import KvCache


class FakeGrant(NamedTuple):
    key: bytes
    ranges: tuple[tuple[int, int], ...]
    access: Access
    lifetime_s: float

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(self.key, "cpu:0", max(offset + length for offset, length in self.ranges))


class FakeDoors:
    """The part of a transfer engine that opens memory to peers. While ``idle`` is clear, somebody reads."""

    def __init__(self) -> None:
        self.open: dict[bytes, FakeGrant] = {}
        self.full = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._keys = itertools.count(1)

    def grant(
        self, region: object, ranges: Iterable[tuple[int, int]], access: Access, *, lifetime_s: float
    ) -> FakeGrant:
        if self.full:
            raise TransferLimitReached("no more grants")
        grant = FakeGrant(next(self._keys).to_bytes(16, "big"), tuple(ranges), access, lifetime_s)
        self.open[grant.key] = grant
        return grant

    def revoke_now(self, grant: FakeGrant) -> bool:
        self.open.pop(grant.key, None)
        return self.idle.is_set()

    async def revoke_async(self, grant: FakeGrant) -> None:
        self.revoke_now(grant)
        await self.idle.wait()


def new_cache(layout: KvLayout, blocks: int, clock: Clock, doors: FakeDoors | None = None) -> KvCache:
    pool = BlockPool(blocks, Lru())
    keys = LeaseKeys(doors or FakeDoors(), None)  # type: ignore[arg-type]
    return KvCache(layout, pool, Reservations(pool, LeaseTable()), keys, clock)
