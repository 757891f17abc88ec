"""The laboratory's policies by name. Imported once, this has the process offer them beside those of production, or in
place of those of their names, which have more options here."""

from __future__ import annotations

from pinyon.batching.policies import BATCHING_POLICIES
from pinyon.core.policies import NoSettings
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon_lab.policies.batching import Dynamic, Feather, Lpm, Oracle, SglangDfsWeight, SglangFcfs
from pinyon_lab.policies.cache_aware import LabCacheAware, LabCacheAwareSettings
from pinyon_lab.policies.cached_prefix_line import CachedPrefixSettings, LongestMatchSettings
from pinyon_lab.policies.dynamic_batch import DynamicBatchSettings
from pinyon_lab.policies.group_rounds import OracleSettings
from pinyon_lab.policies.placement import (
    Algorithm1,
    Algorithm1Settings,
    CacheAffinity,
    CacheAffinitySettings,
    Dynamo,
    DynamoSettings,
    LabDualMap,
    LabDualMapSettings,
    LabPinyon,
    LabPinyonSettings,
    Preble,
    PrebleSettings,
)
from pinyon_lab.policies.tip_tree import LabFeatherSettings

PLACEMENT = (Algorithm1.name, CacheAffinity.name, Preble.name, Dynamo.name)
PLACEMENT_POLICIES.offer(
    {
        Algorithm1.name: (Algorithm1Settings, Algorithm1),
        CacheAffinity.name: (CacheAffinitySettings, CacheAffinity),
        Preble.name: (PrebleSettings, Preble),
        Dynamo.name: (DynamoSettings, Dynamo),
        LabDualMap.name: (LabDualMapSettings, LabDualMap),
        LabPinyon.name: (LabPinyonSettings, LabPinyon),
    }
)
BATCHING = ("oracle", "lpm", "dfs_weight", "sglang_fcfs", "dynamic")
BATCHING_POLICIES.offer(
    {
        "feather": (LabFeatherSettings, Feather),
        "oracle": (OracleSettings, Oracle),
        "lpm": (LongestMatchSettings, Lpm),
        "dfs_weight": (CachedPrefixSettings, SglangDfsWeight),
        "sglang_fcfs": (NoSettings, lambda _: SglangFcfs()),
        "dynamic": (DynamicBatchSettings, Dynamic),
    }
)
ROUTING_POLICIES.offer({LabCacheAware.name: (LabCacheAwareSettings, LabCacheAware)})
