"""The target that a user's or session's key falls to on a ring: SkyWalker-CH (§3.2), and the baseline CH of §5.1.

They are one policy. The baseline pushes blindly, so that everyone is available; SkyWalker-CH pushes selectively and
goes on to the next virtual node of an available one (Listing 1, line 26), in both layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from pinyon.core.hash_ring import HashRing
from pinyon.core.policies import check_bounds
from pinyon.routing.plain import PlainPolicy
from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed, least_full

SEED = 0x5357


@dataclass(frozen=True, slots=True)
class ConsistentHashSettings:
    """``virtual_nodes`` of each target on the ring."""

    virtual_nodes: int = 128

    def __post_init__(self) -> None:
        check_bounds(self, virtual_nodes=(1, 4096))


class ConsistentHash(PlainPolicy):
    """The ring depends on the names alone: all load balancers of a region, and of all regions, agree. Who has no key
    goes to the least busy."""

    name: ClassVar[str] = "consistent_hash"

    def __init__(self, settings: ConsistentHashSettings | None = None) -> None:
        self._ring = HashRing((), (settings or ConsistentHashSettings()).virtual_nodes, SEED)

    def add(self, name: str) -> None:
        if name not in self._ring.members:
            self._ring.change((name,), ())

    def remove(self, name: str) -> None:
        if name in self._ring.members:
            self._ring.change((), (name,))

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        if request.hash_key:
            among = {target.name: target for target in available}
            owner = self._ring.owner(request.hash_key.encode(), among=among)
            if owner is not None:
                return among[owner]
        return least_full(available)

    def affinity(self, request: Routed, name: str) -> int:
        """Rings of several layers have nothing in common: of one target of each, the same one for the same key."""
        return xxh3_64_intdigest(f"{request.hash_key}\0{name}".encode(), SEED) if request.hash_key else 0
