"""The part of a global pool on one host; it keeps what the host computes, for all instances to fetch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from pinyon.core.block_keys import BlockKey
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceInfo, InstanceState
from pinyon_lab.caches.cache import Cache, each_once, leading_run
from pinyon_lab.simulator.workload import ids_of, packed


@mypyc_attr(allow_interpreted_subclasses=True)
class IndexedCache:
    """A cache that reports its changes to the fleet's index, in the name of the member ``state``."""

    def __init__(self, fleet: Fleet, state: InstanceState, eviction: str, blocks: int) -> None:
        self.cache = Cache(EVICTION_POLICIES.make(eviction), blocks)
        self.state = state
        self._fleet = fleet
        self._changes = 0
        fleet.index.apply_snapshot(state, 0, b"", first=True, last=True)

    def tell(self, blocks: Sequence[int], places: Sequence[int], now_s: float, traits: Traits) -> None:
        """Stores or uses blocks of a prompt."""
        new = [block for block in blocks if block not in self.cache.resident]
        self.cache.tell(blocks, places, now_s, traits)
        self.changed(new, self.cache.shrink(now_s))

    def changed(self, new: Sequence[int], gone: Sequence[int]) -> None:
        """Reports blocks that are stored now, and blocks that are not any more."""
        if new or gone:
            self._changes += 1
            self._fleet.index.apply_delta(self.state, self._changes, packed(new), packed(gone))


class HostStore(IndexedCache):
    """The store node on ``host``."""

    def __init__(self, fleet: Fleet, info: InstanceInfo, host: str, eviction: str, blocks: int, now_s: float) -> None:
        super().__init__(fleet, fleet.join(info, now_s), eviction, blocks)
        self.host = host
        self.read_until_s = 0.0
        """The time at which the SSDs will have done all requested reads, if the store is on SSDs."""
        self.copied_until_s = 0.0
        """The time at which all copies from memory for the own host are done; they are made one after another."""

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading keys that are held."""
        return leading_run(ids_of(keys), self.cache.resident)

    def put(self, keys: Sequence[BlockKey], now_s: float, traits: Traits, first: int = 0) -> None:
        """Stores or uses the blocks of a prompt from ``first`` on; the store knows of those before it."""
        blocks, places = each_once(ids_of(keys))
        if first:
            told = bisect_left(places, first)
            blocks, places = blocks[told:], places[told:]
        self.tell(blocks, places, now_s, traits)
