"""The part of a global pool on one host, which keeps what the host computes for all instances to fetch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.eviction.policy import learner
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceInfo, InstanceState
from pinyon_lab.caches.cache import Cache, each_once, leading_run
from pinyon_lab.simulator.workload import ids_of, key_of


class HostStore:
    """The store node on ``host``."""

    def __init__(self, fleet: Fleet, info: InstanceInfo, host: str, eviction: str, blocks: int, now_s: float) -> None:
        policy = EVICTION_POLICIES.make(eviction)
        self.host = host
        self._cache = Cache(policy, blocks, learner(policy))
        self._fleet = fleet
        self.state: InstanceState = fleet.join(info, now_s)
        fleet.index.apply_snapshot(self.state, 0, b"", first=True, last=True)
        self._seq = 0
        self.read_until_s = 0.0
        """The time at which all reads asked of the SSDs are done, if the store is on SSDs."""
        self.copied_until_s = 0.0
        """The time at which all copies from memory for its own host are done; they are made one after the other."""

    def keys(self) -> list[BlockKey]:
        """Returns the keys that are held, in no order."""
        return [*map(key_of, self._cache.resident)]

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading keys that are held."""
        return leading_run(ids_of(keys), self._cache.resident)

    def put(self, keys: Sequence[BlockKey], now_s: float, traits: Traits, first: int = 0) -> None:
        """Stores or uses the blocks of a prompt from ``first`` on; the store was told of those before it."""
        blocks, places = each_once(ids_of(keys))
        if first:
            told = bisect_left(places, first)
            blocks, places = blocks[told:], places[told:]
        cache = self._cache
        new = [block for block in blocks if block not in cache.resident]
        cache.tell(blocks, places, now_s, traits)
        gone = cache.shrink(now_s)
        if new or gone:
            self._seq += 1
            stored, removed = pack_keys([*map(key_of, new)]), pack_keys([*map(key_of, gone)])
            self._fleet.index.apply_delta(self.state, self._seq, stored, removed)
