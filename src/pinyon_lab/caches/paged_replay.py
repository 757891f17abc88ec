"""A trace replayed without time through the books of a worker with two tiers: hits in each tier, and block moves.

It differs from :mod:`pinyon_lab.caches.replay` in the limits of a worker. A request's own blocks are in use while the
request is served, and cannot be evicted. Blocks beyond the pool's size are not kept. Blocks after a gap are recomputed,
not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinyon.core.block_keys import KEY_BYTES
from pinyon.eviction.interface import Traits
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.paging.block_pool import BlockPool
from pinyon.paging.leases import LeaseTable
from pinyon.paging.reservations import Reservations
from pinyon.paging.second_tier import NO_SLOT, SecondTier


class TierReplay:
    """The books of a worker: a pool of ``capacity`` blocks, a second tier of ``dram`` blocks; copies take no time."""

    def __init__(self, choice: str, capacity: int, dram: int) -> None:
        self._below = SecondTier(dram, EVICTION_POLICIES.make(choice), swaps_out_max=capacity)
        self._pool = BlockPool(capacity, EVICTION_POLICIES.make(choice), self._below)
        self._reservations = Reservations(self._pool, LeaseTable())

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """Serves one request and returns how many of its blocks were hits."""
        unlike = dict.fromkeys(blocks)
        keys = [block.to_bytes(KEY_BYTES, "big", signed=True) for block in unlike][: self._pool.total]
        reservation = self._reservations.reserve(keys, len(keys), now_s, traits)
        if reservation is None:
            raise RuntimeError("a pool that nobody uses has no room")
        hits = reservation.held
        own = reservation.table[hits:]
        after = keys[hits - 1] if hits else None
        duplicates = self._reservations.publish(own, keys[hits:], now_s, traits, hits, after)
        for index, block in duplicates:
            own[index], reservation.table[hits + index] = reservation.table[hits + index], block
        self._reservations.release([own[index] for index, _ in duplicates], now_s)
        self._reservations.release(reservation.table, now_s)
        self._reservations.swapped(sum(swap.out != NO_SLOT for swap in self._reservations.take_swaps()))
        return hits

    def result(self) -> dict[str, Any]:
        return {
            "evicted_blocks": self._pool.evicted,
            "dram_blocks": self._below.slots,
            "dram_hit_blocks": self._below.swapped_in,
            "swapped_out_blocks": self._below.swapped_out,
            "swapped_in_blocks": self._below.swapped_in,
        }
