"""The target policies by name: what ``--routing`` chooses."""

from __future__ import annotations

from pinyon.core.policies import NoSettings, Registry
from pinyon.routing.cache_aware import CacheAware, CacheAwareSettings
from pinyon.routing.consistent_hash import ConsistentHash, ConsistentHashSettings
from pinyon.routing.interface import TargetPolicy
from pinyon.routing.plain import LeastLoadedTarget, RoundRobinTarget
from pinyon.routing.prefix_tree import LongestPrefix, PrefixTreeSettings

ROUTING_POLICIES: Registry[TargetPolicy] = Registry(
    "routing",
    {
        LongestPrefix.name: (PrefixTreeSettings, LongestPrefix),
        ConsistentHash.name: (ConsistentHashSettings, ConsistentHash),
        CacheAware.name: (CacheAwareSettings, CacheAware),
        LeastLoadedTarget.name: (NoSettings, lambda _: LeastLoadedTarget()),
        RoundRobinTarget.name: (NoSettings, lambda _: RoundRobinTarget()),
    },
    TargetPolicy,
)
