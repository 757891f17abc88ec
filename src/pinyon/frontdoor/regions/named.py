"""Regions as settings name them."""

from __future__ import annotations

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography
from pinyon.federation.position import Position
from pinyon.frontdoor.regions.peer import Peer

DELAY_MS_MAX = 5000.0


def parse_peers(text: str) -> list[Peer]:
    """``REGION=HOST:PORT`` with commas; a region may have several. Raises :class:`InvalidArgument`."""
    peers = []
    for part in text.split(",") if text else []:
        region, equals, address = part.strip().partition("=")
        if not equals:
            raise InvalidArgument(f"{part!r} is no REGION=HOST:PORT", field="peers")
        check_geography(region, "peers")
        parse_address(address)
        peers.append(Peer(f"{region}@{address}", region, address))
    if len({peer.name for peer in peers}) < len(peers):
        raise InvalidArgument("a peer is named twice", field="peers")
    return peers


def parse_position(text: str) -> Position | None:
    """``LATITUDE,LONGITUDE``; None of an empty text. Raises ``ValueError``."""
    if not text:
        return None
    latitude, _, longitude = text.partition(",")
    try:
        return Position(float(latitude), float(longitude))
    except (ValueError, InvalidArgument):
        raise ValueError(f"{text!r} is no LATITUDE,LONGITUDE in degrees") from None


def parse_delays(text: str) -> dict[str, float]:
    """``REGION=MILLISECONDS`` with commas, in seconds. Raises :class:`InvalidArgument`."""
    delays = {}
    for part in text.split(",") if text else []:
        region, _, number = part.strip().partition("=")
        try:
            delay_ms = float(number)
        except ValueError:
            delay_ms = -1.0
        if not region or not 0 <= delay_ms <= DELAY_MS_MAX:
            raise InvalidArgument(
                f"{part!r} is no REGION=MILLISECONDS, of at most {DELAY_MS_MAX:g}", field="test_region_delays_ms"
            )
        delays[region] = delay_ms / 1e3
    return delays
