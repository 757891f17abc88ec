"""The eviction policies by name."""

from __future__ import annotations

from typing import Any

from pinyon.core.policies import NoSettings, Registry
from pinyon.eviction.fifo import Fifo
from pinyon.eviction.gdfs import Gdfs
from pinyon.eviction.lfu import Lfu
from pinyon.eviction.lru import Lru
from pinyon.eviction.policy import EvictionPolicy
from pinyon.eviction.reuse_hazard import ReuseHazard, ReuseHazardSettings
from pinyon.eviction.s3fifo import S3Fifo
from pinyon.eviction.sieve import SievePolicy
from pinyon.eviction.workload_aware import WorkloadAware, WorkloadAwareSettings

EVICTION_POLICIES: Registry[EvictionPolicy[Any]] = Registry(
    "eviction",
    {
        "lru": (NoSettings, lambda _: Lru[Any]()),
        "fifo": (NoSettings, lambda _: Fifo[Any]()),
        "lfu": (NoSettings, lambda _: Lfu[Any]()),
        "gdfs": (NoSettings, lambda _: Gdfs[Any]()),
        "s3fifo": (NoSettings, lambda _: S3Fifo[Any]()),
        "sieve": (NoSettings, lambda _: SievePolicy[Any]()),
        "workload_aware": (WorkloadAwareSettings, WorkloadAware[Any]),
        "reuse_hazard": (ReuseHazardSettings, ReuseHazard[Any]),
    },
    EvictionPolicy,
)
