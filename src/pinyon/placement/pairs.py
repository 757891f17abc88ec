"""Two instances by the prefix of a request: one by each of two independent rings (DualMap §3.2, §3.4)."""

from __future__ import annotations

from typing import Final

from pinyon.placement.hotness_tree import HotnessSettings, HotnessTree, HotnessTrees
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementRequest, Pool
from pinyon.placement.pool_rings import PoolRings

SEED_MAX: Final = (1 << 63) - 1
"""Of rings."""

SECOND = 0x9E3779B97F4A7C15
"""Sets the seeds of the two rings apart."""


class Pairs:
    """Remembers which prefixes are hot, and for each group of instances its rings. ``key_tokens``: by so many tokens
    prefixes grow (A.2.1), in whole blocks."""

    def __init__(self, hotness: HotnessSettings, virtual_nodes: int, seed: int, key_tokens: int) -> None:
        self._hotness = HotnessTrees(hotness)
        self._rings = PoolRings(virtual_nodes, (seed, seed ^ SECOND))
        self._key_tokens = key_tokens
        self._pool: Pool | None = None
        """That was asked about last, mostly the same as before; with its tree, if it was asked for, and its rings."""
        self._tree: HotnessTree | None = None

    def of(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[InstanceState, InstanceState | None]:
        """Its two instances; the request is counted. None: there is no other one."""
        first, second = self.places_of(request, pool, now_s)
        return pool.prefills[first], None if second is None else pool.prefills[second]

    def places_of(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[int, int | None]:
        """Their places in the pool."""
        if pool is not self._pool:
            self._one, self._two = self._rings.of(pool)
            self._pool, self._tree = pool, None
        places = pool.place_of
        key = self._key(request, pool, now_s) if request.block_keys else request.request_id.encode()
        first = self._one.owner(key, among=places)
        assert first is not None, "a pool has at least one prefill instance"
        second = self._two.owner(key, other_than=first, among=places)
        return places[first], None if second is None else places[second]

    def _key(self, request: PlacementRequest, pool: Pool, now_s: float) -> bytes:
        if self._tree is None:
            self._tree = self._hotness.of(pool.prefills[0].info.group)
        return self._tree.key_of(request.block_keys, now_s, pool.group_prefills, pool.stride(self._key_tokens))
