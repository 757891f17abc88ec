"""A load balancer as others know it."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.api.lb.v1 import peer_pb2


@dataclass(frozen=True, slots=True)
class Peer:
    """A load balancer: its name among all, where it is, where its gRPC for other load balancers listens, and of our own
    what it stands in front of."""

    name: str
    region: str
    address: str
    kind: peer_pb2.PeerKind = peer_pb2.PEER_KIND_UNSPECIFIED
