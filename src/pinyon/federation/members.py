"""The facts that load balancers report about themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pinyon.federation.distances import Position


class LbState(Enum):
    """The state of a load balancer."""

    LIVE = "live"
    """The default as long as nothing else is known."""
    DRAINING = "draining"
    """The load balancer takes nothing new."""
    FAILED = "failed"
    """The load balancer was not heard, and does not answer."""
    LEFT = "left"
    """The load balancer ended in good order."""


@dataclass(frozen=True, slots=True)
class OwnedCluster:
    """Instances that are served together: those of a conductor, or upstream servers."""

    name: str
    """Name, unique in its region; load balancers of a region that give the same name share the cluster."""
    conductor: str = ""
    """The conductor's gRPC address; empty if there is none."""
    upstreams: tuple[str, ...] = ()
    """Base URLs."""


@dataclass(frozen=True, slots=True)
class LbInfo:
    """The identity of a load balancer."""

    lb_id: str
    boot_id: str
    """An id that changes whenever the process restarts."""
    region: str
    grpc_address: str
    """``host:port`` at which other load balancers and the controller reach it."""
    http_url: str = ""
    """Base URL for its clients; empty if there is none."""
    clusters: tuple[OwnedCluster, ...] = ()
    position: Position | None = None
    """The position of its region."""
