"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.batching.service_order import MostInTime
from pinyon.batching.waiting_line import ByTurn, RoomInTimeSettings
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_DEFAULT", "BATCHING_POLICIES"]


def _most_in_time(settings: RoomInTimeSettings) -> Callable[[Holdings], BatchingPolicy]:
    return lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings)))


BATCHING_POLICIES: Registry[Callable[[Holdings], BatchingPolicy]] = Registry(
    "batching", {"fcfs": (NoSettings, lambda _: Fcfs), MostInTime.name: (RoomInTimeSettings, _most_in_time)}
)
BATCHING_DEFAULT = "fcfs"
"""Of a worker, and of a simulation of whole machines."""
