"""The eviction policies by name."""

from __future__ import annotations

from typing import Any

from pinyon.core.policies import NoSettings, Registry
from pinyon.eviction.fifo import Fifo
from pinyon.eviction.lru import Lru
from pinyon.eviction.policy import EvictionPolicy

__all__ = ["EVICTION_POLICIES"]

EVICTION_POLICIES: Registry[EvictionPolicy[Any]] = Registry(
    "eviction",
    {
        "lru": (NoSettings, lambda _: Lru[Any]()),
        "fifo": (NoSettings, lambda _: Fifo[Any]()),
    },
)
