"""The load balancers for a client: those that live, the nearest first (SkyWalker §4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.federation.distances import Distances, Position
from pinyon.federation.view import Federation, LbState, Member, RegionView
from pinyon.routing.geography import Geography


@dataclass(frozen=True, slots=True)
class NearRegion:
    """A region; ``distance_km`` is from the client's position, ``distance_ms`` from its region (infinite: unknown)."""

    region: RegionView
    members: tuple[Member, ...]
    allowed: bool
    """True if law lets requests from the client's region be served there."""
    distance_km: float
    distance_ms: float

    @property
    def live(self) -> bool:
        """True if a load balancer there takes clients."""
        return any(member.state is LbState.LIVE and member.info.http_url for member in self.members)


def nearest(
    federation: Federation,
    geography: Geography,
    distances: Distances,
    position: Position | None = None,
    home: str = "",
) -> tuple[NearRegion, ...]:
    """Returns all regions: first those that serve and may, the nearest first, then by name.

    ``home`` is the client's region. Without it, the region nearest to its ``position`` counts, whether it serves or
    not: its law is the client's. Without either, no region is nearer than others. Raises :class:`NotFound` for an
    unknown region, and :class:`InvalidArgument` if both are given.
    """
    if position is not None and home:
        raise InvalidArgument("either a position or a region", field="region")
    if home and not any(region.name == home for region in federation.regions):
        raise NotFound(f"there is no region {home!r}", field="region")
    away_km: dict[str, float] = {}
    if position is not None:
        for region in federation.regions:
            if region.position is not None:
                away_km[region.name] = position.km_to(region.position)
        home = min([(far, name) for name, far in away_km.items()], default=(0.0, ""))[1]
    found = [
        NearRegion(
            region,
            tuple([member for member in federation.members if member.info.region == region.name]),
            not home or geography.sends(home, region.name).allowed,
            away_km.get(region.name, math.inf),
            distances.ms(home, region.name) if home else math.inf,
        )
        for region in federation.regions
    ]
    return tuple(sorted(found, key=_rank))


def _rank(near: NearRegion) -> tuple[bool, float, float, str]:
    return not (near.live and near.allowed), near.distance_km, near.distance_ms, near.region.name
