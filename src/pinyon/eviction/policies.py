"""The eviction policies by name."""

from __future__ import annotations

from typing import Any

from pinyon.core.policies import NoSettings, Registry
from pinyon.eviction.interface import EvictionPolicy
from pinyon.eviction.lru import Lru
from pinyon.eviction.reuse_hazard import ReuseHazard, ReuseHazardSettings
from pinyon.eviction.workload_aware import WorkloadAware, WorkloadAwareSettings

EVICTION_POLICIES: Registry[EvictionPolicy[Any]] = Registry(
    "eviction",
    {
        "lru": (NoSettings, lambda _: Lru[Any]()),
        "workload_aware": (WorkloadAwareSettings, WorkloadAware[Any]),
        "reuse_hazard": (ReuseHazardSettings, ReuseHazard[Any]),
    },
    EvictionPolicy,
)
