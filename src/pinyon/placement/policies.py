"""The placement policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.least_loaded import LeastLoaded
from pinyon.placement.policy import PlacementPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES: dict[str, Callable[[float], PlacementPolicy]] = {
    KvCacheCentric.name: KvCacheCentric,
    LeastLoaded.name: lambda _: LeastLoaded(),
}


def make_policy(name: str, balancing_threshold: float) -> PlacementPolicy:
    """Raises ``ValueError`` for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"no such placement policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](balancing_threshold)
