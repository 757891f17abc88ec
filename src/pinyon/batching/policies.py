"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.batching.service_order import MostInTime, MostInTimeSettings
from pinyon.batching.waiting_line import ByTurn
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_POLICIES"]


def _most_in_time(settings: MostInTimeSettings) -> Callable[[Holdings], BatchingPolicy]:
    return lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings)))


BATCHING_POLICIES: Registry[Callable[[Holdings], BatchingPolicy]] = Registry(
    "batching", {"fcfs": (NoSettings, lambda _: Fcfs), MostInTime.name: (MostInTimeSettings, _most_in_time)}
)
