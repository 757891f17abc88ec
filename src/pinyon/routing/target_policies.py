"""The target policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings, Registry
from pinyon.routing.cache_aware import CacheAware, CacheAwareSettings
from pinyon.routing.consistent_hash import ConsistentHash, ConsistentHashSettings
from pinyon.routing.in_turn import InTurn
from pinyon.routing.least_load import LeastLoad
from pinyon.routing.prefix_tree import PrefixTree, PrefixTreeSettings
from pinyon.routing.target_policy import TargetPolicy

__all__ = ["TARGET_POLICIES"]

TARGET_POLICIES: Registry[TargetPolicy] = Registry(
    "target",
    {
        PrefixTree.name: (PrefixTreeSettings, PrefixTree),
        ConsistentHash.name: (ConsistentHashSettings, ConsistentHash),
        CacheAware.name: (CacheAwareSettings, CacheAware),
        LeastLoad.name: (NoSettings, lambda _: LeastLoad()),
        InTurn.name: (NoSettings, lambda _: InTurn()),
    },
)
