"""What load balancers say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from pinyon.federation.position import Position

_NONE: Mapping[str, int] = MappingProxyType({})


class LbState(Enum):
    """Whether a load balancer serves."""

    LIVE = "live"
    """As far as anybody knows."""
    DRAINING = "draining"
    """It takes nothing new."""
    FAILED = "failed"
    """It was not heard, and does not answer."""
    LEFT = "left"
    """It ended in good order."""


@dataclass(frozen=True, slots=True)
class OwnedCluster:
    """Instances that are served together: those of a conductor, or upstream servers."""

    name: str
    """Unique in its region; load balancers of a region that give the same name share it."""
    conductor: str = ""
    """Its gRPC address; empty: it has none."""
    upstreams: tuple[str, ...] = ()
    """Base URLs."""


@dataclass(frozen=True, slots=True)
class LbInfo:
    """Who a load balancer is."""

    lb_id: str
    boot_id: str
    """Changes whenever the process restarts."""
    region: str
    grpc_address: str
    """``host:port`` that other load balancers and the controller reach it at."""
    http_url: str = ""
    """Base URL for its clients; empty: none."""
    clusters: tuple[OwnedCluster, ...] = ()
    position: Position | None = None
    """Of its region."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """Requests at one instance, as one load balancer sees it."""

    name: str
    pending: int = 0
    """Accepted, and not yet in a batch."""
    running: int = 0
    outstanding: int = 0
    """Sent there by this load balancer, and not ended."""
    available: bool = False


@dataclass(frozen=True, slots=True)
class LbLoad:
    """A load balancer's report. Totals count from its start."""

    queue: int = 0
    in_flight: int = 0
    available_instances: int = 0
    instances: int = 0
    forwarded_total: int = 0
    accepted_total: int = 0
    hit_chunks_total: int = 0
    asked_chunks_total: int = 0
    forwarded_by_region: Mapping[str, int] = field(default_factory=lambda: _NONE)
    accepted_by_region: Mapping[str, int] = field(default_factory=lambda: _NONE)
    per_instance: tuple[InstanceLoad, ...] = ()
