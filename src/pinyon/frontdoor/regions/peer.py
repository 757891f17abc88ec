"""A load balancer as others know it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Peer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A load balancer: its name among all, where it is, and where its gRPC for other load balancers listens."""

    name: str
    region: str
    address: str
