"""Pairs of instances by the prefix of a request: one by each of two independent rings (DualMap §3.2, §3.4). The rings
are consistent hashing among the instances that a request may go to."""

from __future__ import annotations

from typing import Final

from pinyon.core.hash_ring import ABSENT_MAX, HashRing
from pinyon.placement.hotness_tree import HotnessSettings, HotnessTree
from pinyon.placement.instances import KvGroup
from pinyon.placement.policy import PlacementRequest, Pool

GROUPS_MAX = 64

SEED_MAX: Final = (1 << 63) - 1
"""The largest seed of a ring."""

SECOND = 0x9E3779B97F4A7C15
"""A number that sets the seeds of the two rings apart."""


class GroupRings:
    """The rings of a group of instances by seed, and the pool that was looked at last, whose instances are on them. The
    ``tree`` has the group's prefixes: what is hot among the requests of one model says nothing about another's."""

    __slots__ = ("pool", "rings", "tree")

    def __init__(self, rings: tuple[HashRing, ...], tree: HotnessTree) -> None:
        self.rings, self.tree = rings, tree
        self.pool: Pool | None = None


class PoolRings:
    """The rings of each group of instances, which live on while instances come and go. There are at most ``groups_max``
    groups; the least recently used one is dropped.

    A policy is asked with another pool whenever an instance joins, leaves or drains, and for every request that some
    instances have no room for or that excludes some. A ring of 1,024 members takes 12 ms to make, one more on it half a
    millisecond, and one to pass over next to nothing. So a ring keeps members that are not in the pool of this request,
    and :meth:`HashRing.owner` is asked among those that are."""

    def __init__(
        self, virtual_nodes: int, seeds: tuple[int, ...], hotness: HotnessSettings, groups_max: int = GROUPS_MAX
    ) -> None:
        self._virtual_nodes, self._seeds, self._hotness, self._groups_max = virtual_nodes, seeds, hotness, groups_max
        self._of_group: dict[KvGroup, GroupRings] = {}

    def of(self, pool: Pool) -> GroupRings:
        """Returns the rings; all prefill instances of the pool are on them."""
        group = pool.prefills[0].info.group
        known = self._of_group.pop(group, None)
        if known is None:
            while len(self._of_group) >= self._groups_max:
                del self._of_group[next(iter(self._of_group))]
            rings = tuple(HashRing((), self._virtual_nodes, seed) for seed in self._seeds)
            known = GroupRings(rings, HotnessTree(self._hotness))
        self._of_group[group] = known
        if known.pool is pool:
            return known
        known.pool, first = pool, known.rings[0]
        if new := pool.place_of.keys() - first.members:
            gone = set(first.members) - pool.place_of.keys()
            if len(gone) <= len(pool.place_of) + ABSENT_MAX:
                gone = set()
            for ring in known.rings:
                ring.change(new, gone)
        return known


class Pairs:
    """The choice of each request's pair of instances. It remembers which prefixes are hot, and the rings of each group.
    ``key_tokens``: the tokens by which prefixes grow (A.2.1), in whole blocks."""

    def __init__(self, hotness: HotnessSettings, virtual_nodes: int, seed: int, key_tokens: int) -> None:
        self._rings = PoolRings(virtual_nodes, (seed, seed ^ SECOND), hotness)
        self._key_tokens = key_tokens
        self._last: GroupRings | None = None
        """The rings of the pool that was asked about last, mostly the same as before."""

    def places_of(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[int, int | None]:
        """Returns the places of the request's two instances in the pool, and counts the request. The second is None if
        there is no other one."""
        known = self._last
        if known is None or pool is not known.pool:
            known = self._last = self._rings.of(pool)
        places = pool.place_of
        if request.block_keys:
            key = known.tree.key_of(request.block_keys, now_s, pool.group_prefills, pool.stride(self._key_tokens))
        else:
            key = request.request_id.encode()
        one, two = known.rings
        first = one.owner(key, among=places)
        assert first is not None, "a pool has at least one prefill instance"
        second = two.owner(key, other_than=first, among=places)
        return places[first], None if second is None else places[second]
