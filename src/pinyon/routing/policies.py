"""The target policies by name: what ``--routing`` chooses."""

from __future__ import annotations

from pinyon.core.policies import NoSettings, Registry
from pinyon.routing.cache_aware import CacheAware, CacheAwareSettings
from pinyon.routing.consistent_hash import ConsistentHash, ConsistentHashSettings
from pinyon.routing.interface import TargetPolicy
from pinyon.routing.plain import LeastLoaded, RoundRobin
from pinyon.routing.prefix_tree import PrefixTree, PrefixTreeSettings

ROUTING_POLICIES: Registry[TargetPolicy] = Registry(
    "routing",
    {
        PrefixTree.name: (PrefixTreeSettings, PrefixTree),
        ConsistentHash.name: (ConsistentHashSettings, ConsistentHash),
        CacheAware.name: (CacheAwareSettings, CacheAware),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
    },
    TargetPolicy,
)
