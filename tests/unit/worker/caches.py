"""A worker's KV cache over a pool of its own; the test plays its readers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinyon.batching import BatchRequest, Fcfs
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.decisions import Admission
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservation, Reservations
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
    """The part of a transfer engine that opens memory to peers; while ``idle`` is clear, a peer reads."""

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
    reservations = Reservations(pool, LeaseTable())
    admission = Admission(Fcfs, pool, reservations, slots=99, headroom=0)
    return KvCache(layout, pool, admission, reservations, keys, clock)


class Holder:
    """A request that takes blocks and gives them back."""

    def __init__(self, cache: KvCache, keys: Sequence[BlockKey], blocks: int) -> None:
        self.number = cache.number()
        self._cache = cache
        asked = BatchRequest(self.number, 1, blocks, tuple(keys), len(keys), arrived_s=cache.clock())
        self.future = cache.reserve(asked)

    @property
    def waits(self) -> bool:
        return not self.future.done()

    @property
    def reservation(self) -> Reservation:
        return self.future.result()

    @property
    def table(self) -> list[int]:
        return self.future.result().table

    def end(self) -> None:
        self._cache.end(self.number, self.table)

    def withdraw(self) -> None:
        self._cache.withdraw(self.number, self.future)
