"""Second copies go before last ones: a node that has little room first evicts cold objects which other nodes have, too.

No lock is needed. Of the nodes that list an object, the best one by rank keeps it. All nodes rank alike, so whatever
each of them knows of the others, the best holder never gives its copy up for another's."""

from __future__ import annotations

import asyncio
import heapq
import time
from contextlib import suppress

from pinyon.core.clock import Clock
from pinyon.core.errors import PinyonError
from pinyon.store.kv_object import KvObject
from pinyon.store.metadata import StoreMetadata
from pinyon.store.runs import rank, weights_of
from services.kvstore.disk_tier import FREE_SHARE
from services.kvstore.node import StoreNode

PERIOD_S = 1.0
"""The seconds between looks, and after a copy was made until it counts as listed."""
LOOKED_UP = 512
"""The largest number of objects that are looked up in one period."""
WANTED_SHARE = 2 * FREE_SHARE
"""The share of the pool that second copies are evicted for. As with a disk, which keeps as much free."""
COLD_SHARE = 0.5
"""The least time for which an evicted copy was idle, as a share of that of the node's next victim."""


class SecondCopies:
    """The eviction of one node's second copies."""

    def __init__(self, node: StoreNode, metadata: StoreMetadata, *, clock: Clock = time.monotonic) -> None:
        self._node, self._metadata, self._clock = node, metadata, clock
        self.evicted = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            with suppress(PinyonError):  # Redis is away: what is coldest goes, as ever
                await self.make_room()

    async def make_room(self) -> None:
        """Evicts cold copies of what other nodes have, too, if there is little room. Raises Unavailable if Redis is."""
        table = self._node.table
        wanted = int(table.capacity_bytes * WANTED_SHARE) - (table.capacity_bytes - table.used_bytes)
        cold = self._cold() if wanted > 0 else []
        nodes = {each.node_id: each for each in await self._metadata.nodes() if not each.room.leaving} if cold else {}
        own = nodes.pop(self._node.node_id, None)
        if own is None:
            return
        going = []
        located = await self._metadata.locate([held.key for held in cold], nodes.values())
        for held, replicas in zip(cold, located, strict=True):
            holders = weights_of([own, *(each.node for each in replicas if each.size_bytes == held.size)])
            if rank(held.key, holders)[0] == own.node_id:
                self._node.spare.pop(held.key, None)
            elif wanted > 0:
                wanted -= held.size
                going.append(held.key)
        self.evicted += self._node.evict(going)

    def _cold(self) -> list[KvObject]:
        """Returns the coldest objects that may have other copies, if they may go and are cold enough."""
        table, now_s = self._node.table, self._clock()
        head = table.eviction.peek(now_s)
        if head is None or (coldest := table.in_memory(head[1])) is None:
            return []
        latest_s = now_s - COLD_SHARE * (now_s - coldest.used_s)
        listed = [key for key, at_s in self._node.spare.items() if at_s <= now_s - PERIOD_S and key in table.eviction]
        found = [held for key in listed if (held := table.in_memory(key)) is not None and held.used_s <= latest_s]
        return heapq.nsmallest(LOOKED_UP, found, key=lambda held: held.used_s)
