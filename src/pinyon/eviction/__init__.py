"""Eviction: the interface, and one file per policy."""

from pinyon.eviction.interface import NO_TRAITS, EvictionPolicy, Traits, Use
from pinyon.eviction.lru import Lru
from pinyon.eviction.policies import EVICTION_POLICIES

__all__ = ["EVICTION_POLICIES", "NO_TRAITS", "EvictionPolicy", "Lru", "Traits", "Use"]
