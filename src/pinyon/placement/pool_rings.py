"""Rings of pools: consistent hashing among the instances that a request may go to (DualMap §3.4)."""

from __future__ import annotations

from pinyon.core.hash_ring import ABSENT_MAX, HashRing
from pinyon.placement.instances import KvGroup
from pinyon.placement.policy import Pool

GROUPS_MAX = 64


class PoolRings:
    """For each group of instances, rings that live on while instances come and go.

    A policy is asked with another pool whenever an instance joins, leaves or drains, and for every request that some
    instances have no room for or that excludes some. A ring of 1,024 members takes 12 ms to make, one
    more on it half a millisecond, and one to pass over next to nothing. So a ring keeps who is not in the pool of this
    request, and :meth:`HashRing.owner` is asked among those who are.
    """

    def __init__(self, virtual_nodes: int, seeds: tuple[int, ...], groups_max: int = GROUPS_MAX) -> None:
        self._virtual_nodes, self._seeds, self._groups_max = virtual_nodes, seeds, groups_max
        self._of_group: dict[KvGroup, tuple[HashRing, ...]] = {}
        self._complete: dict[KvGroup, Pool] = {}
        """The pool that was looked at last: its instances are on the rings."""

    def of(self, pool: Pool) -> tuple[HashRing, ...]:
        """By seed; all prefill instances of the pool are on them."""
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
        if new := pool.by_id.keys() - rings[0].members:
            gone = set(rings[0].members) - pool.by_id.keys()
            if len(gone) <= len(pool.by_id) + ABSENT_MAX:
                gone = set()
            for ring in rings:
                ring.change(new, gone)
        return rings
