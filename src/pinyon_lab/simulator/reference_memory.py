"""The blocks of the plain reference: in a cache of each instance, or in one pool of all instances.

In a pool, each block is in one place. A prompt reuses the longest leading run of blocks that the pool holds when
service starts. Those of other instances are moved to its instance first, but also stay where they are. New blocks are
kept by the instance that computed them. An SSD tier is exclusive: it takes what its instance's cache has no room for,
and loses its least recently used blocks. A block that is used returns to the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pinyon.eviction import Traits
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceState
from pinyon_lab.caches.cache import each_once, leading_run
from pinyon_lab.simulator.host_store import IndexedCache

FETCH_US, SSD_US = 4.6, 19.1
"""The times for Qwen2.5-7B, 57,344 bytes of KV per token, at 12.5 GB/s of a NIC and 3 GB/s of an SSD."""


@dataclass(frozen=True, slots=True)
class PoolRules:
    """The µs to move a token's KV between two instances, and in addition from an SSD. Each instance has ``ssd_blocks``
    on an SSD; 0: it has none."""

    fetch_us: float
    ssd_us: float = 0.0
    ssd_blocks: int = 0


class OwnCache(IndexedCache):
    """The cache of one instance for itself."""

    def read(self, blocks: Sequence[int], now_s: float, traits: Traits) -> tuple[int, float]:
        """Returns the leading blocks that a prompt reuses whose service starts, and the microseconds to move those that
        are elsewhere, for a token of each block."""
        return leading_run(blocks, self.cache.resident), 0.0

    def store(self, blocks: Sequence[int], now_s: float, traits: Traits) -> None:
        """Stores all blocks of a prompt whose service ends."""
        self.tell(*each_once(blocks), now_s, traits)


class PooledCache(OwnCache):
    """The part of a pool that one instance keeps."""

    def __init__(
        self,
        fleet: Fleet,
        state: InstanceState,
        eviction: str,
        blocks: int,
        rules: PoolRules,
        where: dict[int, PooledCache],
    ) -> None:
        """Starts empty. ``where`` maps each block to the part that holds it; all parts share it."""
        super().__init__(fleet, state, eviction, blocks)
        self._rules, self._where = rules, where
        self._ssd: OrderedDict[int, None] = OrderedDict()  # the least recently used in front

    def read(self, blocks: Sequence[int], now_s: float, traits: Traits) -> tuple[int, float]:
        count = leading_run(blocks, self._where)
        moving_us = 0.0
        parts: dict[PooledCache, tuple[list[int], list[int]]] = {}
        for place, block in enumerate(blocks[:count]):
            part = self._where[block]
            if part is not self:
                moving_us += self._rules.fetch_us
            if block in part._ssd:
                moving_us += self._rules.ssd_us
            told = parts.setdefault(part, ([], []))
            told[0].append(block)
            told[1].append(place)
        for part, told in parts.items():
            if part is not self:  # its own blocks are told when service ends, with the new ones
                part.tell(*told, now_s, traits)
        return count, moving_us

    def store(self, blocks: Sequence[int], now_s: float, traits: Traits) -> None:
        mine, places = [], []
        for block, place in zip(*each_once(blocks), strict=True):
            if self._where.get(block, self) is self:
                mine.append(block)
                places.append(place)
        self.tell(mine, places, now_s, traits)

    def tell(self, blocks: Sequence[int], places: Sequence[int], now_s: float, traits: Traits) -> None:
        where, ssd = self._where, self._ssd
        new = [block for block in blocks if block not in where]
        where.update(dict.fromkeys(new, self))
        for block in blocks:
            ssd.pop(block, None)
        self.cache.tell(blocks, places, now_s, traits)
        gone: Iterable[int] = self.cache.shrink(now_s)
        if self._rules.ssd_blocks:
            ssd.update(dict.fromkeys(gone))
            gone = [ssd.popitem(last=False)[0] for _ in range(len(ssd) - self._rules.ssd_blocks)]
        for block in gone:
            del where[block]
        self.changed(new, list(gone))
