"""Pairs of instances by the prefix of a request, one from each of two independent rings (DualMap §3.2, §3.4). The rings
hash consistently among the instances to which a request may go."""

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
"""A number that makes the seeds of the two rings different."""


class GroupRings:
    """The rings of a group of instances by seed, and the last pool asked about, whose instances are on the rings. The
    ``tree`` has the group's prefixes: what is hot among the requests of one model says nothing about another's."""

    __slots__ = ("pool", "rings", "tree")

    def __init__(self, rings: tuple[HashRing, ...], tree: HotnessTree) -> None:
        self.rings, self.tree = rings, tree
        self.pool: Pool | None = None


class PoolRings:
    """The rings of each group of instances. A ring survives changes of its instances. There are at most ``groups_max``
    groups; the least recently used one is dropped.

    A policy gets another pool whenever an instance joins, leaves or drains, and for every request that excludes
    instances or for which some have no room. Making a ring of 1,024 members takes 12 ms, adding a member half a
    millisecond, and passing over a member next to nothing. So a ring keeps members that are not in the pool of this
    request, and :meth:`HashRing.owner` is asked among those that are."""

    def __init__(
        self, virtual_nodes: int, seeds: tuple[int, ...], hotness: HotnessSettings, groups_max: int = GROUPS_MAX
    ) -> None:
        self._virtual_nodes, self._seeds, self._hotness, self._groups_max = virtual_nodes, seeds, hotness, groups_max
        self._of_group: dict[KvGroup, GroupRings] = {}

    def of(self, pool: Pool) -> GroupRings:
        """Returns the rings of the pool's group; all prefill instances of the pool are on them."""
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
        """The rings of the pool that was last asked about, mostly the same as before."""

    def places_of(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[int, int | None]:
        """Counts the request, and returns the places of its two instances in the pool. The second is None if there is
        no other one."""
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
