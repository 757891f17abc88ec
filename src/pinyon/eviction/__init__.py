"""What goes when room is needed: the interface, and one file per policy."""

from pinyon.eviction.lru import Lru
from pinyon.eviction.policy import NO_TRAITS, EvictionPolicy, Traits

__all__ = ["NO_TRAITS", "EvictionPolicy", "Lru", "Traits"]
