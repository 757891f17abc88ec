"""The laboratory's policies by name, offered on import beside production's, or in place of those with fewer options."""

from __future__ import annotations

from typing import Any

from pinyon.batching.policies import BATCHING_POLICIES
from pinyon.core.policies import NoSettings
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon_lab.policies.batching import Dynamic, Feather, Lpm, Oracle, SglangDfsWeight, SglangFcfs
from pinyon_lab.policies.cache_aware import LabCacheAware, LabCacheAwareSettings
from pinyon_lab.policies.cached_prefix_line import CachedPrefixSettings, LongestMatchSettings
from pinyon_lab.policies.dynamic_batch import DynamicBatchSettings
from pinyon_lab.policies.eviction import Fifo, Gdfs, Lfu
from pinyon_lab.policies.feather import LabFeatherSettings
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
from pinyon_lab.policies.plain import MinTtft, RandomChoice
from pinyon_lab.policies.s3fifo import S3Fifo
from pinyon_lab.policies.sieve import SievePolicy

PLACEMENT = (Algorithm1.name, CacheAffinity.name, Preble.name, Dynamo.name, MinTtft.name, RandomChoice.name)
PLACEMENT_POLICIES.offer(
    {
        Algorithm1.name: (Algorithm1Settings, Algorithm1),
        CacheAffinity.name: (CacheAffinitySettings, CacheAffinity),
        Preble.name: (PrebleSettings, Preble),
        Dynamo.name: (DynamoSettings, Dynamo),
        MinTtft.name: (NoSettings, lambda _: MinTtft()),
        RandomChoice.name: (NoSettings, lambda _: RandomChoice()),
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
EVICTION = ("fifo", "lfu", "gdfs", "s3fifo", "sieve")
EVICTION_POLICIES.offer(
    {
        "fifo": (NoSettings, lambda _: Fifo[Any]()),
        "lfu": (NoSettings, lambda _: Lfu[Any]()),
        "gdfs": (NoSettings, lambda _: Gdfs[Any]()),
        "s3fifo": (NoSettings, lambda _: S3Fifo[Any]()),
        "sieve": (NoSettings, lambda _: SievePolicy[Any]()),
    }
)
ROUTING_POLICIES.offer({LabCacheAware.name: (LabCacheAwareSettings, LabCacheAware)})
