"""What goes when room is needed: the interface, and one file per policy."""

from pinyon.eviction.fifo import Fifo
from pinyon.eviction.gdfs import Gdfs
from pinyon.eviction.lfu import Lfu
from pinyon.eviction.lru import Lru
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.eviction.policy import NO_TRAITS, EvictionPolicy, Traits, Use
from pinyon.eviction.s3fifo import S3Fifo
from pinyon.eviction.sieve import SievePolicy

__all__ = [
    "EVICTION_POLICIES",
    "NO_TRAITS",
    "EvictionPolicy",
    "Fifo",
    "Gdfs",
    "Lfu",
    "Lru",
    "S3Fifo",
    "SievePolicy",
    "Traits",
    "Use",
]
