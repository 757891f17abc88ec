"""The batching policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, Holdings
from pinyon.batching.service_order import MostInTime, MostInTimeSettings
from pinyon.batching.waiting_line import ByTurn
from pinyon.core.policies import NoSettings, Registry

__all__ = ["BATCHING_DEFAULT", "BATCHING_POLICIES"]


@dataclass(frozen=True, slots=True)
class RoomInTimeSettings(MostInTimeSettings):
    """See :class:`MostInTimeSettings`. Whoever has waited for ``patience_s`` and ``age_s`` has his share, whatever his
    SLO: before a worker refuses him (its ``room_timeout_s``, 20)."""

    age_s: float = 10.0
    patience_s: float = 5.0


def _most_in_time(settings: RoomInTimeSettings) -> Callable[[Holdings], BatchingPolicy]:
    return lambda holdings: Fcfs(holdings, ByTurn(MostInTime(settings)))


BATCHING_POLICIES: Registry[Callable[[Holdings], BatchingPolicy]] = Registry(
    "batching", {"fcfs": (NoSettings, lambda _: Fcfs), MostInTime.name: (RoomInTimeSettings, _most_in_time)}
)
BATCHING_DEFAULT = "fcfs"
"""Of a worker, and of a simulation of whole machines."""
