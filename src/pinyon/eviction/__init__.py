"""Eviction: the interface, and one file per policy."""

from pinyon.eviction.lru import Lru
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.eviction.policy import NO_TRAITS, EvictionPolicy, Traits, Use

__all__ = ["EVICTION_POLICIES", "NO_TRAITS", "EvictionPolicy", "Lru", "Traits", "Use"]
