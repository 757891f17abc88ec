"""The course of regions' load over a day (SkyWalker §2.2, Figs. 2 and 3a), and the cost of serving it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pinyon.core.errors import InvalidArgument

DAY_H: Final = 24.0
RESERVED: Final = 37.56
ON_DEMAND: Final = 98.32
"""The price of eight H100 in dollars per hour: reserved for three years, and by the hour (§2.1)."""
SHARPNESS: Final = 1.5
"""The wave's exponent, which sharpens the hours around the peak."""
SLOTS: Final = 96
"""The number of slots of a day; within a slot, the load counts as it is at its beginning."""


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """A load with one wave a day. Raises :class:`InvalidArgument` for values out of range."""

    peak_h: float
    """The hour of the peak in UTC."""
    ratio: float
    """The ratio of the highest load to the lowest."""
    most: float = 1.0
    """The highest load, in any unit."""

    def __post_init__(self) -> None:
        if not 0 <= self.peak_h < DAY_H:
            raise InvalidArgument(f"the peak is at an hour from 0 to 24, not at {self.peak_h:g}", field="peak")
        if not 1 <= self.ratio <= 1e6:
            raise InvalidArgument(f"peak to trough is at least 1, not {self.ratio:g}", field="ratio")
        if not 0 <= self.most <= 1e9:
            raise InvalidArgument(f"no such load: {self.most:g}", field="most")

    def at(self, hour: float) -> float:
        """Returns the load at an hour of any day."""
        wave: float = ((1 + math.cos(2 * math.pi * (hour - self.peak_h) / DAY_H)) / 2) ** SHARPNESS
        return self.most * (1 + (self.ratio - 1) * wave) / self.ratio

    def slots(self) -> list[float]:
        return [self.at(place * DAY_H / SLOTS) for place in range(SLOTS)]


WILDCHAT_DAY: Final[Mapping[str, DailyLoad]] = {
    "us": DailyLoad(21.0, 2.88, 1.0),
    "eu": DailyLoad(14.0, 5.0, 1.0),
    "south-asia": DailyLoad(9.5, 15.0, 0.4),
    "asia": DailyLoad(7.0, 8.0, 0.4),
    "oceania": DailyLoad(4.0, 32.64, 0.4),
}
"""The courses of five regions, with the paper's ratios of peak to trough: from 2.88 to 32.64, and 1.29 together. All
peak at three in the afternoon. The regions' shares are chosen so that the last number results."""


def aggregate(courses: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(loads) for loads in zip(*courses, strict=True)]


def variance(loads: Sequence[float]) -> float:
    """Returns peak to trough, which the paper calls variance; infinite if the trough is 0."""
    return max(loads) / min(loads) if min(loads) else math.inf


class DayCosts(NamedTuple):
    """The costs of one day: whole instances, and mean dollars per hour. Reserved instances are there all day."""

    region_local: int
    """The reserved instances for the peak of each region."""
    shared: int
    """The reserved instances for the peak of all regions together."""
    region_local_dollars: float
    shared_dollars: float
    on_demand_dollars: float
    """The cost of as many instances as each moment needs, available at once and always."""

    @property
    def saved(self) -> float:
        """The share that sharing saves of the cost of region-local instances."""
        return 1 - self.shared_dollars / self.region_local_dollars

    @property
    def on_demand_ratio(self) -> float:
        """The cost on demand divided by that of shared instances."""
        return self.on_demand_dollars / self.shared_dollars


def costs(
    loads: Mapping[str, Sequence[float]], per_instance: float, reserved: float = RESERVED, on_demand: float = ON_DEMAND
) -> DayCosts:
    """Returns the costs of ``loads`` by region, in equal slots of a day; an instance serves ``per_instance``. Raises
    :class:`InvalidArgument` if there is nothing to serve."""
    if per_instance <= 0:
        raise InvalidArgument(f"an instance serves something, not {per_instance:g}", field="per_instance")
    together = aggregate(list(loads.values()))
    if not together or max(together) <= 0:
        raise InvalidArgument("there is no load to serve", field="loads")
    local = sum([_instances(max(each), per_instance) for each in loads.values()])
    shared = _instances(max(together), per_instance)
    needed = [_instances(each, per_instance) for each in together]
    return DayCosts(local, shared, local * reserved, shared * reserved, on_demand * sum(needed) / len(needed))


def _instances(load: float, per_instance: float) -> int:
    return math.ceil(load / per_instance - 1e-9)
