"""The page ``GET /v1/regions``: regions and their load balancers for clients and name servers, the nearest first.

``?lat=50.1&lon=8.7`` or ``?region=eu-west`` says where the client is; ``&live=1`` leaves out all that do not serve it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from http import HTTPStatus
from math import inf
from typing import Any
from urllib.parse import parse_qsl

from pinyon.core.errors import InvalidArgument, PinyonError
from pinyon.federation.distances import Distances, Position
from pinyon.federation.nearest import NearRegion, nearest
from pinyon.federation.view import Federation, LbState
from pinyon.routing.geography import ANYWHERE, Geography

QUERY_CHARS_MAX = 1024
_KNOWN = frozenset(("lat", "lon", "region", "live"))


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
            [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "max-age=1"),
            ],
        )
        return [body]

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
