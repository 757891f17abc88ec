"""The federation as load balancers are told it: the same for all of them, whole, with a version.

Of views with one *epoch* the greater version is the newer one. Another epoch is another memory: of a controller that
lost its file, or of another controller; its versions say nothing about the first one's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.federation.members import LbInfo, LbState
from pinyon.federation.position import Position

ClusterName = tuple[str, str]
"""Region and name."""


@dataclass(frozen=True, slots=True)
class Region:
    name: str
    tags: tuple[str, ...] = ()
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A load balancer. Its clusters are in the list of these: ``info`` names none."""

    info: LbInfo
    state: LbState
    connected: bool
    """It has a session with the controller."""
    displaced: tuple[str, ...] = ()
    """Boots that this one has taken the name from, the latest last."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Instances, and who serves them."""

    region: str
    """Where the instances are: what law says of that counts for whoever serves them."""
    name: str
    conductor: str = ""
    upstreams: tuple[str, ...] = ()
    """That count now: with those that were added, without those that were removed."""
    removed: tuple[str, ...] = ()
    """Instances, by id or URL, that get nothing new."""
    added: tuple[str, ...] = ()
    """Of the upstreams, those that were added."""
    owners: tuple[str, ...] = ()
    """Ids of the load balancers whose own it is."""
    adopter: str = ""
    """Id of who serves it for them; empty: nobody."""

    @property
    def key(self) -> ClusterName:
        return self.region, self.name


@dataclass(frozen=True, slots=True)
class Federation:
    """Everything that is known, each list in order of names."""

    epoch: str = ""
    version: int = 0
    regions: tuple[Region, ...] = ()
    members: tuple[Member, ...] = ()
    clusters: tuple[Cluster, ...] = ()

    def follows(self, known: Federation | None) -> bool:
        """Whether it is news to who knows the other one."""
        return known is None or self.epoch != known.epoch or self.version > known.version

    def peers_of(self, lb_id: str) -> tuple[Member, ...]:
        """The others, whatever their state is."""
        return tuple([member for member in self.members if member.info.lb_id != lb_id])

    def owned_by(self, lb_id: str) -> tuple[Cluster, ...]:
        return tuple([cluster for cluster in self.clusters if lb_id in cluster.owners])

    def adopted_by(self, lb_id: str) -> tuple[Cluster, ...]:
        return tuple([cluster for cluster in self.clusters if cluster.adopter == lb_id])
