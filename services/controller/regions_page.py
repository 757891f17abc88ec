"""The page ``GET /v1/regions``: regions and their load balancers for clients and name servers, the nearest first
(SkyWalker §4.1).

``?lat=50.1&lon=8.7`` or ``?region=eu-west`` says where the client is; ``&live=1`` omits regions that cannot serve it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from typing import Any
from urllib.parse import parse_qsl

from pinyon.core.errors import InvalidArgument, NotFound, PinyonError
from pinyon.federation.distances import Distances, Position
from pinyon.federation.view import Federation, LbState, Member, RegionView
from pinyon.routing.geography import ANYWHERE, Geography

QUERY_CHARS_MAX = 1024
_KNOWN = frozenset(("lat", "lon", "region", "live"))


@dataclass(frozen=True, slots=True)
class NearRegion:
    """A region; ``distance_km`` is from the client's position, ``distance_ms`` from its region (infinite: unknown)."""

    region: RegionView
    members: tuple[Member, ...]
    allowed: bool
    """True if law lets load balancers there serve requests from the client's region."""
    distance_km: float
    distance_ms: float

    @property
    def live(self) -> bool:
        """True if a load balancer there takes clients."""
        return any(member.state is LbState.LIVE and member.info.http_url for member in self.members)


def nearest(
    federation: Federation, geography: Geography, distances: Distances, position: Position | None = None, home: str = ""
) -> tuple[NearRegion, ...]:
    """Returns all regions: first those that serve and may, the nearest first; ties go by name.

    ``home`` is the client's region. Without it, the region nearest to its ``position`` counts as home, whether it
    serves or not: its law is the client's. Without either, no region is nearer than others. Raises :class:`NotFound`
    for an unknown region, and :class:`InvalidArgument` if both are given."""
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
            away_km.get(region.name, inf),
            distances.ms(home, region.name) if home else inf,
        )
        for region in federation.regions
    ]
    return tuple(sorted(found, key=_rank))


def _rank(near: NearRegion) -> tuple[bool, float, float, str]:
    return not (near.live and near.allowed), near.distance_km, near.distance_ms, near.region.name


class RegionsPage:
    """A WSGI application. ``show`` is called on the event loop, the rest in threads, which read immutable values."""

    def __init__(self) -> None:
        self._shown: tuple[Federation, Geography, Distances] = (Federation(), ANYWHERE, Distances())

    def show(self, federation: Federation, geography: Geography, distances: Distances) -> None:
        self._shown = (federation, geography, distances)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, document = self.answer(
            str(environ.get("REQUEST_METHOD", "")),
            str(environ.get("PATH_INFO", "")),
            str(environ.get("QUERY_STRING", "")),
        )
        body = json.dumps(document).encode()
        start_response(
            f"{status} {HTTPStatus(status).phrase}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Cache-Control", "max-age=1")],
        )
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]

    def answer(self, method: str, path: str, query: str) -> tuple[int, dict[str, Any]]:
        """Returns the HTTP status and the JSON document."""
        if path == "/health":
            return 200, {"status": "ok"}
        if path != "/v1/regions":
            return 404, _error("only /v1/regions and /health are here")
        if method not in ("GET", "HEAD"):
            return 405, _error("only GET and HEAD are answered")
        federation, geography, distances = self._shown
        try:
            position, home, live = _asked(query)
            found = nearest(federation, geography, distances, position, home)
        except PinyonError as error:
            return error.http_status, _error(error.message)
        regions = [_region(each, live) for each in found if not live or (each.live and each.allowed)]
        return 200, {"epoch": federation.epoch, "version": federation.version, "regions": regions}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def _asked(query: str) -> tuple[Position | None, str, bool]:
    """Returns position, region and ``live`` of a query. Raises :class:`InvalidArgument`."""
    if len(query) > QUERY_CHARS_MAX:
        raise InvalidArgument(f"the query has more than {QUERY_CHARS_MAX} characters")
    pairs = parse_qsl(query, keep_blank_values=True)
    values = dict(pairs)
    if len(values) < len(pairs) or not _KNOWN.issuperset(values):
        raise InvalidArgument("lat, lon, region and live may be asked for, each once")
    if ("lat" in values) != ("lon" in values):
        raise InvalidArgument("lat and lon belong together")
    position = None
    if "lat" in values:
        try:
            position = Position(float(values["lat"]), float(values["lon"]))
        except ValueError:
            raise InvalidArgument("lat and lon must be degrees") from None
    if values.get("live", "0") not in ("0", "1"):
        raise InvalidArgument("live must be 0 or 1")
    return position, values.get("region", ""), values.get("live") == "1"


def _region(near: NearRegion, live: bool) -> dict[str, Any]:
    region = near.region
    at = region.position
    return {
        "region": region.name,
        "tags": list(region.tags),
        "position": None if at is None else {"latitude": at.latitude, "longitude": at.longitude},
        "live": near.live,
        "allowed": near.allowed,
        "distance_km": _rounded(near.distance_km),
        "distance_ms": _rounded(near.distance_ms),
        "load_balancers": [
            {
                "id": member.info.lb_id,
                "http": member.info.http_url,
                "grpc": member.info.grpc_address,
                "state": member.state.value,
            }
            for member in near.members
            if not live or member.state is LbState.LIVE
        ],
    }


def _rounded(distance: float) -> float | None:
    return None if distance == inf else round(distance, 1)
