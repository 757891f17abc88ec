"""The laboratory's policies by name. Importing this offers them, beside production's or replacing simpler ones."""

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
from pinyon_lab.policies.placement import Algorithm1, CacheAffinity, Dynamo, LabDualMap, LabPinyon, Preble
from pinyon_lab.policies.plain import MinTtft, RandomChoice
from pinyon_lab.policies.s3fifo import S3Fifo
from pinyon_lab.policies.sieve import SievePolicy

_WITH_SETTINGS: tuple[Any, ...] = (Algorithm1, CacheAffinity, Preble, Dynamo, LabDualMap, LabPinyon)
PLACEMENT_POLICIES.offer({policy.name: (policy.settings_type, policy) for policy in _WITH_SETTINGS})
PLACEMENT_POLICIES.offer(
    {MinTtft.name: (NoSettings, lambda _: MinTtft()), RandomChoice.name: (NoSettings, lambda _: RandomChoice())}
)
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
