"""The batching policies by name."""

from __future__ import annotations

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_POLICIES"]

BATCHING_POLICIES: Registry[BatchingPolicy] = Registry("batching", {"fcfs": (NoSettings, lambda _: Fcfs())})
