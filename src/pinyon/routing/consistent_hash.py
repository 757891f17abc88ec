"""The target that a user's or session's key falls to on a hash ring: SkyWalker-CH (§3.2), and baseline CH of §5.1.

Both are one policy. The baseline pushes blindly, so every target is available. SkyWalker-CH pushes selectively and goes
on to the next virtual node of an available target (Listing 1, line 26), in both layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from pinyon.core.hash_ring import HashRing
from pinyon.core.policies import check_bounds
from pinyon.routing.plain import PlainPolicy
from pinyon.routing.target import Routed, Target, least_full

SEED = 0x5357


@dataclass(frozen=True, slots=True)
class ConsistentHashSettings:
    """The number of ``virtual_nodes`` of each target on the ring."""

    virtual_nodes: int = 128

    def __post_init__(self) -> None:
        check_bounds(self, virtual_nodes=(1, 4096))


class ConsistentHash(PlainPolicy):
    """A ring of names alone, so that load balancers of all regions agree. Without a key: the least full target."""

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
        """Returns a hash of key and target, so that a key prefers the same target among those of unrelated rings."""
        return xxh3_64_intdigest(f"{request.hash_key}\0{name}".encode(), SEED) if request.hash_key else 0
