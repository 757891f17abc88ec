"""The placement policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings
from pinyon.placement.by_model import ByModelRegistry
from pinyon.placement.dualmap import DualMap, DualMapSettings
from pinyon.placement.interface import PlacementPolicy
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.plain import LeastLoaded, MinTtft, RandomChoice, RoundRobin

PLACEMENT_DEFAULT = Pinyon.name
"""Of a conductor, and of a simulation."""

PLACEMENT_POLICIES = ByModelRegistry(
    "placement",
    {
        KvCacheCentric.name: (KvCacheCentricSettings, KvCacheCentric),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        RandomChoice.name: (NoSettings, lambda _: RandomChoice()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
        MinTtft.name: (NoSettings, lambda _: MinTtft()),
        DualMap.name: (DualMapSettings, DualMap),
        Pinyon.name: (PinyonSettings, Pinyon),
    },
    PlacementPolicy,
)
