"""pinyon's own placement less a part of it, to see what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pinyon.placement.costs import Costs, CostTerms
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.policy import PlacementRequest, Pool


@dataclass(frozen=True, slots=True)
class LabPinyonSettings(PinyonSettings):
    """``fetch``, ``order``, ``pair``: whether prefixes are fetched, whether the order of service is looked at, and
    whether pairs are preferred."""

    fetch: bool = True
    order: bool = True
    pair: bool = True


class LabPinyon(Pinyon):
    """See :class:`LabPinyonSettings`."""

    settings_type: ClassVar[type[LabPinyonSettings]] = LabPinyonSettings

    def __init__(self, settings: LabPinyonSettings = LabPinyonSettings()) -> None:
        super().__init__(settings, CostTerms(settings.others, settings.fetch, settings.order))
        self._prefers_pairs = settings.pair

    def _of_pair(self, request: PlacementRequest, pool: Pool, costs: Costs, place: int, now_s: float) -> int:
        return super()._of_pair(request, pool, costs, place, now_s) if self._prefers_pairs else place
