"""The placement policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings
from pinyon.placement.algorithm1 import Algorithm1, Algorithm1Settings
from pinyon.placement.by_model import ByModelRegistry
from pinyon.placement.cache_affinity import CacheAffinity, CacheAffinitySettings
from pinyon.placement.dualmap import DualMap, DualMapSettings
from pinyon.placement.dynamo import Dynamo, DynamoSettings
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.least_loaded import LeastLoaded
from pinyon.placement.min_ttft import MinTtft
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.policy import PlacementPolicy
from pinyon.placement.preble import Preble, PrebleSettings
from pinyon.placement.random_choice import RandomChoice
from pinyon.placement.round_robin import RoundRobin

__all__ = ["PLACEMENT_DEFAULT", "PLACEMENT_POLICIES"]

PLACEMENT_DEFAULT = Pinyon.name
"""Of a conductor, and of a simulation."""

PLACEMENT_POLICIES = ByModelRegistry(
    "placement",
    {
        KvCacheCentric.name: (KvCacheCentricSettings, KvCacheCentric),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        Algorithm1.name: (Algorithm1Settings, Algorithm1),
        RandomChoice.name: (NoSettings, lambda _: RandomChoice()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
        CacheAffinity.name: (CacheAffinitySettings, CacheAffinity),
        MinTtft.name: (NoSettings, lambda _: MinTtft()),
        Preble.name: (PrebleSettings, Preble),
        DualMap.name: (DualMapSettings, DualMap),
        Dynamo.name: (DynamoSettings, Dynamo),
        Pinyon.name: (PinyonSettings, Pinyon),
    },
    PlacementPolicy,
)
