"""The placement policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings
from pinyon.placement.by_model import ByModelRegistry
from pinyon.placement.dualmap import DualMap, DualMapSettings
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.plain import LeastLoaded, RoundRobin

PLACEMENT_DEFAULT = Pinyon.name
"""Of a conductor, and of a simulation."""

PLACEMENT_POLICIES = ByModelRegistry(
    "placement",
    {
        KvCacheCentric.name: (KvCacheCentricSettings, KvCacheCentric),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
        DualMap.name: (DualMapSettings, DualMap),
        Pinyon.name: (PinyonSettings, Pinyon),
    },
    PlacementPolicy,
)
