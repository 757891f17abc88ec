"""The federation as the controller tells it to load balancers: the same for all of them, complete, with a version.

Of views with one *epoch*, the one with the greater version is newer. Another epoch is another memory: that of a
controller that lost its file, or of another controller. Versions of different epochs cannot be compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from pinyon.federation.distances import Position

ClusterName = tuple[str, str]
"""A cluster's region and name."""


class LbState(Enum):
    """The state of a load balancer."""

    LIVE = "live"
    """The default, as long as nothing else is known."""
    DRAINING = "draining"
    """The load balancer takes nothing new."""
    FAILED = "failed"
    """The load balancer has been silent, and does not answer probes."""
    LEFT = "left"
    """The load balancer ended in good order."""


@dataclass(frozen=True, slots=True)
class OwnedCluster:
    """Instances that are served together: those of a conductor, or upstream servers."""

    name: str
    """The name, unique in its region; load balancers of a region that give the same name share the cluster."""
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


@dataclass(frozen=True, slots=True)
class RegionView:
    name: str
    tags: tuple[str, ...] = ()
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A load balancer. Its ``info`` names no clusters: the federation lists them."""

    info: LbInfo
    state: LbState
    connected: bool
    """True if it has a session with the controller."""
    displaced: tuple[str, ...] = ()
    """Boots from which this one has taken over the name, the latest last."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A group of instances, and the load balancers that serve them."""

    region: str
    """The region of the instances: its law binds every load balancer that serves them."""
    name: str
    conductor: str = ""
    upstreams: tuple[str, ...] = ()
    """The upstreams in force: including those that were added, without those that were removed."""
    removed: tuple[str, ...] = ()
    """Instances, by id or URL, that get no new requests."""
    added: tuple[str, ...] = ()
    """Upstreams that were added."""
    owners: tuple[str, ...] = ()
    """Ids of the load balancers that own the cluster."""
    adopter: str = ""
    """Id of the load balancer that serves the cluster for its owners; empty if none does."""

    @property
    def key(self) -> ClusterName:
        return self.region, self.name


@dataclass(frozen=True, slots=True)
class Federation:
    """The whole federation, each list in order of names."""

    epoch: str = ""
    version: int = 0
    regions: tuple[RegionView, ...] = ()
    members: tuple[Member, ...] = ()
    clusters: tuple[Cluster, ...] = ()

    def follows(self, known: Federation | None) -> bool:
        """Returns whether this view is news to a load balancer that knows ``known``."""
        return known is None or self.epoch != known.epoch or self.version > known.version

    def owned_by(self, lb_id: str) -> tuple[Cluster, ...]:
        return tuple([cluster for cluster in self.clusters if lb_id in cluster.owners])

    def adopted_by(self, lb_id: str) -> tuple[Cluster, ...]:
        return tuple([cluster for cluster in self.clusters if cluster.adopter == lb_id])

    def adopted_now(
        self, lb_id: str, silent_s: float, lease_s: float, reachable: Collection[str]
    ) -> tuple[Cluster, ...]:
        """Returns the adopted clusters that the load balancer still serves after the controller's silence.

        ``silent_s``: seconds since the controller's last message; ``reachable``: ids of load balancers that it reaches
        by itself. The controller may be gone, or only the path to it. Both cases must go well:

        - **the controller is gone**, and so is the owner: some load balancer must go on serving, for as long as it
          takes;
        - **the adopter is cut off** from the controller, and the owner is back: the adopter should let go.

        So an expired lease ends an adoption only if an owner serves. The adopter finds that out by itself, as it has
        streams to the other load balancers. While it reaches no owner, it goes on. A live owner always serves its own
        clusters. If two load balancers serve one cluster, they share its load, as two of one region always do: that
        costs balance, never correctness."""
        adopted = self.adopted_by(lb_id)
        if silent_s < lease_s:
            return adopted
        return tuple([cluster for cluster in adopted if not any(owner in reachable for owner in cluster.owners)])
