"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_POLICIES"]

BATCHING_POLICIES: Registry[Callable[[Holdings], BatchingPolicy]] = Registry(
    "batching", {"fcfs": (NoSettings, lambda _: Fcfs)}
)
