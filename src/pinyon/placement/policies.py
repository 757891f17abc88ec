"""The placement policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings, Registry
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.least_loaded import LeastLoaded
from pinyon.placement.policy import PlacementPolicy

__all__ = ["PLACEMENT_POLICIES"]

PLACEMENT_POLICIES: Registry[PlacementPolicy] = Registry(
    "placement",
    {
        KvCacheCentric.name: (KvCacheCentricSettings, KvCacheCentric),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
    },
)
