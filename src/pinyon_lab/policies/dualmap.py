"""DualMap less a part of it, as its paper compares it (Fig. 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pinyon.placement.dualmap import DualMap, DualMapSettings, less_loaded, reuses_more
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Queues
from pinyon.placement.prefix_match import PrefixMatch


class Choice(StrEnum):
    """Which of the two."""

    SLO = "slo"
    CACHE_AFFINITY = "cache_affinity"
    LEAST_LOADED = "least_loaded"
    MIN_TTFT = "min_ttft"


@dataclass(frozen=True, slots=True)
class LabDualMapSettings(DualMapSettings):
    """``choice``: of the two. ``rebalance``: whether what waits may move."""

    choice: Choice = Choice.SLO
    rebalance: bool = True


class LabDualMap(DualMap):
    """See :class:`LabDualMapSettings`."""

    settings_type: ClassVar[type[LabDualMapSettings]] = LabDualMapSettings

    def __init__(self, settings: LabDualMapSettings = LabDualMapSettings()) -> None:
        super().__init__(settings)
        self._choice, self._rebalance = settings.choice, settings.rebalance

    def _taken(self, request: PlacementRequest, both: Sequence[PlacementDecision]) -> int:
        match self._choice:
            case Choice.SLO:
                return super()._taken(request, both)
            case Choice.MIN_TTFT:
                return int(round(both[1].ttft_s, 9) < round(both[0].ttft_s, 9))
            case Choice.CACHE_AFFINITY if (more := reuses_more(both)) is not None:
                return more
        return less_loaded(both)

    def moves(
        self,
        request: PlacementRequest,
        decision: PlacementDecision,
        pool: Pool,
        queues: Queues,
        match: Callable[[PlacementRequest], PrefixMatch],
        now_s: float,
    ) -> list[Move]:
        return super().moves(request, decision, pool, queues, match, now_s) if self._rebalance else []
