"""A load balancer as others know it, and as settings name it."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography


@dataclass(frozen=True, slots=True)
class PeerBalancer:
    """A load balancer: its unique name, its region, and the gRPC address for other load balancers. ``kind`` says what
    our own stands in front of."""

    name: str
    region: str
    address: str
    kind: peer_pb2.PeerKind = peer_pb2.PEER_KIND_UNSPECIFIED


def parse_peers(text: str) -> list[PeerBalancer]:
    """Parses ``REGION=HOST:PORT`` with commas; a region may have several. Raises :class:`InvalidArgument`."""
    peers = []
    for part in text.split(",") if text else []:
        region, equals, address = part.strip().partition("=")
        if not equals:
            raise InvalidArgument(f"{part!r} is no REGION=HOST:PORT", field="peers")
        check_geography(region, "peers")
        parse_address(address)
        peers.append(PeerBalancer(f"{region}@{address}", region, address))
    if len({peer.name for peer in peers}) < len(peers):
        raise InvalidArgument("a peer is named twice", field="peers")
    return peers
