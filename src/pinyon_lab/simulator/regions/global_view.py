"""The optimum that Fig. 6 of SkyWalker compares with: a load balancer that sees into the caches of all instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed, least_full
from pinyon_lab.simulator.regions.instances import Instances
from pinyon_lab.simulator.regions.programs import block_keys

__all__ = ["GlobalView"]


class GlobalView:
    """Whoever really holds the longest prefix of a prompt now; of those the least busy."""

    name: ClassVar[str] = "global_view"

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def add(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        keys = block_keys(request.keys)
        held = [self._instances.held(target.name, keys) for target in available]
        most = max(held)
        return least_full([target for target, blocks in zip(available, held, strict=True) if blocks == most])

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        return None

    def affinity(self, request: Routed, name: str) -> int:
        return 0

    def sent(self, request: Routed, name: str) -> None:
        pass
