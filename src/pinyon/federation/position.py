"""Positions on Earth."""

from __future__ import annotations

from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt

from pinyon.core.errors import InvalidArgument

EARTH_RADIUS_KM = 6371.0088
"""Mean radius of the IUGG."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in degrees. Raises :class:`InvalidArgument` for a place that is not on Earth."""

    latitude: float
    """North of the equator, in [-90, 90]."""
    longitude: float
    """East of Greenwich, in [-180, 180]."""

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
