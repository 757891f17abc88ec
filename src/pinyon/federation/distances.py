"""Positions of regions on Earth, and distances between regions, as round trips in milliseconds.

The best source counts: load balancers' measurements (the median, both ways), otherwise a table, otherwise the
positions. A measurement still counts when one of the two is gone: that is when its distance is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import asin, cos, radians, sin, sqrt
from statistics import median
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geographies

EARTH_RADIUS_KM = 6371.0088
"""The Earth's mean radius as defined by the IUGG."""
MS_PER_KM = 0.015
"""A round trip's milliseconds per kilometre: 0.01 for light in glass fibre, more as cables leave the great circle."""
REGIONS_MAX = 256

Pair = tuple[str, str]
"""Names of two regions, in order."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in degrees. Raises :class:`InvalidArgument` for a position that is not on Earth."""

    latitude: float
    """Degrees north of the equator, in [-90, 90]."""
    longitude: float
    """Degrees east of Greenwich, in [-180, 180]."""

    def __post_init__(self) -> None:
        if not -90.0 <= self.latitude <= 90.0 or not -180.0 <= self.longitude <= 180.0:
            raise InvalidArgument(
                f"a position is a latitude in [-90, 90] and a longitude in [-180, 180], not "
                f"{self.latitude}, {self.longitude}",
                field="position",
            )

    def km_to(self, other: Position) -> float:
        """Returns the distance along the great circle (haversine formula)."""
        north, other_north = radians(self.latitude), radians(other.latitude)
        up = sin((other_north - north) / 2)
        along = sin(radians(other.longitude - self.longitude) / 2)
        chord = up * up + cos(north) * cos(other_north) * along * along
        return 2 * EARTH_RADIUS_KM * asin(sqrt(min(1.0, chord)))


def parse_position(text: str) -> Position | None:
    """Parses ``LATITUDE,LONGITUDE``; returns None for an empty text. Raises ``ValueError``."""
    if not text:
        return None
    latitude, _, longitude = text.partition(",")
    try:
        return Position(float(latitude), float(longitude))
    except (ValueError, InvalidArgument):
        raise ValueError(f"{text!r} is no LATITUDE,LONGITUDE in degrees") from None


@dataclass(frozen=True, slots=True)
class Distances:
    measured: Mapping[Pair, tuple[float, ...]] = field(default_factory=dict)
    table: Mapping[Pair, float] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)

    def ms(self, one: str, other: str) -> float:
        """Returns the milliseconds of a round trip between two regions; infinite if unknown."""
        if one == other:
            return 0.0
        pair = (one, other) if one < other else (other, one)
        if measured := self.measured.get(pair):
            return median(measured)
        told = self.table.get(pair)
        if told is not None:
            return told
        here, there = self.positions.get(one), self.positions.get(other)
        return math.inf if here is None or there is None else here.km_to(there) * MS_PER_KM


def parse_distances(document: Any) -> dict[Pair, float]:
    """Parses a file's JSON: ``{REGION: {REGION: MS, …}, …}``, each pair once. Raises :class:`InvalidArgument`."""
    if not isinstance(document, dict) or len(document) > REGIONS_MAX:
        raise InvalidArgument(f"distances must be an object of at most {REGIONS_MAX} regions", field="distances")
    table: dict[Pair, float] = {}
    for one, row in document.items():
        check_geographies((one,), "distances")
        if not isinstance(row, dict) or len(row) > REGIONS_MAX:
            raise InvalidArgument(f"{one} must be an object of at most {REGIONS_MAX} regions", field="distances")
        for other, far_ms in row.items():
            check_geographies((other,), "distances")
            if isinstance(far_ms, bool) or not isinstance(far_ms, (int, float)) or not 0 <= far_ms < math.inf:
                raise InvalidArgument(f"{one}: {other} must be milliseconds, not {far_ms!r}", field="distances")
            pair = (one, other) if one < other else (other, one)
            if one == other or table.get(pair, far_ms) != far_ms:
                raise InvalidArgument(f"{one}: {other} is said twice, or of itself", field="distances")
            table[pair] = float(far_ms)
    return table
