"""Pairs of instances by the prefix of a request: one by each of two independent rings (DualMap §3.2, §3.4). The rings
are consistent hashing among the instances that a request may go to."""

from __future__ import annotations

from typing import Final

from pinyon.core.hash_ring import ABSENT_MAX, HashRing
from pinyon.placement.hotness_tree import HotnessSettings, HotnessTree, HotnessTrees
from pinyon.placement.instances import KvGroup
from pinyon.placement.policy import PlacementRequest, Pool

GROUPS_MAX = 64

SEED_MAX: Final = (1 << 63) - 1
"""The largest seed of a ring."""

SECOND = 0x9E3779B97F4A7C15
"""A number that sets the seeds of the two rings apart."""


class PoolRings:
    """The rings of each group of instances, which live on while instances come and go.

    A policy is asked with another pool whenever an instance joins, leaves or drains, and for every request that some
    instances have no room for or that excludes some. A ring of 1,024 members takes 12 ms to make, one more on it half a
    millisecond, and one to pass over next to nothing. So a ring keeps members that are not in the pool of this request,
    and :meth:`HashRing.owner` is asked among those that are.
    """

    def __init__(self, virtual_nodes: int, seeds: tuple[int, ...], groups_max: int = GROUPS_MAX) -> None:
        self._virtual_nodes, self._seeds, self._groups_max = virtual_nodes, seeds, groups_max
        self._of_group: dict[KvGroup, tuple[HashRing, ...]] = {}
        self._complete: dict[KvGroup, Pool] = {}
        """The pool that was looked at last, by group: its instances are on the rings."""

    def of(self, pool: Pool) -> tuple[HashRing, ...]:
        """Returns the rings by seed; all prefill instances of the pool are on them."""
        group = pool.prefills[0].info.group
        rings = self._of_group.get(group)
        if rings is None:
            while len(self._of_group) >= self._groups_max:
                oldest = next(iter(self._of_group))
                del self._of_group[oldest], self._complete[oldest]
            rings = self._of_group[group] = tuple(HashRing((), self._virtual_nodes, seed) for seed in self._seeds)
        elif self._complete[group] is pool:
            return rings
        self._complete[group] = pool
        if new := pool.place_of.keys() - rings[0].members:
            gone = set(rings[0].members) - pool.place_of.keys()
            if len(gone) <= len(pool.place_of) + ABSENT_MAX:
                gone = set()
            for ring in rings:
                ring.change(new, gone)
        return rings


class Pairs:
    """The choice of each request's pair of instances. It remembers which prefixes are hot, and the rings of each group.
    ``key_tokens``: the tokens by which prefixes grow (A.2.1), in whole blocks."""

    def __init__(self, hotness: HotnessSettings, virtual_nodes: int, seed: int, key_tokens: int) -> None:
        self._hotness = HotnessTrees(hotness)
        self._rings = PoolRings(virtual_nodes, (seed, seed ^ SECOND))
        self._key_tokens = key_tokens
        self._pool: Pool | None = None
        """The pool that was asked about last, mostly the same as before; its rings and tree are kept, too."""
        self._tree: HotnessTree | None = None

    def places_of(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[int, int | None]:
        """Returns the places of the request's two instances in the pool, and counts the request. The second is None if
        there is no other one."""
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
